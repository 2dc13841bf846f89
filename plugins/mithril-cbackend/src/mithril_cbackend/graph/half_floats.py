"""Programs of 16-bit floats: which operations compute in float32, because the CPU has no instructions for them."""

from __future__ import annotations

from mithril import backend, ops
from mithril.graph import Decisions, Graph, Node, bfloat16, is_product
from mithril_cbackend.graph import byte_images
from mithril_cbackend.instructions import PAIRS
from mithril_cbackend.lowering.element.kernel_builder import Machine

CONVOLUTIONS = (ops.conv, ops.conv_input_grad, ops.conv_weight_grad)


def in_float32(graph: Graph, machine: Machine, decisions: Decisions) -> Graph:
    """Return the graph with values of float16 in float32, and those of bfloat16 from some convolutions to a product.

    Conversions between a product and its epilogues cost more than the bytes that they save; weights are converted where
    they are read.
    """
    has_instructions = PAIRS in byte_images.kinds(machine)
    constants = {i.value for i in graph.with_role("constant")}

    def computes(node: Node, follows: bool) -> bool:
        if not has_instructions or all(v is None or v.dtype is not bfloat16 for v in node.operands):
            return True
        if node.op in CONVOLUTIONS:
            # Constant weights are packed once, which makes 16 bits no slower than float32.
            return node.operands[1] not in constants
        return follows and not is_product(node)

    rewritten = backend.in_float32(graph, computes)
    if rewritten is not graph:
        message = "float32 computes faster than 16-bit floats here; inputs, weights and results have 16 bits"
        decisions.record("choice", message)
    return rewritten
