"""Sorting and selection: every method, dtype and axis, with ties, nan and pair zeros, equal to the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from in_c import call, library

from mithril import ops
from mithril.graph import Builder
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
SPECIAL = [np.nan, -np.nan, -0.0, 0.0, np.inf, -np.inf, 1.0, -1.0, 2.5]


def elements(dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return elements with many ties: special floats, or integers at pair limits and around zero."""
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        values = np.array([limits.min, limits.min + 1, 0, 1, 2, limits.max - 1, limits.max], kind)
        return RNG.choice(values, shape)
    if kind.kind == "b":
        return RNG.random(shape) < 0.5
    return np.where(RNG.random(shape) < 0.5, RNG.choice(SPECIAL, shape), RNG.standard_normal(shape)).astype(dtype)


def results(x: Any, axis: int) -> dict[str, Any]:
    """Return sorted elements, and the first elements with their positions."""
    arrays = {"sorted": ops.sort(x, axis=axis)}
    arrays["first values"], arrays["first places"] = ops.top_k(x, k=min(x.shape[axis], 5), axis=axis)
    return arrays


def compiled(x: np.ndarray[Any, Any], axis: int, **machine: Any) -> Any:
    with Builder() as b:
        graph = b.build(results(b.input("x", x.shape, x.dtype.name), axis))
    return compile_graph.compiled(graph, Machine(machine_code.host_cpu(), **{"threads": 1, **machine}), CompileTarget())


def check(arrays: Any, x: np.ndarray[Any, Any], axis: int) -> None:
    for name, expected in results(x, axis).items():
        pair = [np.asarray(array).astype(float) for array in (arrays[name], expected)]
        np.testing.assert_array_equal(*pair, err_msg=f"{name} of {x.dtype}{x.shape}")


DTYPES = ["bool", "int8", "uint32", "int64", "uint64", "float16", ml_dtypes.bfloat16, "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_sorted_as_the_reference_sorts_it(dtype: Any) -> None:
    x = elements(dtype, (2, 150))
    check(compiled(x, 1)({}, {"x": x}), x, 1)


@pytest.mark.parametrize("shape, axis", [((9,), 0), ((3, 64), 1), ((65, 3), 0), ((2, 300, 2), 1)])
def test_every_method_and_axis(shape: tuple[int, ...], axis: int) -> None:
    x = elements("float32", shape)
    check(compiled(x, axis, threads=2, vector_bytes=(4 if axis else 32))({}, {"x": x}), x, axis)


@pytest.mark.parametrize("k", [1, 64, 65])
def test_rows_that_are_in_order_and_each_result_alone(k: int) -> None:
    rising = np.sort(elements("float32", (1, 150)))
    x = np.concatenate([rising, rising[:, ::-1], -rising])
    for result in range(2):
        with Builder() as b:
            graph = b.build({"y": ops.top_k(b.input("x", x.shape), k=k)[result]})
        program = compile_graph.compiled(graph, Machine(machine_code.host_cpu(), 1), CompileTarget())
        np.testing.assert_array_equal(program({}, {"x": x})["y"], ops.top_k(x, k=k)[result])


def test_printed_code_sorts_equally(tmp_path: Path) -> None:
    arrays = [elements(dtype, (2, 130)) for dtype in ("float32", "float64", "uint64")]
    programs = [compiled(x, 1) for x in arrays]
    loaded = library(tmp_path / "sorted.so", [p.program for p in programs], 16)
    for k, (x, program) in enumerate(zip(arrays, programs, strict=True)):
        check(call(program, getattr(loaded, f"entry_{k}"), {"x": x}), x, 1)
