"""Embedded kernels of convolutions in the layout of oneDNN, which otherwise reorders them in every call.

A kernel is packed when the program is loaded, and the packed one replaces it. Its convolution returns images with
channels last, so that a chain of convolutions reorders no image.
"""

from __future__ import annotations

from collections import Counter

from mithril import ops
from mithril.backend import Call, Lowerings
from mithril.graph import Graph, Input, Node, iterate
from mithril_torch import helpers
from mithril_torch.fusion.subgraph_fusion import SETTINGS, conv_bias, conv_bias_relu

TAG = "packed kernel"
CONVOLUTIONS = (ops.conv, conv_bias, conv_bias_relu)


def with_packed_kernels(graph: Graph) -> Graph:
    """Return the graph with tags at convolutions whose kernels are constants that nothing else reads."""
    readers = Counter(v for node, _ in iterate(graph) for v in node.operands)
    holders = Counter(id(i.data) for i in graph.inputs)
    constants = {i.value: i for i in graph.inputs if i.data is not None and i.value not in graph.outputs}

    def is_packed(node: Node) -> bool:
        if node.op not in CONVOLUTIONS:
            return False
        x, w = node.operands[:2]
        kernel: Input | None = constants.get(w)  # type: ignore[arg-type]
        is_alone = kernel is not None and readers[w] == 1 and holders[id(kernel.data)] == 1
        return is_alone and x is not None and x.dtype.name == "float32" and len(x.shape) == 4 and x.type.is_static

    nodes = (n.replaced(tags={**n.tags, TAG: True}) if is_packed(n) else n for n in graph.nodes)
    return graph.replaced(nodes=tuple(nodes))


def add_rows(table: Lowerings) -> None:
    """Add the lowering rows of tagged convolutions to ``table``."""
    table.function(*CONVOLUTIONS, when=lambda node: TAG in node.tags)(_convolution)


def _convolution(call: Call) -> str:
    settings = [call.literal(call.attributes[n]) for n in SETTINGS]
    call.convert_constant("w", helpers.packed_kernel, *settings, call.literal(call.operand_type("x").shape))
    bias = "None" if call.node.op is ops.conv else call.b
    relu = ", relu=True" if call.node.op is conv_bias_relu else ""
    return f"{call.helper(helpers.conv)}({call.x}, {call.w}, {', '.join(settings)}, {bias}{relu})"
