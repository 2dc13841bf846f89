"""Convolutions with constant kernels: packed in the order of tiles, long sums in blocks, every schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mithril.graph import Builder, Input
from mithril.ops import add, conv
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.conv import direct_convolution
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
CASES = [  # batch, channels, size, results, kernel, stride, groups
    (1, 900, 7, 20, 1, 1, 1),  # three blocks of the contracted axis, the last one shorter; an incomplete tile of rows
    (2, 48, 7, 19, 3, 1, 1),  # two blocks, an odd number of results
    (1, 800, 5, 16, 1, 1, 2),  # groups of two blocks
    (1, 50, 14, 24, 3, 2, 1),
    (1, 24, 6, 11, 1, 1, 1),  # a single block
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_every_schedule_with_constant_kernels_equals_the_reference(case: tuple[int, ...], threads: int) -> None:
    batch, channels, size, results, kernel, stride, groups = case
    x = RNG.standard_normal((batch, channels, size, size)).astype(np.float32)
    w = RNG.standard_normal((results, channels // groups, kernel, kernel)).astype(np.float32)
    how: dict[str, Any] = {"stride": (stride,) * 2, "padding": ((kernel // 2,) * 2,) * 2, "dilation": (1, 1)}
    how["groups"] = groups
    expected = np.asarray(conv(x.astype(np.float64), w.astype(np.float64), **how))
    residual = RNG.standard_normal(expected.shape).astype(np.float32)
    with Builder() as b:
        convolved = conv(b.input("x", x.shape), b.input("w", w.shape), **how)
        graph = b.build({"y": add(convolved, b.input("residual", residual.shape))})
    inputs = tuple(Input(i.value, "constant", w, i.tags) if i.name == "w" else i for i in graph.inputs)
    graph = graph.replaced(inputs=inputs)
    node = next(n for n in graph.nodes if n.op is conv)
    machine = Machine(machine_code.host_cpu(), threads)
    names = direct_convolution.schedules(node, machine, max_per_kind=2)
    assert any(n.startswith("pixels") for n in names)
    for name in names:
        scheduled = replace(machine, schedules={direct_convolution.signature(node): name})
        result = compile_graph.compiled(graph, scheduled, CompileTarget())({}, {"x": x, "residual": residual})["y"]
        np.testing.assert_allclose(result, expected + residual, rtol=1e-4, atol=1e-4, err_msg=name)
