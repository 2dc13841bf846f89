"""Products with constants of few nonzero elements, as of resampling, are weighed sums of gathered elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mithril import ops
from mithril.graph import Builder, Graph, decompose
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph import fusion, integer_products
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.tir import machine_code

MACHINE = Machine(machine_code.host_cpu(), 1)
RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


def rewritten(function: Any, x: Array, *constants: Array) -> Graph:
    with Builder() as b:
        value = b.input("x", x.shape, x.dtype.name)
        graph = b.build({"y": function(value, *(b.constant(c) for c in constants))})
    return integer_products.fused(decompose(graph, fusion.is_lowered, "c"), MACHINE)


def check(function: Any, x: Array, *constants: Array) -> list[str]:
    """Compare the result with the reference; return the operations of the kernels."""
    graph = rewritten(function, x, *constants)
    program = compile_graph.compiled(graph, MACHINE, CompileTarget())
    expected = np.asarray(function(x, *constants))
    np.testing.assert_allclose(program({}, {"x": x})["y"], expected, rtol=1e-5, atol=1e-5 * np.nanmax(np.abs(expected)))
    return [n.op.name for n in graph.nodes]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_axes_are_resampled_by_gathers(mode: str, dtype: str) -> None:
    x = RNG.standard_normal((2, 3, 200, 190)).astype(dtype)
    for size in ((30, 31), (200, 64), (220, 190)):
        assert "matmul" not in check(lambda x, size=size: ops.resize(x, size=size, mode=mode), x)
    assert "matmul" not in check(lambda x: ops.resize(ops.tanh(x), size=(30, 30), mode=mode) + 1.0, x)
    signal = RNG.standard_normal((2, 3, 200)).astype(dtype)
    assert "matmul" not in check(lambda x: ops.resize(x, size=(70,), mode=mode, align_corners=True), signal)


def test_rows_are_read_as_vectors() -> None:
    """Resample the first axis before the second, in a kernel without transposed results."""
    x = RNG.standard_normal((1, 2, 96, 100)).astype(np.float32)
    graph = rewritten(lambda x: ops.resize(x, size=(40, 40), mode="bilinear"), x)
    text = compile_graph.compiled(graph, MACHINE, CompileTarget()).source
    assert text.count("static void k") == 2 and "] = add" in text


def test_short_sums_and_dense_constants_remain_products() -> None:
    x = RNG.standard_normal((4, 16, 24)).astype(np.float32)
    few = np.eye(24, 30, dtype=np.float32)
    assert "matmul" in check(lambda x, w: x @ w, x, few)
    assert "matmul" in check(lambda x, w: x @ w, x, RNG.standard_normal((24, 30)).astype(np.float32))
    mixed = np.concatenate([few, np.ones((24, 1), np.float32)], axis=1)
    assert "matmul" in check(lambda x, w: x @ w, x, mixed)


def test_other_constants_of_few_elements_remain_products() -> None:
    """Products of zeros with nan are nan, as in the reference."""
    x, scattered = RNG.standard_normal((3, 200)).astype(np.float32), np.zeros((200, 5), np.float32)
    scattered[3, 1], scattered[[0, 199, 7], 3], scattered[8, 4] = 2.0, -1.0, 5.0
    x[1, 100] = np.nan
    permutation = np.eye(200, dtype=np.float32)[RNG.permutation(200)]
    halves = np.repeat(np.eye(200, dtype=np.float32), 2, axis=1)[:, 1:-1].reshape(200, 199, 2)
    means = halves.mean(2)
    for constant in (scattered, np.eye(200, dtype=np.float32), permutation, halves.sum(2), -means, means[:, ::-1]):
        assert "matmul" in check(lambda x, w: x @ w, x, constant)
    assert "matmul" not in check(lambda x, w: x @ w, x[2:], means)
