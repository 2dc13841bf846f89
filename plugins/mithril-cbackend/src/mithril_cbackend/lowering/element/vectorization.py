"""Operations that kernels can do on whole vectors."""

from __future__ import annotations

from collections.abc import Sequence

from mithril.ir import Node
from mithril_cbackend.lowering.element import scalar_ops
from mithril_cbackend.lowering.element.element_reader import shape_of

PLAIN = frozenset({*scalar_ops.RULES, "broadcast_to", "constant", "full"})  # positions only matter as those of operands
STRAIGHT = PLAIN | {"iota", "transpose", "slice", "tril", "triu", "random_bits"}  # no loads at computed places


def vectorisable(nodes: Sequence[Node]) -> bool:
    """Whether every operation can be done on vectors."""
    return all(_straight(node) for node in nodes)


def _straight(node: Node) -> bool:
    if node.op.name == "reshape":  # that only gives or takes axes of one
        given = [v for v in node.operands if v is not None] + [node.result]
        return len({tuple(n for n in shape_of(v) if n != 1) for v in given}) == 1
    if node.op.name not in STRAIGHT:
        return False
    first = node.operands[0] if node.operands else None
    return first is None or not scalar_ops.calls_library(node.op.name, first.dtype)
