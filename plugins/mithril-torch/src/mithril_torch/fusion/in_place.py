"""Operations in the branches of ``if`` that overwrite an operand, which saves the allocation of new memory.

A training step on a CPU skips an update by one ``if`` per parameter: this is where it matters. The elementwise
operations of every branch write into the memory of an operand that has no later use, if the program owns it (that of a
donated argument or of a result) and no other operand is a view of it.
"""

from __future__ import annotations

from mithril import ops
from mithril.backend import Lowerings
from mithril.graph import Graph, Node, Op
from mithril_torch.fusion.subgraph_fusion import lerp

TAG = "in place"
DTYPES = ("float32", "float64")
FUNCTIONS: dict[Op, str] = {
    **{op: f"torch.{op.name}({{a}}, {{b}}" for op in (ops.add, ops.sub, ops.mul, ops.div)},
    **{op: f"torch.{op.name}({{x}}" for op in (ops.sqrt, ops.square)},
    lerp: "torch.lerp({a}, {b}, {weight}",
}
SYMMETRIC = (ops.add, ops.mul)


def with_overwritten_operands(graph: Graph) -> Graph:
    """Return the graph with operations that may overwrite operands in the branches of its ``if`` operations."""
    if not any(node.op is ops.if_op for node in graph.nodes):
        return graph
    return graph.replaced(nodes=tuple(_overwriting(node) if node.op is ops.if_op else node for node in graph.nodes))


def _overwriting(branch: Node) -> Node:
    regions = tuple(g.replaced(nodes=tuple(map(_tagged, g.nodes))) for g in branch.regions)
    return branch.replaced(regions=regions)


def _tagged(node: Node) -> Node:
    """Return an operation whose first operand is a tensor of the type of the result with a tag, others unchanged."""
    if node.op not in FUNCTIONS or node.result.dtype.name not in DTYPES:
        return node
    operands = node.operands
    if node.op in SYMMETRIC and operands[0] is not None and operands[0].shape == ():
        operands = operands[::-1]
    if operands[0] is None or operands[0].type != node.result.type:
        return node
    return node.replaced(operands=operands, tags={**node.tags, TAG: True})


def add_rows(table: Lowerings) -> None:
    """Add the lowering rows of tagged operations to ``table``."""
    for op, text in FUNCTIONS.items():
        table.row(op, f"{text})", when=lambda node: TAG in node.tags, out=f"{text}, out={{out}})")
