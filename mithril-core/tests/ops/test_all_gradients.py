"""Gradients of gradients, against central differences in float64. Those of first order: ``test_conformance.py``."""

from __future__ import annotations

import pytest

from mithril.derivatives import gradients
from mithril.graph import Output
from mithril_testing.cases import Case
from mithril_testing.differences import check_gradients, cotangents, float_inputs, float_outputs
from mithril_testing.operation import in_float64
from mithril_testing.selection import core_operations

SECOND = (
    "exp",
    "tanh",
    "mul",
    "div",
    "matmul",
    "softmax",
    "layer_norm",
    "gelu",
    "silu",
    "sigmoid",
    "linear",
    "logsumexp",
)


@pytest.mark.parametrize("name", SECOND)
def test_second_order(name):
    op = core_operations()[name]
    case = in_float64(Case(op, op.samples[0], 0))
    graph = case.graph()
    outputs, wrt = float_outputs(graph), float_inputs(graph)
    backward = gradients(graph, outputs, wrt)
    first = backward.replaced(
        results=tuple(Output(r.value, "s") for r in backward.results_of("gradient") if r.of == wrt[0]),
    )
    arguments = {**case.inputs(), **cotangents(graph, outputs)}
    check_gradients(first, {i.name: arguments[i.name] for i in first.arguments})
