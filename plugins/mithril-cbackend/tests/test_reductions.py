"""Reductions, positions of extremes and running sums on sizes that fill vectors, and on those that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mithril import ops
from mithril.graph import Builder
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)


def check(function: Any, x: np.ndarray[Any, Any], **machine: Any) -> None:
    with Builder() as b:
        result = function(b.input("x", x.shape, x.dtype.name))
    program = compile_graph.compiled(
        b.build({"y": result}), Machine(machine_code.host_cpu(), **{"threads": 1, **machine}), CompileTarget()
    )
    np.testing.assert_allclose(program({}, {"x": x})["y"], function(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vector_bytes", [64, 16, 4])
@pytest.mark.parametrize("function", [ops.argmax, ops.argmin], ids=["argmax", "argmin"])
def test_the_first_extreme(function: Any, vector_bytes: int) -> None:
    """Few different numbers, so that there are ties between lanes; nan here and there."""
    for shape in ((7, 83), (3, 5, 140), (2, 9)):
        x = RNG.integers(0, 4, shape).astype(np.float32)
        x[0, 3 % shape[1]] = np.nan
        x[-1].reshape(-1)[[-1, 5]] = np.nan
        for axis in range(len(shape)):
            check(lambda x: function(x, axis=axis), x, vector_bytes=vector_bytes)


@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8", "bool", "float16"])
def test_extremes_of_other_dtypes(dtype: str) -> None:
    x = RNG.integers(0, 9, (6, 70)).astype(dtype)
    for axis in (0, 1):
        check(lambda x: ops.argmax(x, axis=axis), x)
        check(lambda x: ops.argmin(x, axis=axis), x)


def test_infinities_are_extremes_too() -> None:
    x = np.full((3, 50), -np.inf, np.float32)
    x[1, 40] = x[1, 44] = 1.0
    for axis in (0, 1):
        check(lambda x: ops.argmax(x, axis=axis), x)
        check(lambda x: ops.argmin(x, axis=axis), x)


@pytest.mark.parametrize("length", [5, 16, 127, 128, 200, 333])
def test_folds_of_any_length(length: int) -> None:
    x = RNG.standard_normal((3, length)).astype(np.float32)
    for function in (ops.sum, ops.max, ops.min, ops.mean):
        check(lambda x: function(x, axis=1), x)
    x[1, length // 2] = np.nan
    check(lambda x: ops.max(x, axis=1), x)


@pytest.mark.parametrize("shape", [(5, 83), (9, 7), (3, 20, 70)])
def test_running_sums_and_products(shape: tuple[int, ...]) -> None:
    x = RNG.uniform(0.5, 1.5, shape).astype(np.float32)
    for axis in range(len(shape)):
        check(lambda x: ops.cumsum(x, axis=axis), x)
    check(lambda x: ops.cumsum(x, axis=0, reverse=True, exclusive=True), x, vector_bytes=16)
    check(lambda x: ops.cumprod(x * 2.0 - 1.0, axis=0), x, threads=2)


def test_rows_of_columns_sliced_before_a_reshape() -> None:
    """Slice one element per row of three axes, before a softmax over rows of four."""

    def attend(x: Any) -> Any:
        product = x[:, :, 0:1] * x[:, 0:1, :] + x[:, :, 1:2] * x[:, 1:2, :]
        scores = ops.reshape(product, shape=(33, 16, 1, 16))
        shares = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True))
        return ops.tanh(shares / ops.sum(shares, axis=-1, keepdims=True))

    check(attend, RNG.normal(size=(33, 16, 16)).astype(np.float32))


@pytest.mark.parametrize("axes", [(1, 2, 3), (0, 2, 3), (2, 3), (1, 2), (0, 1, 2, 3)], ids=str)
def test_adjacent_reduced_axes_are_one_loop(axes: tuple[int, ...]) -> None:
    x, row = RNG.standard_normal((3, 4, 5, 7)).astype(np.float32), RNG.standard_normal(7).astype(np.float32)
    for keepdims in (False, True):
        check(lambda x, keepdims=keepdims: ops.sum(x, axis=axes, keepdims=keepdims), x)
        check(lambda x, keepdims=keepdims: ops.max(x * row, axis=axes, keepdims=keepdims) + 1.0, x)
    check(lambda x: x - ops.mean(x, axis=axes, keepdims=True), x)  # the operand has two shapes
    check(lambda x: ops.sum(ops.transpose(x, perm=(0, 1, 3, 2)), axis=axes), x)


def test_short_rows_are_joined() -> None:
    with Builder() as b:
        y = ops.sum(b.input("x", (6, 5, 3, 7)), axis=(1, 2, 3))
    machine = Machine(machine_code.host_cpu(), 1)
    text = compile_graph.compiled(b.build({"y": y}), machine, CompileTarget()).source
    assert "< 6; " in text and "< 5; " not in text and "< 7; " not in text


@pytest.mark.parametrize("keepdims", [False, True])
def test_axes_after_a_searched_one_are_joined(keepdims: bool) -> None:
    for shape in ((6, 5, 3, 1), (2, 3, 24, 105), (4, 5, 3, 7), (3, 12), (3, 9, 41)):
        x = RNG.integers(0, 9, shape).astype(np.float32)
        for axis in range(len(shape)):
            check(lambda x, axis=axis: ops.argmax(x, axis=axis, keepdims=keepdims), x)
            check(lambda x, axis=axis: ops.argmin(x, axis=axis, keepdims=keepdims), x, threads=2, vector_bytes=32)
            check(lambda x, axis=axis: ops.argmin(x, axis=axis, keepdims=keepdims) * 2, x.astype("float64"))
    with Builder() as b:
        y = ops.argmax(b.input("x", (6, 5, 3, 7)), axis=0, keepdims=keepdims)
    machine = Machine(machine_code.host_cpu(), 1)
    text = compile_graph.compiled(b.build({"y": y}), machine, CompileTarget()).source
    assert "< 5; " not in text and "< 3; " not in text and "< 7; " not in text


@pytest.mark.parametrize("kind", ["int32", "int64", "uint8"])
def test_sums_of_gathered_rows_are_vectors(kind: str) -> None:
    """Positions are read once for the lanes of a vector."""
    positions = RNG.integers(0, 9, (5, 6)).astype(kind)
    for columns in (40, 83, 5):
        x = RNG.standard_normal((9, columns)).astype(np.float32)
        for axis in (0, 1, 2, (0, 1)):
            check(lambda x, axis=axis: ops.sum(ops.take(x, positions, axis=0) * 2.0, axis=axis), x)
            check(lambda x, axis=axis: ops.max(ops.take(x, positions, axis=0), axis=axis), x, threads=2)
        check(lambda x: ops.mean(ops.take(x, positions, axis=1), axis=0), x[:, :9] if columns > 9 else x)
    with Builder() as b:
        rows = ops.take(b.input("x", (9, 48)), b.input("positions", (5, 6), kind), axis=0)
        y = ops.sum(rows, axis=1)
    machine = Machine(machine_code.host_cpu(), 1)
    text = compile_graph.compiled(b.build({"y": y}), machine, CompileTarget()).source
    loop = text[text.index("for (int32_t j ") :]
    assert text.count("= positions[") == 1
    assert "positions[" not in loop
