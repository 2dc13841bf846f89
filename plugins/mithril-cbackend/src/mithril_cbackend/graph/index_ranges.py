"""Ranges of integer values: gathers whose positions are known to be within bounds need no clamps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mithril import ops
from mithril.graph import Graph, Node, Registry, Value

Range = tuple[int, int]  # the smallest and the largest element
RULES: Registry[Callable[[Node, list[Range]], Range | None]] = Registry("ranges of integers in C")
DEEPEST = 32  # operations between a value and the constants that it is computed from
SELECTIONS = (ops.take, ops.take_along_axis, ops.gather_nd)  # positions follow the operand whose elements they select
MOVES = (ops.broadcast_to, ops.reshape, ops.transpose, ops.slice, ops.flip)


class IndexRanges:
    """The ranges of the values of a graph, computed on request."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ranges: dict[Value, Range | None] = {}

    def within_bounds(self, node: Node) -> bool:
        """Whether a gather reads at positions that are known to be within its operand."""
        if node.op not in (ops.take, ops.take_along_axis):
            return False
        x, positions = node.operands[:2]
        assert x is not None
        assert positions is not None
        size, limits = x.shape[node.attributes["axis"]], self.of(positions)
        return limits is not None and isinstance(size, int) and limits[0] >= 0 and limits[1] < size

    def of(self, value: Value, depth: int = 0) -> Range | None:
        """Return the range of a value, or None if it is unknown."""
        if value not in self.ranges:
            self.ranges[value] = self._range(value, depth) if depth < DEEPEST else None
        return self.ranges[value]

    def _range(self, value: Value, depth: int) -> Range | None:
        if value.dtype.is_bool:
            return 0, 1
        if value.dtype.kind not in ("int", "uint"):
            return None
        source = self.graph.input_of.get(value)
        if source is not None:
            elements = np.asarray(source.data) if source.role == "constant" else np.empty(0)
            return (int(elements.min()), int(elements.max())) if elements.size else None
        node = self.graph.producers.get(value)
        if node is None or node.op.name not in RULES or 0 in value.shape:
            return None
        count = 1 if node.op in SELECTIONS else len(node.operands)
        ranges = [None if v is None else self.of(v, depth + 1) for v in node.operands[:count]]
        if None in ranges:
            return None
        result = RULES[node.op.name](node, [r for r in ranges if r is not None])
        low, high = value.dtype.limits
        return result if result is not None and low <= result[0] and result[1] <= high else None  # no wrapping


@RULES(*SELECTIONS, *MOVES, ops.cast, ops.barrier)
def _moved(node: Node, ranges: list[Range]) -> Range | None:
    return ranges[0] if len(node.results) == 1 else None


@RULES(ops.constant, ops.full)
def _constant(node: Node, ranges: list[Range]) -> Range | None:
    value = node.attributes["value"]
    return (int(value), int(value)) if math.isfinite(value) else None


@RULES(ops.iota)
def _iota(node: Node, ranges: list[Range]) -> Range | None:
    size = node.result.shape[node.attributes["axis"]]
    return (0, size - 1) if isinstance(size, int) else None


@RULES(ops.add)
def _sum(node: Node, ranges: list[Range]) -> Range:
    (a, b), (c, d) = ranges
    return a + c, b + d


@RULES(ops.mul)
def _product(node: Node, ranges: list[Range]) -> Range:
    products = [x * y for x in ranges[0] for y in ranges[1]]
    return min(products), max(products)


@RULES(ops.where)
def _either(node: Node, ranges: list[Range]) -> Range:
    (a, b), (c, d) = ranges[1:]
    return min(a, c), max(b, d)
