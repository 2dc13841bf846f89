"""Embedded kernels of convolutions in the layout of oneDNN, which otherwise reorders them in every call.

A kernel is packed when the program is loaded, and the packed one replaces it. Its convolution returns images with
channels last, so that a chain of convolutions reorders no image.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from mithril import ops
from mithril.backend import Call, Lowerings
from mithril.graph import Graph, Input, Node, iterate
from mithril_torch import helpers
from mithril_torch.fusion.subgraph_fusion import SETTINGS, conv_bias, conv_bias_relu

TAG = "packed kernel"
CONVOLUTIONS = (ops.conv, conv_bias, conv_bias_relu)


def with_packed_kernels(graph: Graph) -> Graph:
    """Return the graph with tags at convolutions whose kernels are constants that nothing else reads."""
    holders = Counter(id(i.data) for i in graph.inputs)
    packed_nodes = set(
        _convolutions(graph, [i for i in graph.inputs if i.data is not None and holders[id(i.data)] == 1])
    )
    nodes = (n.replaced(tags={**n.tags, TAG: True}) if n in packed_nodes else n for n in graph.nodes)
    return graph.replaced(nodes=tuple(nodes))


def packed(graph: Graph, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a binding with packed kernels."""
    kernels = {}
    pack: Any = helpers.packed_kernel
    for node in of_binding(graph):
        x, w = (v for v in node.operands[:2] if v is not None)
        settings = [node.attributes[n] for n in SETTINGS]
        kernels[w.name] = pack(weights[w.name], *settings, list(map(int, x.shape)))
    return {**weights, **kernels}


def of_binding(graph: Graph) -> list[Node]:
    """Return the convolutions whose kernels are parameters of one binding, which are packed when they are bound."""
    return _convolutions(graph, [i for i in graph.with_role("param") if i.tags.get("bound")])


def _convolutions(graph: Graph, kernels: Iterable[Input]) -> list[Node]:
    """Return the convolutions of images of static sizes whose kernel is one of these, which nothing else reads."""
    readers = Counter(v for node, _ in iterate(graph) for v in node.operands)
    sole = {i.value for i in kernels if readers[i.value] == 1 and i.value not in graph.outputs}

    def is_packed(node: Node) -> bool:
        if node.op not in CONVOLUTIONS or node.operands[1] not in sole:
            return False
        x = node.operands[0]
        return x is not None and x.dtype.name == "float32" and len(x.shape) == 4 and x.type.is_static

    return [node for node in graph.nodes if is_packed(node)]


def add_rows(table: Lowerings) -> None:
    """Add the lowering rows of tagged convolutions to ``table``."""
    table.function(*CONVOLUTIONS, when=lambda node: TAG in node.tags)(_convolution)


def _convolution(call: Call) -> str:
    settings = [call.literal(call.attributes[n]) for n in SETTINGS]
    call.convert_constant("w", helpers.packed_kernel, *settings, call.literal(call.operand_type("x").shape))
    bias = "None" if call.node.op is ops.conv else call.b
    relu = ", relu=True" if call.node.op is conv_bias_relu else ""
    return f"{call.helper(helpers.conv)}({call.x}, {call.w}, {', '.join(settings)}, {bias}{relu})"
