"""Convolutions of large strides and kernels: right, compiled from short text, and as fast as others per product."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

import mithril as ml
from mithril.backend import BuildOptions
from mithril.derivatives import gradients
from mithril.graph import evaluate
from mithril_cbackend.backend import CBackend

CASES = {
    "patches": ((1, 3, 64, 64), (8, 3, 16, 16), {"stride": (16, 16)}),
    "patches with a rest": ((2, 3, 31, 45), (8, 3, 8, 8), {"stride": (8, 8)}),
    "padded patches": ((2, 3, 30, 27), (8, 3, 8, 8), {"stride": (8, 8), "padding": ((3, 4), (0, 5))}),
    "cropped and padded": ((1, 2, 33, 3), (8, 2, 9, 9), {"stride": (9, 9), "padding": ((1, 0), (8, 9))}),
    "volumes": ((1, 2, 9, 8, 17), (8, 2, 4, 4, 8), {"stride": (4, 4, 8)}),
    "padded samples": ((2, 4, 500), (8, 4, 40), {"stride": (40,), "padding": ((20, 20),)}),
    "overlapping": ((2, 4, 33, 30), (8, 4, 5, 5), {"stride": (4, 4), "padding": ((2, 2), (2, 2))}),
    "kernel below the stride": ((2, 8, 31, 32), (8, 8, 3, 3), {"stride": (5, 5), "padding": ((1, 0), (0, 1))}),
    "one large stride": ((2, 8, 31, 32), (8, 8, 3, 3), {"stride": (12, 2), "padding": ((1, 1), (1, 1))}),
    "dilated": ((2, 8, 31, 40), (8, 8, 6, 6), {"stride": (4, 4), "dilation": (2, 3)}),
    "samples": ((2, 1, 4000), (8, 1, 400), {"stride": (160,)}),
    "groups": ((1, 6, 24, 24), (6, 2, 7, 7), {"stride": (7, 7), "groups": 3}),
    "large kernel": ((1, 4, 20, 20), (4, 1, 19, 19), {"padding": ((9, 9), (9, 9)), "groups": 4}),
    "kernel as high as the image": ((1, 5, 96, 16), (12, 5, 96, 3), {}),
}


def graph_of(case):
    image, kernel, attributes = CASES[case]
    with ml.Builder("g") as builder:
        x, w = builder.input("x", image), builder.input("w", kernel)
        graph = builder.build({"y": ml.ops.conv(x, w, **attributes)})
    rng = np.random.default_rng(0)
    return graph, {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", image), ("w", kernel))}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_definition(case):
    check(*graph_of(case))


@pytest.mark.parametrize("case", ["patches with a rest", "one large stride", "samples", "large kernel"])
def test_gradients_are_those_of_the_definition(case):
    graph, inputs = graph_of(case)
    graph = gradients(graph, wrt=["x", "w"])
    slope = next(i for i in graph.inputs if i.name not in inputs)
    inputs[slope.name] = np.random.default_rng(1).standard_normal(tuple(slope.type.shape)).astype(np.float32)
    check(graph, inputs)


def check(graph, inputs):
    outputs = ml.compile(graph, CBackend(num_threads=1)).evaluate({}, inputs)
    for name, expected in evaluate(graph, inputs).items():
        np.testing.assert_allclose(outputs[name], expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("case", ["patches", "patches with a rest", "padded patches", "volumes", "padded samples"])
def test_disjoint_patches_are_rows_of_a_product(case):
    graph, inputs = graph_of(case)
    bound = [replace(i, role="param", tags={"bound": True}) if i.name == "w" else i for i in graph.inputs]
    options = BuildOptions()
    executable = CBackend(num_threads=1).build(graph.replaced(inputs=tuple(bound)), options)
    assert "1 convolutions of disjoint patches are products of their rows" in [d.message for d in options.decisions]
    assert {k.anchor.op.name for k in executable.program.kernels.values()} <= {"matmul", "transpose", "pad", "slice"}
    assert executable.program.unread == {"w"}  # only its packed copy is read
    actual = executable(executable.layout.bound({"w": inputs["w"]}, {}), {"x": inputs["x"]})
    expected = evaluate(graph, inputs)["y"]
    np.testing.assert_allclose(actual["y"], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("case", [case for case in CASES if "stride" in CASES[case][2]])
def test_the_text_of_a_kernel_does_not_grow_with_the_stride(case):
    """LLVM's time grows faster than the text: 256 written phases took 19 s of processor time."""
    compiled = ml.compile(graph_of(case)[0], CBackend(num_threads=1))
    assert len(compiled.source) < 30_000


def test_large_kernels_take_no_more_time_per_product_than_small_ones():
    seconds = []
    for size in (200, 1600):
        with ml.Builder("g") as builder:
            x, w = builder.input("x", (1, 1, 40 * 160 + size)), builder.input("w", (32, 1, size))
            graph = builder.build({"y": ml.ops.conv(x, w, stride=(160,))})
        compiled = ml.compile(graph, CBackend(num_threads=1))
        inputs = {i.name: np.ones(tuple(i.type.shape), np.float32) for i in graph.inputs}
        compiled.evaluate({}, inputs)
        rounds = []
        for _ in range(7):
            start = time.process_time()
            for _ in range(20):
                compiled.evaluate({}, inputs)
            rounds.append(time.process_time() - start)
        seconds.append(min(rounds))
    assert seconds[1] < 24 * seconds[0], "8 times the products; simple loops took 70 times as long"
