"""Products of other dtypes on the C backend: their time against float32's on the same sizes, and against torch's.

``python benchmarks/bench_c_dtypes.py [--threads 2]``: the best of interleaved rounds in one process. Above 1: faster.
``int8`` is float32 rows times weights of eight bits, whose columns are scaled afterwards, as exported programs have
them under ``mobile_options={"quantization": "int8"}``.
"""

from __future__ import annotations

import os
import sys

os.environ["OMP_NUM_THREADS"] = sys.argv[sys.argv.index("--threads") + 1] if "--threads" in sys.argv else "1"
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["TVM_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from interleaved import interleaved

import mithril as ml
from mithril import ops
from mithril.models import IOKey, Model

THREADS = int(os.environ["OMP_NUM_THREADS"])
torch.set_num_threads(THREADS)
RNG = np.random.default_rng(0)
DTYPES = {
    "bfloat16": (ml_dtypes.bfloat16, torch.bfloat16),
    "float16": (np.float16, torch.float16),
    "float64": (np.float64, torch.float64),
    "int32": (np.int32, torch.int32),
    "int8": (np.int8, torch.int8),
}
SIZES = [(512, 512, 512), (32, 512, 784), (4, 1024, 1024), (1, 4096, 4096)]


def times_transposed(x: Any, w: Any) -> Any:
    return ops.matmul(x, ops.transpose(w, perm=(1, 0)))


def scaled(x: Any, q: Any, s: Any) -> Any:
    return times_transposed(x, ops.cast(q, dtype="float32")) * s


def calling(function: Callable[..., Any], *arrays: Any) -> Callable[[], Any]:
    inputs = {f"x{k}": a for k, a in enumerate(arrays)}
    keys = [IOKey(n) for n in inputs]
    model = Model.create(inputs=keys, outputs=function(*keys))
    shapes, types = {n: list(a.shape) for n, a in inputs.items()}, {n: a.dtype.name for n, a in inputs.items()}
    compiled = ml.compile(model, "c", shapes=shapes, types=types, num_threads=THREADS)
    return lambda: compiled.evaluate(inputs)


def measure(name: str, m: int, n: int, k: int) -> None:
    kind, peer = DTYPES[name]
    x, w = (RNG.integers(-9, 10, shape).astype(np.float32) for shape in ((m, k), (n, k)))
    s = RNG.standard_normal(n).astype(np.float32)
    tx, tw = torch.from_numpy(x), torch.from_numpy(w).to(peer)
    if name == "int8":
        call = calling(scaled, x, w.astype(kind), s)
        by_torch = lambda: (tx @ tw.float().t()) * torch.from_numpy(s)  # noqa: E731
    else:
        call, tx = calling(times_transposed, x.astype(kind), w.astype(kind)), tx.to(peer)
        by_torch = lambda: tx @ tw.t()  # noqa: E731
    clock = time.process_time if THREADS == 1 else time.perf_counter
    calls = {"ours": call, "float32": calling(times_transposed, x, w), "torch": by_torch}
    seconds = interleaved(calls, 1.0, min_rounds=5, clock=clock)
    speed, read = 2 * m * n * k / seconds["ours"] / 1e9, n * k * np.dtype(kind).itemsize / seconds["ours"] / 1e9
    against = ", ".join(f"{other} {seconds[other] / seconds['ours']:.2f}" for other in ("float32", "torch"))
    print(f"{name} {m}x{n}x{k}: {seconds['ours'] * 1e6:.1f} us, {speed:.0f} GFLOP/s, reads {read:.0f} GB/s; {against}")


if __name__ == "__main__":
    with torch.no_grad():
        for dtype in DTYPES:
            for sizes in SIZES:
                measure(dtype, *sizes)
