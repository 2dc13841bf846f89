"""Runs of equal segments in the nodes of a graph, such as the layers of a transformer, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mithril.graph import CHECKS, Graph, Node, Value, iterate

LONGEST = 4096  # nodes of a segment: the search takes time in proportion
Numbers = np.ndarray[Any, Any]


class Repeats(NamedTuple):
    """Segments of ``length`` nodes each from position ``start``, of equal operations, attributes and types."""

    start: int
    length: int
    segments: int


def repeated_segments(nodes: Sequence[Node], smallest: int) -> list[Repeats]:
    """Return runs of equal segments without overlap, in order; repeats of a run have at least ``smallest`` nodes.

    Nodes of regions count. A segment begins where the fewest values pass to the next one.
    """
    numbers: dict[Any, int] = {}
    keys = [_key(node) for node in nodes]
    tokens = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    weights = np.array([1 + sum(len(list(iterate(r))) for r in node.regions) for node in nodes], np.int64)
    passing = _Passing(nodes)
    return sorted(_search(tokens, weights, passing, 0, len(nodes), smallest))


def _search(
    tokens: Numbers, weights: Numbers, passing: _Passing, start: int, stop: int, smallest: int
) -> Iterator[Repeats]:
    """Yield the longest run between two positions, and those before and after it."""
    part, before = tokens[start:stop], np.concatenate([[0], np.cumsum(weights[start:stop])])
    best, gain = None, smallest - 1
    for length in range(1, min(len(part) // 2, LONGEST) + 1):
        equal = np.concatenate([[0], part[:-length] == part[length:], [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(equal))
        firsts, ends = edges[::2], edges[1::2]
        for first, end in zip(*(x[ends - firsts >= length] for x in (firsts, ends)), strict=True):
            count = int(end - first) // length + 1
            repeated = int(before[first + length * count] - before[first + length])
            if repeated > gain:
                best, gain = (int(first), int(end) - int(first), length, count), repeated
    if best is None:
        return
    first, matches, length, count = best
    choices = range(start + first, start + first + matches % length + 1)
    begin = min(choices, key=lambda k: passing.count(k, length))
    yield from _search(tokens, weights, passing, start, begin, smallest)
    yield Repeats(begin, length, count)
    yield from _search(tokens, weights, passing, begin + length * count, stop, smallest)


class _Passing:
    """Counts of values that a segment passes to the next one."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        produced: dict[Value, int] = {}
        self.uses: list[list[int]] = [[] for _ in nodes]  # by position of the producer
        for k, node in enumerate(nodes):
            for v in node.operands:
                if v in produced:
                    self.uses[produced[v]].append(k)
            produced.update((v, k) for v in node.results)

    def count(self, position: int, length: int) -> int:
        """Return how many results of a segment before the position the segment after it reads."""
        after = range(position, position + length)
        return sum(any(k in after for k in self.uses[p]) for p in range(max(position - length, 0), position))


# -- equality ---------------------------------------------------------------------------------------------------------
def _key(node: Node) -> tuple[Any, ...]:
    """Return a key that equal nodes share: operation, attributes, regions and types, but not which values they read."""
    operands = tuple(None if v is None else v.type for v in node.operands)
    results = tuple(v.type for v in node.results)
    tags = tuple(sorted((n, repr(t)) for n, t in node.tags.items() if n not in CHECKS))
    regions = tuple(_region_key(r) for r in node.regions)
    return (node.op.name, repr(tuple(node.attributes.items())), operands, results, regions, tags)


def _region_key(region: Graph) -> tuple[Any, ...]:
    """Return a key that regions of the same computation share, whatever their values are called."""
    numbers: dict[Value | None, int] = {None: -1}
    for i in region.inputs:
        numbers[i.value] = len(numbers)
    keys: list[Any] = [tuple((i.type, id(i.data) if i.data is not None else 0) for i in region.inputs)]
    for node in region.nodes:
        for v in node.results:
            numbers[v] = len(numbers)
        keys.append((_key(node), tuple(numbers[v] for v in node.operands)))
    return (*keys, tuple(numbers[v] for v in region.outputs))
