"""Programs of the C backend for any size against programs of exact sizes, alternately in one process.

    python benchmarks/bench_sizes.py [--models mlp,gpt,resnet]

A row is a size, the least time of both programs in microseconds, and their ratio. One thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import mithril as ml
from mithril.models import Gelu, IOKey, LayerNorm, Linear, Model, MultiHeadAttention, Relu

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

    return resnet18(), (None, 3, 64, 64), [(n, 3, 64, 64) for n in (1, 3, 8)]


def fastest(*runs, rounds=30):
    """Return the least seconds of each function, called alternately."""
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for k, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[k] = min(best[k], time.perf_counter() - start)
    return best


def main():
    """Print a row for each model and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="mlp,gpt,resnet")
    for name in parser.parse_args().models.split(","):
        model, shape, shapes = globals()[name]()
        any_size = ml.compile(model, "c", inference=True, shapes={"input": list(shape)}, num_threads=1)
        print(name, any_size.decisions, flush=True)
        rng = np.random.default_rng(0)
        for exact_shape in shapes:
            x = {"input": rng.normal(size=exact_shape).astype(np.float32)}
            exact = ml.compile(model, "c", inference=True, shapes={"input": list(exact_shape)}, num_threads=1)
            params = exact.randomize_params(0)
            results = any_size.evaluate(params, x)["output"], exact.evaluate(params, x)["output"]
            np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
            one, other = fastest(lambda: any_size.evaluate(params, x), lambda: exact.evaluate(params, x))
            print(f"{name:7} {exact_shape!s:18} {one * 1e6:9.0f} {other * 1e6:9.0f} {one / other:6.2f}", flush=True)
        print(f"{name:7} programs: {len(any_size.programs)}", flush=True)


if __name__ == "__main__":
    main()
