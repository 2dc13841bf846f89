"""Bodies of gradient operations: the gradient of a traced function as a graph of its operands and a cotangent."""

from __future__ import annotations

from collections.abc import Sequence

from mithril.autodiff.reverse import differentiate, live_nodes
from mithril.ir import Graph, Output
from mithril.ops import BodyGradient


def body_gradients(body: Graph, wrt: Sequence[int]) -> Graph:
    """Return the cotangents of inputs of a graph with one output, whose cotangent is the last input."""
    inputs = [i.value for i in body.arguments]
    derivative = differentiate(body, [("cotangent", body.outputs[0])], [inputs[k] for k in wrt])
    nodes = live_nodes((*derivative.forward, *derivative.backward), derivative.gradients)
    results = tuple(Output(v, f"cotangent_{k}") for k, v in zip(wrt, derivative.gradients, strict=True))
    return Graph(derivative.inputs, tuple(nodes), results, body.name, derivative.guards)


BodyGradient.differentiate = staticmethod(body_gradients)
