"""A network of one spatial axis in the C backend: float32, bfloat16 and int8 with calibrated ranges.

``python benchmarks/bench_signals.py``: microseconds of process time on one thread, and errors against float32.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
from interleaved import interleaved  # noqa: E402

import mithril as ml  # noqa: E402
from mithril.models import Add, Conv1d, Flatten, GlobalAvgPool1d, Linear, MaxPool1d, Model, Relu  # noqa: E402

CHANNELS, BLOCKS = 64, 4


def residual(model: Any, k: int, x: str) -> str:
    """Add a block of two convolutions, the second one dilated, and return its result."""
    model |= Conv1d(CHANNELS, CHANNELS, 3, padding=1, name=f"first{k}")(input=x, output=f"a{k}")
    model |= Relu()(input=f"a{k}", output=f"b{k}")
    model |= Conv1d(CHANNELS, CHANNELS, 3, padding=2, dilation=2, name=f"second{k}")(input=f"b{k}", output=f"c{k}")
    model |= Add()(left=f"c{k}", right=x, output=f"d{k}")
    model |= Relu()(input=f"d{k}", output=f"block{k}")
    return f"block{k}"


def network() -> Any:
    model = Model()
    model |= Conv1d(16, CHANNELS, 7, stride=2, padding=3, name="stem")(input="input", output="h")
    model |= Relu()(input="h", output="r")
    model |= MaxPool1d(3, stride=2, padding=1)(input="r", output="x")
    x = "x"
    for k in range(BLOCKS):
        x = residual(model, k, x)
    model |= GlobalAvgPool1d()(input=x, output="mean")
    model |= Flatten()(input="mean", output="row")
    model |= Linear(10, name="head")(input="row", output="output")
    return model


def measure(batch: int, length: int) -> None:
    model, shapes = network(), {"input": [batch, 16, length]}
    samples = [{"input": np.random.default_rng(k).standard_normal(shapes["input"], np.float32)} for k in range(32)]
    exact = ml.compile(model, "c", shapes=shapes, inference=True)
    exact.bind(exact.randomize_params(seed=0))
    kinds: dict[str, dict[str, Any]] = {
        "float32": {},
        "bfloat16": {"precision": "bfloat16"},
        "int8": {"quantization": {"ranges": ml.calibrate_ranges(exact, samples)}},
    }
    calls, errors, expected = {}, {}, exact(samples[0])["output"]
    for kind, options in kinds.items():
        compiled = ml.compile(model, "c", shapes=shapes, static_inference=True, **options).bind(exact.params)
        result = np.asarray(compiled(samples[0])["output"], np.float32)
        errors[kind] = np.linalg.norm(result - expected) / np.linalg.norm(expected)
        calls[kind] = partial(compiled, samples[0])
    seconds = interleaved(calls, seconds=3)
    print(f"{batch} x {length}: " + ", ".join(f"{k} {1e6 * seconds[k]:.0f} ({errors[k]:.2%})" for k in kinds))


if __name__ == "__main__":
    for batch, length in ((1, 1024), (8, 1024), (1, 16000)):
        measure(batch, length)
