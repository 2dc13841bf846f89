"""Programs of the C backend for any size against programs of exact sizes, alternately in one process.

    python benchmarks/bench_sizes.py [--models mlp,gpt,resnet] [--int8] [--rounds 30]

A row is a size, the least processor time of both programs in microseconds, and their ratio. One thread. ``--int8``
quantizes statically, with calibrated ranges and embedded weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import mithril as ml
from mithril.models import (
    BatchNorm2d,
    Conv2d,
    Flatten,
    Gelu,
    GlobalAvgPool2d,
    IOKey,
    LayerNorm,
    Linear,
    Model,
    MultiHeadAttention,
    Relu,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


def mlp():
    """Return a perceptron of three layers, its open shape and the sizes to run."""
    x = IOKey("input")
    for width in (512, 512):
        x = Relu()(Linear(width)(x))
    shapes = [(n, 784) for n in (1, 7, 32, 100, 256, 1000)]
    return Model.create(outputs={"output": Linear(10)(x)}), (None, 784), shapes


def gpt():
    """Return a transformer block of 384 features on sequences of 64 tokens, with an open batch."""
    x = IOKey("input")
    y = x + MultiHeadAttention(384, 6, causal=True)(LayerNorm(384)(x))
    y = y + Linear(384)(Gelu(approximate="tanh")(Linear(1536)(LayerNorm(384)(y))))
    return Model.create(outputs={"output": y}), (None, 64, 384), [(n, 64, 384) for n in (1, 2, 3, 8)]


def resnet():
    """Return ResNet-18 with an open batch of images of 64 pixels."""
    from resnet18 import resnet18

    return resnet18(), (None, 3, 64, 64), [(n, 3, 64, 64) for n in (1, 3, 8, 32)]


def images():
    """Return ResNet-18 with an open batch of images of any size."""
    from resnet18 import resnet18

    shapes = [(1, 3, 64, 64), (1, 3, 160, 160), (1, 3, 224, 224), (2, 3, 224, 224), (8, 3, 64, 64)]
    return resnet18(), (None, 3, None, None), shapes


def mobile():
    """Return ten blocks of MobileNet with an open batch of images of 64 pixels."""
    x = Relu()(BatchNorm2d(32)(Conv2d(3, 32, kernel_size=3, stride=2, padding=1, bias=False)(IOKey("input"))))
    channels = 32
    for width, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 4):
        settings = {"kernel_size": 3, "stride": stride, "padding": 1, "bias": False}
        x = Relu()(BatchNorm2d(channels)(Conv2d(channels, channels, groups=channels, **settings)(x)))
        x = Relu()(BatchNorm2d(width)(Conv2d(channels, width, kernel_size=1, bias=False)(x)))
        channels = width
    model = Model.create(outputs={"output": Linear(1000)(Flatten()(GlobalAvgPool2d()(x)))})
    return model, (None, 3, 64, 64), [(n, 3, 64, 64) for n in (1, 3, 8, 32)]


def fastest(*runs, rounds=30):
    """Return the least seconds of processor time of each function, called alternately."""
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for k, run in enumerate(runs):
            start = time.thread_time()
            run()
            best[k] = min(best[k], time.thread_time() - start)
    return best


def floating(model, shape, _):
    """Return the float32 program of a shape with its parameters."""
    compiled = ml.compile(model, "c", inference=True, shapes={"input": list(shape)}, num_threads=1)
    compiled.bind(compiled.randomize_params(0))
    return compiled


def narrow(model, shape, ranges):
    """Return the int8 program of a shape with its parameters."""
    options = {"static_inference": True, "quantization": {"ranges": ranges}}
    compiled = ml.compile(model, "c", shapes={"input": list(shape)}, num_threads=1, **options)
    compiled.bind(compiled.randomize_params(0))
    return compiled


def main():
    """Print a row for each model and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="mlp,gpt,resnet")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    for name in options.models.split(","):
        model, shape, shapes = globals()[name]()
        rng, ranges = np.random.default_rng(0), None
        if options.int8:
            sample = floating(model, shapes[0], None)
            ranges = ml.calibrate_ranges(
                sample, [{"input": rng.normal(size=shapes[0]).astype(np.float32)} for _ in range(32)]
            )
        program = narrow if options.int8 else floating
        any_size = program(model, shape, ranges)
        print(name, any_size.decisions if not options.int8 else "int8", flush=True)
        for exact_shape in shapes:
            x = {"input": rng.normal(size=exact_shape).astype(np.float32)}
            exact = program(model, exact_shape, ranges)
            results = any_size(x)["output"], exact(x)["output"]
            bound = 0.02 if options.int8 else 1e-4  # rounded sums of two orders differ by a code
            np.testing.assert_allclose(*results, rtol=0, atol=bound * np.abs(results[1]).max())
            one, other = fastest(lambda: any_size(x), lambda: exact(x), rounds=options.rounds)
            print(f"{name:7} {exact_shape!s:18} {one * 1e6:9.0f} {other * 1e6:9.0f} {one / other:6.2f}", flush=True)
        print(f"{name:7} programs: {len(any_size.programs)}", flush=True)


if __name__ == "__main__":
    main()
