"""Programs of the C backend for any size against programs of exact sizes, alternately in one process.

    python benchmarks/bench_sizes.py [--models mlp,gpt,text,resnet,images,mobile] [--int8 | --bf16] [--rounds 30]

A row is a size, the least processor time of both programs in microseconds, and their ratio. One thread. ``--int8``
quantizes statically, with calibrated ranges and embedded weights; ``--bf16`` computes products in bfloat16. The last
row is the processor time of compiling the program for any size and that of one exact program, with its first call.
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


def block():
    """Return a transformer block of 384 features."""
    x = IOKey("input")
    y = x + MultiHeadAttention(384, 6, causal=True)(LayerNorm(384)(x))
    y = y + Linear(384)(Gelu(approximate="tanh")(Linear(1536)(LayerNorm(384)(y))))
    return Model.create(outputs={"output": y})


def gpt():
    """Return a transformer block on sequences of 64 tokens, with an open batch."""
    return block(), (None, 64, 384), [(n, 64, 384) for n in (1, 2, 3, 8)]


def text():
    """Return a transformer block with an open batch of sequences of any length."""
    sizes = ((1, 1), (1, 5), (1, 16), (1, 63), (1, 200), (1, 512), (4, 33))
    return block(), (None, None, 384), [(*n, 384) for n in sizes]


def resnet():
    """Return ResNet-18 with an open batch of images of 64 pixels."""
    from resnet18 import resnet18

    return resnet18(), (None, 3, 64, 64), [(n, 3, 64, 64) for n in (1, 3, 8, 32, 64)]


def images():
    """Return ResNet-18 with an open batch of images of any size."""
    from resnet18 import resnet18

    sizes = (
        (1, 32, 32),
        (1, 64, 64),
        (1, 97, 131),
        (1, 160, 160),
        (1, 224, 224),
        (2, 224, 160),
        (3, 75, 50),
        (8, 64, 64),
    )
    return resnet18(), (None, 3, None, None), [(n, 3, *sides) for n, *sides in sizes]


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


def compiled(model, shape, ranges, kind):
    """Return the program of a shape with its parameters."""
    options = {
        "float32": {"inference": True},
        "bf16": {"static_inference": True, "mixed_precision": True},
        "int8": {"static_inference": True, "quantization": {"ranges": ranges}},
    }
    program = ml.compile(model, "c", shapes={"input": list(shape)}, num_threads=1, **options[kind])
    program.bind(program.randomize_params(0))
    return program


BOUNDS = {"float32": 1e-4, "bf16": 0.02, "int8": 0.02}  # rounded sums of two orders differ by a code


def main():
    """Print a row for each model and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="mlp,gpt,resnet")
    kinds = parser.add_mutually_exclusive_group()
    for kind in ("int8", "bf16"):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, default="float32")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    for name in options.models.split(","):
        model, shape, shapes = globals()[name]()
        rng, ranges = np.random.default_rng(0), None
        if options.kind == "int8":
            sample = compiled(model, shapes[0], None, "float32")
            inputs = [{"input": rng.normal(size=shapes[0]).astype(np.float32)} for _ in range(32)]
            ranges = ml.calibrate_ranges(sample, inputs)
        seconds = {}

        def program(sizes, x):
            start = time.process_time()
            result = compiled(model, sizes, ranges, options.kind)
            result(x)
            seconds.setdefault(sizes, time.process_time() - start)
            return result

        any_size = None
        for exact_shape in shapes:
            x = {"input": rng.normal(size=exact_shape).astype(np.float32)}
            any_size = any_size or program(shape, x)
            exact = program(exact_shape, x)
            results = any_size(x)["output"], exact(x)["output"]
            np.testing.assert_allclose(*results, rtol=0, atol=BOUNDS[options.kind] * np.abs(results[1]).max())
            one, other = fastest(lambda: any_size(x), lambda: exact(x), rounds=options.rounds)
            row = f"{name:7} {options.kind:7} {exact_shape!s:18} {one * 1e6:9.0f} {other * 1e6:9.0f}"
            print(f"{row} {one / other:6.2f}", flush=True)
        times = f"{seconds[shape]:.1f} s, exact {seconds[shapes[-1]]:.1f} s"
        print(f"{name:7} programs: {len(any_size.programs)}, compiled in {times}", flush=True)


if __name__ == "__main__":
    main()
