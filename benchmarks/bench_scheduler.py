"""Kernels of the C backend scheduled by TVM against those of its own templates, on one thread: the ratios by which
``CBackend(scheduler="auto")`` selects.

``python benchmarks/bench_scheduler.py [NAME ...]``: processor time of runs and of compilations, the best of interleaved
rounds, and whether both give the same bits. Ratios below 1 are faster under TVM's schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import numpy as np

from mithril import ops
from mithril.graph import Builder, Graph, decompose
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.cpu_info import vector_bytes
from mithril_cbackend.graph import fusion
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.executable import Executable
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def window(kernel: int, stride: int, padding: int) -> dict[str, Any]:
    return {"kernel": (kernel, kernel), "stride": (stride, stride), "padding": ((padding, padding),) * 2}


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gelu 100,000": (ops.gelu, (normal(100_000),)),
    "tanh of a broadcast chain, 16x64x400": (
        lambda x, a, b: ops.tanh((x + a) * b - ops.relu(x)),
        (normal(16, 64, 400), normal(64, 1), normal(400)),
    ),
    "where 100,000": (lambda x, y: ops.where(x > y, x, y * 2.0), (normal(100_000), normal(100_000))),
    "bias and clamp, 1001x37": (lambda x, b: ops.clip(x + b, low=-1.0, high=1.0), (normal(1001, 37), normal(37))),
    "sum of the last axis, 1000x300": (lambda x: ops.sum(x, axis=-1), (normal(1000, 300),)),
    "max of the last axis, 1000x512": (lambda x: ops.max(x, axis=-1), (normal(1000, 512),)),
    "mean of rows, 1000x37": (lambda x: ops.mean(x, axis=-1), (normal(1000, 37),)),
    "mean over images, 4x64x30x30": (lambda x: ops.mean(ops.abs(x), axis=(2, 3)), (normal(4, 64, 30, 30),)),
    "mean over batch and image, 8x64x28x28": (lambda x: ops.mean(x, axis=(0, 2, 3)), (normal(8, 64, 28, 28),)),
    "sum of all, 100,000": (lambda x: ops.sum(x), (normal(100_000),)),
    "sum of the first axis, 1000x320": (lambda x: ops.sum(x, axis=0), (normal(1000, 320),)),
    "sum of squares of the first axis, 1000x37": (lambda x: ops.sum(x * x, axis=0), (normal(1000, 37),)),
    "max of a middle axis, 50x60x70": (lambda x: ops.max(x, axis=1), (normal(50, 60, 70),)),
    "sum of two axes, 20x30x20x64": (lambda x: ops.sum(x, axis=(0, 2)), (normal(20, 30, 20, 64),)),
    "softmax 64x1000": (lambda x: ops.softmax(x, axis=-1), (normal(64, 1000),)),
    "softmax 1000x37": (lambda x: ops.softmax(x, axis=-1), (normal(1000, 37),)),
    "layer norm 128x768": (
        lambda x, w, b: ops.layer_norm(x, w, b),
        (normal(128, 768), normal(768), normal(768)),
    ),
    "RMS norm 64x512": (lambda x, w: ops.rms_norm(x, w), (normal(64, 512), normal(512))),
    "max pool 3x3/2, 64x112x112": (lambda x: ops.max_pool(x, **window(3, 2, 1)), (normal(1, 64, 112, 112),)),
    "max pool 3x3/2, 64x56x56": (lambda x: ops.max_pool(x, **window(3, 2, 1)), (normal(1, 64, 56, 56),)),
    "max pool 2x2, 64x56x56": (lambda x: ops.max_pool(x, **window(2, 2, 0)), (normal(1, 64, 56, 56),)),
    "max pool 3x3/1, 64x28x28": (lambda x: ops.max_pool(x, **window(3, 1, 1)), (normal(1, 64, 28, 28),)),
    "average pool 2x2, 64x56x56": (lambda x: ops.avg_pool(x, **window(2, 2, 0)), (normal(1, 64, 56, 56),)),
    "average pool 3x3/1, 64x28x28": (lambda x: ops.avg_pool(x, **window(3, 1, 1)), (normal(1, 64, 28, 28),)),
    "average pool 8x8, 64x8x8": (lambda x: ops.avg_pool(x, **window(8, 8, 0)), (normal(1, 64, 8, 8),)),
}


def graph_of(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Graph:
    with Builder() as b:
        result = function(*[b.input(f"x{k}", x.shape, x.dtype.name) for k, x in enumerate(arrays)])
    return decompose(b.build({"y": result}), fusion.is_lowered, "c")


def compiled(graph: Graph, scheduler: str) -> Executable:
    machine = Machine(
        machine_code.host_cpu(),
        1,
        vector_bytes(),
        features=machine_code.selected_features(None),
        scheduler=scheduler,
    )
    return compile_graph.compiled(graph, machine, CompileTarget())


def measure(name: str) -> None:
    function, arrays = CASES[name]
    graph, inputs = graph_of(function, arrays), {f"x{k}": x for k, x in enumerate(arrays)}
    programs = {s: compiled(graph, s) for s in ("own", "tvm")}
    results = {s: np.array(p({}, inputs)["y"]) for s, p in programs.items()}
    runs = {s: lambda p=p: p.run(p.address) for s, p in programs.items()}
    run = harness.interleaved(runs, seconds=1.0)
    compilations = {s: lambda s=s: compiled(graph, s) for s in programs}
    build = harness.interleaved(compilations, seconds=0.5, min_rounds=5)
    kernels = programs["tvm"].program.kernels.values()
    by = f"{sum(k.scheduled is not None for k in kernels)}/{len(kernels)}"
    equal = "=" if np.array_equal(results["own"], results["tvm"], equal_nan=True) else " "
    print(
        f"{name:<40} {by:>5} {run['own'] * 1e6:8.1f} {run['tvm'] * 1e6:8.1f} {equal} {run['tvm'] / run['own']:5.2f}   "
        f"{build['own'] * 1e3:6.1f} {build['tvm'] * 1e3:6.1f}   {build['tvm'] / build['own']:5.2f}",
        flush=True,
    )


if __name__ == "__main__":
    print(f"{'':<40} {'tvm':>5} {'own us':>8} {'tvm us':>8}   ratio   own ms  tvm ms   ratio of compilation")
    for case in harness.selected(CASES, harness.arguments(__doc__).words):
        measure(case)
