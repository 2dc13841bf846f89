"""Predicates: which operations can be vectorized."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import ops
from mithril.graph import Node
from mithril_cbackend.lowering.element import scalar_ops
from mithril_cbackend.lowering.element.element_reader import is_uniform, shape_of

# operations that do not read operands at computed indices
STRAIGHT = (ops.iota, ops.transpose, ops.slice, ops.tril, ops.triu, ops.random_bits)


def is_plain(node: Node) -> bool:
    """Whether each element depends only on the operands' elements at the same index, broadcast."""
    return node.op.name in scalar_ops.RULES or node.op is ops.broadcast_to or is_uniform(node)


def vectorizable(nodes: Sequence[Node]) -> bool:
    """Whether every operation can be vectorized."""
    return all(_is_vector_code(node) for node in nodes)


def _is_vector_code(node: Node) -> bool:
    if node.op is ops.reshape:  # only one that inserts or removes axes of size 1
        values = [v for v in node.operands if v is not None] + [node.result]
        return len({tuple(n for n in shape_of(v) if n != 1) for v in values}) == 1
    return is_plain(node) or node.op in STRAIGHT


def gathers_rows(nodes: Sequence[Node]) -> bool:
    """Whether operations only gather rows, whose positions all lanes share, and compute with their elements."""
    return all(is_plain(n) or (n.op is ops.take and _is_row(n)) for n in nodes)


def _is_row(node: Node) -> bool:
    """Whether the last axis of a gather is that of the operand."""
    positions = node.operands[1]
    assert positions is not None
    return int(node.attributes["axis"]) + positions.ndim < node.result.ndim


def pieces(width: int, lanes: int) -> list[tuple[int, int]]:
    """Divide elements into vectors whose lengths are powers of two; return where each starts and its length."""
    parts, start = [], 0
    while start < width:
        size = min(lanes, 1 << (width - start).bit_length() - 1)
        parts.append((start, size))
        start += size
    return parts
