"""Gradients of convolutions, against the reference: strides of all kinds, groups, ragged channels, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mithril.graph import Builder
from mithril.ops import conv, conv_input_grad, conv_weight_grad, maximum
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.conv import direct_convolution, strided_conv_grad
from mithril_cbackend.lowering.element import kernel_builder
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph, program as programs
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
Arrays = dict[str, np.ndarray[Any, Any]]

# batch, channels, sizes, channels made, kernel, stride, padding, dilation, groups
CASES: dict[str, tuple[Any, ...]] = {
    "points, stride 2": (2, 16, (9, 8), 24, (1, 1), 2, 0, 1, 1),
    "three, stride 2": (1, 12, (11, 14), 20, (3, 3), 2, 1, 1, 1),
    "three, stride 2, no padding": (2, 8, (9, 9), 16, (3, 3), 2, 0, 1, 1),
    "seven, stride 2": (1, 3, (20, 21), 16, (7, 7), 2, 3, 1, 1),
    "stride beyond the kernel": (1, 16, (13, 13), 16, (2, 2), 3, 0, 1, 1),
    "stride and dilation": (1, 8, (16, 15), 16, (3, 3), 2, 2, 2, 1),
    "stride 3, dilation 2": (1, 8, (17, 17), 16, (3, 3), 3, 1, 2, 1),
    "large padding": (1, 8, (8, 8), 16, (3, 3), 2, 4, 1, 1),
    "groups, stride 2": (2, 24, (10, 10), 36, (3, 3), 2, 1, 1, 3),
    "depthwise": (2, 20, (9, 12), 20, (3, 3), 1, 1, 1, 20),
    "depthwise, stride 2": (1, 20, (12, 12), 20, (3, 3), 2, 1, 1, 20),
    "depthwise, twice as many": (1, 20, (12, 12), 40, (5, 5), 1, 2, 1, 20),
    "signal, stride 4": (2, 12, (50,), 24, (8,), 4, 2, 1, 1),
    "volume, stride 2": (1, 6, (6, 7, 8), 10, (3, 3, 3), 2, 1, 1, 1),
    "ragged": (3, 19, (7, 7), 35, (3, 3), 1, 1, 1, 1),
    "few channels, stride 8": (1, 3, (32, 32), 5, (8, 8), 8, 4, 1, 1),
    "depthwise, stride 4": (1, 8, (16, 16), 8, (5, 5), 4, 2, 1, 8),
    "high": (1, 8, (40, 20), 33, (3, 3), 1, 1, 1, 1),
}


@pytest.fixture(autouse=True)
def _threads_share_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builder, "PARALLEL_WORK", 1)


def check(function: Any, arrays: Arrays, **options: Any) -> None:
    with Builder() as b:
        result = function(*(b.input(n, a.shape) for n, a in arrays.items()))
    machine = Machine(machine_code.host_cpu(), **{"threads": 1, **options})
    actual = np.array(compile_graph.compiled(b.build({"y": result}), machine, CompileTarget())({}, arrays)["y"])
    expected = np.asarray(function(*arrays.values()))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * float(np.abs(expected).max()))


SHARED = ("three, stride 2", "seven, stride 2", "groups, stride 2", "depthwise", "ragged", "high")


@pytest.mark.parametrize("name", list(CASES))
def test_gradients(name: str) -> None:
    gradients(name)


@pytest.mark.parametrize("name", SHARED)
def test_gradients_of_two_threads(name: str) -> None:
    gradients(name, threads=2, vector_bytes=32)


def gradients(name: str, **options: int) -> None:
    batch, channels, sizes, out_channels, kernel, stride, padding, dilation, groups = CASES[name]
    rank = len(sizes)
    how = {
        "stride": (stride,) * rank,
        "padding": ((padding, padding),) * rank,
        "dilation": (dilation,) * rank,
        "groups": groups,
    }
    x = RNG.standard_normal((batch, channels, *sizes)).astype(np.float32)
    w = RNG.standard_normal((out_channels, channels // groups, *kernel)).astype(np.float32)
    g = RNG.standard_normal(np.asarray(conv(x, w, **how)).shape).astype(np.float32)
    b = RNG.standard_normal((channels, *(1,) * rank)).astype(np.float32)

    def image(g: Any, w: Any, b: Any) -> Any:
        return maximum(conv_input_grad(g, w, shape=x.shape, **how) + b, 0.0)

    check(image, {"g": g, "w": w, "b": b}, **options)
    check(lambda x, g: conv_weight_grad(x, g, shape=w.shape, **how), {"x": x, "g": g}, **options)


@pytest.mark.parametrize("vector_bytes", [16, 4])
def test_narrow_vectors(vector_bytes: int) -> None:
    how = {"stride": (2, 1), "padding": ((1, 1), (0, 2)), "dilation": (1, 1), "groups": 1}
    x, w = (RNG.standard_normal(s).astype(np.float32) for s in ((2, 6, 9, 10), (9, 6, 3, 3)))
    g = RNG.standard_normal(np.asarray(conv(x, w, **how)).shape).astype(np.float32)
    check(lambda g, w: conv_input_grad(g, w, shape=x.shape, **how), {"g": g, "w": w}, vector_bytes=vector_bytes)
    check(lambda x, g: conv_weight_grad(x, g, shape=w.shape, **how), {"x": x, "g": g}, vector_bytes=vector_bytes)


def test_few_channels_of_large_strides_multiply_no_zeros() -> None:
    with Builder() as b:
        gradient = conv_input_grad(
            b.input("g", (1, 5, 16, 16)), b.input("w", (5, 3, 8, 8)), shape=(1, 3, 128, 128), stride=(8, 8)
        )
    (node,) = b.build({"y": gradient}).nodes
    assert strided_conv_grad.plan_of(node, Machine(machine_code.host_cpu(), 1)) is not None


def test_elements_of_strided_results_are_one_loop() -> None:
    """Divide in one loop: as many divisions as a tile has vectors took LLVM 1.5 s."""
    with Builder() as b:
        gradient = conv_input_grad(
            b.input("g", (1, 7, 22, 22)), b.input("w", (7, 41, 4, 4)), shape=(1, 41, 46, 46), stride=(2, 2)
        )
    graph = b.build({"y": gradient})
    text = compile_graph.compiled(graph, Machine(machine_code.host_cpu(), 1), CompileTarget()).source
    assert text.count(" % 23;") <= 24


def test_channels_that_no_tile_divides_are_a_product() -> None:
    with Builder() as b:
        image, weights = b.input("x", (1, 56, 30, 30)), b.input("w", (31, 56, 5, 5))
        graph = b.build({"y": conv(image, weights, stride=(2, 2), padding=((2, 2), (2, 2)), dilation=(2, 2))})
    machine = Machine(machine_code.host_cpu(), 1)
    (kernel,) = programs.write(graph, machine).kernels.values()
    assert direct_convolution.cheaper_plan(kernel, machine, constant_weights=False) is not None
