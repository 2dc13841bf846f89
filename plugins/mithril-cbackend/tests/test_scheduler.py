"""Kernels whose loops TVM schedules: the bits of the templates, in the process and as C, and the record of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_c
import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, Graph, decompose
from mithril.models import Conv2d, Linear, MaxPool2d, Relu, Sequential
from mithril_cbackend import tir as t
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph import fusion
from mithril_cbackend.lowering.element import kernel_builder
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.executable import Executable
from mithril_cbackend.schedule import tuning
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return (RNG.standard_normal(shape) * 9).astype(dtype)


WITH_NAN = normal(5, 37)
WITH_NAN[0, 3], WITH_NAN[1, 36], WITH_NAN[2, 0] = np.nan, np.inf, -np.inf
POOL: dict[str, Any] = {"kernel": (3, 3), "stride": (2, 2), "padding": ((1, 1), (1, 1))}
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "ragged rows": (lambda x, b: ops.exp(x * 0.1) + b, (normal(7, 37), normal(37))),
    "less than a vector": (lambda x: ops.tanh(x), (normal(3, 5),)),
    "short rows": (lambda x, b: x * 2.0 + b, (normal(6, 5), normal(5))),
    "a long row": (lambda x: ops.sigmoid(x) * x, (normal(1003),)),
    "broadcast axes": (lambda x, a, b: x * a - b, (normal(3, 4, 21), normal(4, 1), normal(3, 1, 21))),
    "nan and infinities": (lambda x: ops.clip(ops.maximum(x, 0.5), low=-1.0, high=3.0), (WITH_NAN,)),
    "comparisons": (lambda x, y: (x > y) & (x < 3.0), (WITH_NAN, normal(5, 37))),
    "int8": (lambda x: x * x + x, (normal(3, 41, dtype="int8"),)),
    "int64": (lambda x: ops.abs(x) - 7, (normal(3, 19, dtype="int64"),)),
    "float16": (lambda x: x * x + x, (normal(2, 35, dtype="float16"),)),
    "float64": (lambda x: ops.sin(x), (normal(2, 35, dtype="float64"),)),
    "casts": (lambda x: ops.cast(x, dtype="float32") / 255.0 - 0.5, (normal(3, 50, dtype="uint8"),)),
    "moved axes": (lambda x: ops.flip(x, axis=(1,)) + ops.concat([x, x], axis=0)[2:5], (normal(3, 37),)),
    "sums of long rows": (lambda x: ops.sum(x * x, axis=-1) + 1.0, (normal(3, 300),)),
    "sums of short rows": (lambda x: ops.sum(x, axis=(1, 3)), (normal(3, 4, 2, 17),)),
    "a sum of all": (lambda x: ops.sum(x), (normal(5, 211),)),
    "means of columns": (lambda x: ops.mean(x, axis=0, keepdims=True) * 2.0, (normal(9, 135),)),
    "maxima of columns with nan": (lambda x: ops.max(x, axis=0), (WITH_NAN,)),
    "minima of rows with nan": (lambda x: ops.min(x, axis=-1), (WITH_NAN,)),
    "axes apart": (lambda x: ops.min(x, axis=(0, 2)), (normal(2, 3, 4, 70),)),
    "all and any": (lambda x: ops.all(x > -9.0, axis=1) | ops.any(x > 20.0, axis=1), (normal(4, 3, 37),)),
    "any and all along rows": (lambda x: ops.any(x > 2.0, axis=-1) | ops.all(x > -2.0, axis=-1), (normal(4, 97),)),
    "products of int32": (lambda x: ops.prod(x, axis=1), (normal(3, 4, 19, dtype="int32"),)),
    "sums of float16": (lambda x: ops.sum(x, axis=-1), (normal(3, 40, dtype="float16"),)),
    "softmax of long rows": (lambda x: ops.softmax(x, axis=-1), (normal(3, 300),)),
    "softmax of short rows": (lambda x: ops.softmax(x, axis=-1), (normal(2, 3, 17),)),
    "softmax with nan": (lambda x: ops.softmax(x, axis=-1), (WITH_NAN,)),
    "layer norm": (lambda x, w, b: ops.layer_norm(x, w, b), (normal(4, 135), normal(135), normal(135))),
    "RMS norm": (lambda x, w: ops.rms_norm(x, w), (normal(5, 64), normal(64))),
    "several reductions of a pass": (
        lambda x: x - ops.mean(x, axis=-1, keepdims=True) * ops.max(ops.abs(x), axis=-1, keepdims=True),
        (normal(3, 50),),
    ),
    "a pool": (lambda x: ops.max_pool(x, **POOL), (normal(1, 2, 9, 37),)),
    "averages": (lambda x: ops.avg_pool(x, **POOL, count_include_pad=False), (normal(1, 2, 9, 37),)),
}


def graph_of(names: list[str]) -> tuple[Graph, dict[str, np.ndarray[Any, Any]]]:
    """Return the graph of several cases, and its inputs."""
    inputs: dict[str, np.ndarray[Any, Any]] = {}
    results = {}
    with Builder() as b:
        for k, name in enumerate(names):
            function, arrays = CASES[name]
            arguments = []
            for i, x in enumerate(arrays):
                inputs[f"x{k}_{i}"] = x
                arguments.append(b.input(f"x{k}_{i}", x.shape, x.dtype.name))
            results[f"y{k}"] = function(*arguments)
    return decompose(b.build(results), fusion.is_lowered, "c"), inputs


def compiled(graph: Graph, scheduler: str, **machine: Any) -> Executable:
    target = Machine(machine_code.host_cpu(), **{"threads": 1, "scheduler": scheduler, **machine})
    return compile_graph.compiled(graph, target, CompileTarget())


@pytest.mark.parametrize("machine", [{}, {"threads": 2}, {"vector_bytes": 16}], ids=["one", "threads", "narrow"])
def test_same_bits(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builder, "PARALLEL_WORK", 1)
    graph, inputs = graph_of(list(CASES))
    templates, scheduled = (compiled(graph, s, **machine) for s in ("own", "tvm"))
    expected, actual = templates({}, inputs), scheduled({}, inputs)
    for k, name in enumerate(CASES):
        # LLVM contracts products and sums of the same statements differently where it unrolls other loops.
        ulps = 64 if "norm" in name else 0
        tolerance = ulps * np.finfo(np.float32).eps
        np.testing.assert_allclose(
            actual[f"y{k}"], expected[f"y{k}"], rtol=tolerance, atol=tolerance, strict=True, err_msg=name
        )
    assert not any(k.scheduled for k in templates.program.kernels.values())
    assert not {n: k.unscheduled for n, k in scheduled.program.kernels.items() if not k.scheduled}
    # LLVM's time grows with the code, which may take 1.3 of the time of templates.
    before, size = (sum(len(t.text(f.primfunc)) for f in e.program.functions.values()) for e in (templates, scheduled))
    assert size < 1.3 * before


def test_printed_c(tmp_path: Path) -> None:
    graph, inputs = graph_of([n for n in CASES if "float16" not in n])  # gcc rounds chains of float16 less often
    program = compiled(graph, "tvm")
    library = in_c.library(tmp_path / "scheduled.so", [program.program], program.machine.lanes())
    for name, y in in_c.call(program, library.entry_0, inputs).items():
        np.testing.assert_allclose(y, program({}, inputs)[name], rtol=1e-5, atol=1e-6, err_msg=name)


def model() -> Any:
    return Sequential(Conv2d(4, kernel_size=3), Relu(), MaxPool2d(2), ml.models.Flatten(), Linear(3))


def messages(compiled_model: Any) -> str:
    """Return the records of a program about schedulers."""
    assert compiled_model.source  # builds it
    return "\n".join(d.message for d in compiled_model.decisions if d.message.startswith("scheduler:"))


def test_who_schedules_is_recorded() -> None:
    shapes = {"input": [1, 2, 10, 10]}
    by = {s: ml.compile(model(), ml.CBackend(scheduler=s), shapes=shapes, inference=True) for s in ("tvm", "own")}
    assert "max_pool" in messages(by["tvm"]).partition("; templates:")[0]
    assert "conv (no schedule)" in messages(by["tvm"]).partition("; templates:")[2]
    assert messages(by["own"]) == ""
    open_sizes = ml.compile(model(), ml.CBackend(scheduler="tvm"), shapes={"input": ["B", 2, 10, 10]}, inference=True)
    assert "max_pool (symbolic sizes)" in messages(open_sizes)


def test_vectors_of_a_reduction_are_a_schedule() -> None:
    x = normal(90, 3000)
    with Builder() as b:
        image = b.input("x", x.shape, "float32")
        results = {"rows": ops.sum(image, axis=-1), "columns": ops.max(image, axis=0)}
    graph = b.build(results)
    operations = tuning.operations(graph)
    assert len(operations) == 2
    sources = set()
    for vectors in operations[next(iter(operations))].choices(Machine(machine_code.host_cpu(), 1)):
        program = compiled(graph, "tvm", schedules=dict.fromkeys(operations, vectors))
        sources.add(program.source)
        actual = program({}, {"x": x})
        np.testing.assert_allclose(actual["rows"], x.sum(-1), rtol=1e-3, atol=1e-2)
        np.testing.assert_array_equal(actual["columns"], x.max(0))
    assert len(sources) == 4


def test_auto_leaves_slower_schedules_to_the_templates() -> None:
    with Builder() as b:
        x = b.input("x", (1, 2, 16, 16), "float32")
        fields = {"kernel": (3, 3), "padding": ((1, 1), (1, 1))}
        results = {f"stride {s}": ops.avg_pool(x, stride=(s, s), **fields) for s in (1, 2)}
    kernels = compiled(b.build(results), "auto").program.kernels.values()
    assert {k.anchor.attributes["stride"][0]: k.unscheduled for k in kernels} == {
        1: "averages of overlapping windows",
        2: "",
    }


def test_lines_that_exceed_the_stack_use_the_arena() -> None:
    with Builder() as b:
        result = ops.max_pool(
            b.input("x", (1, 1, 2, 9000), "float32"), kernel=(2, 2), stride=(2, 2), padding=((0, 0),) * 2
        )
    (kernel,) = compiled(b.build({"y": result}), "tvm").program.kernels.values()
    assert kernel.scheduled is None
    assert "bytes" in kernel.unscheduled


def test_option() -> None:
    with pytest.raises(ml.OptionError, match="scheduler"):
        ml.CBackend(scheduler="ansor")
    assert ml.CBackend(scheduler="own").identity() != ml.CBackend(scheduler="tvm").identity()
    assert ml.CBackend(scheduler="own").with_precision("float32").scheduler == "own"
