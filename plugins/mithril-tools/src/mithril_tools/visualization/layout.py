"""Layout of boxes: ranks by longest path, few crossings by medians, straight long edges (Sugiyama's method)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

SWEEPS = 8
GAP, LEVEL = 24.0, 46.0  # between boxes of a rank, between ranks


@dataclass(eq=False)
class Box:
    """A box to draw; a box without size is a bend of a long edge."""

    width: float
    height: float
    rank: int = 0
    x: float = 0.0  # of the center
    y: float = 0.0  # of the top edge
    above: list[Box] = field(default_factory=list)
    below: list[Box] = field(default_factory=list)


@dataclass
class Placed:
    """A finished layout: its size, and the points of every edge in input order."""

    width: float
    height: float
    routes: list[list[tuple[float, float]]]


def place(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> Placed:
    """Compute the position of every box. Edges go from lower to higher index, as graphs define before they use."""
    for a, b in sorted(edges, key=lambda e: e[1]):
        boxes[b].rank = max(boxes[b].rank, boxes[a].rank + 1)
    _pull_down(boxes, edges)
    ranks: list[list[Box]] = [[] for _ in range(max((b.rank for b in boxes), default=0) + 1)]
    for box in boxes:
        ranks[box.rank].append(box)
    chains = [_chain(boxes[a], boxes[b], ranks) for a, b in edges]
    _order(ranks)
    _columns(ranks)
    top = 10.0
    for rank in ranks:
        tallest = max((b.height for b in rank), default=0.0)
        for box in rank:
            box.y = top
            if not box.width:
                box.height = tallest  # a long edge passes through ranks in a straight line
        top += tallest + LEVEL
    left = min((b.x - b.width / 2 for r in ranks for b in r), default=0.0) - 10
    for rank in ranks:
        for box in rank:
            box.x -= left
    width = max((b.x + b.width / 2 for r in ranks for b in r), default=0.0) + 10
    return Placed(width, top - LEVEL + 10, [_route(c) for c in chains])


def _pull_down(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> None:
    """Move boxes without predecessors directly above their first user instead of the top row."""
    readers: dict[int, int] = {}
    has_source = {b for _, b in edges}
    for a, b in edges:
        readers[a] = min(readers.get(a, boxes[b].rank), boxes[b].rank)
    for k, first in readers.items():
        if k not in has_source:
            boxes[k].rank = first - 1


def _chain(a: Box, b: Box, ranks: list[list[Box]]) -> list[Box]:
    """Return the two ends of an edge and a bend in every rank between."""
    chain = [a]
    for rank in range(a.rank + 1, b.rank):
        bend = Box(0.0, 0.0, rank)
        ranks[rank].append(bend)
        chain.append(bend)
    chain.append(b)
    for upper, lower in pairwise(chain):
        upper.below.append(lower)
        lower.above.append(upper)
    return chain


def _order(ranks: list[list[Box]]) -> None:
    """Sort each rank by the mean position of its neighbors, alternating downwards and upwards."""
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for rank in ranks if down else reversed(ranks):
            positions = (
                {id(b): k for r in ranks for k, b in enumerate(r)} if len(ranks) < 40 else _adjacent_positions(rank)
            )
            keys = {}
            for k, box in enumerate(rank):
                neighbors = box.above if down else box.below
                keys[id(box)] = (
                    sum(positions.get(id(n), k) for n in neighbors) / len(neighbors) if neighbors else float(k)
                )
            rank.sort(key=lambda b: keys[id(b)])


def _adjacent_positions(rank: list[Box]) -> dict[int, int]:
    """Return the positions in the adjacent ranks only: all ranks would be too slow for tall pictures."""
    adjacent = {id(n): n for b in rank for n in (*b.above, *b.below)}
    ordered = sorted(adjacent.values(), key=lambda n: n.x)
    return {id(n): k for k, n in enumerate(ordered)}


def _columns(ranks: list[list[Box]]) -> None:
    """Place boxes without overlap, each as close to the center of its neighbors as the order allows."""
    for rank in ranks:
        x = 0.0
        for box in rank:
            box.x = x + box.width / 2
            x += box.width + GAP
        for box in rank:
            box.x -= x / 2
    for sweep in range(2 * SWEEPS):
        for rank in ranks if sweep % 2 == 0 else reversed(ranks):
            wish = []
            for box in rank:
                neighbors = box.above if sweep % 2 == 0 else box.below
                wish.append(sum(n.x for n in neighbors) / len(neighbors) if neighbors else box.x)
            _relax(rank, wish)


def _relax(rank: list[Box], wish: list[float]) -> None:
    """Set positions near the targets that keep order and distance: the mean of a left and a right sweep."""
    from_left, low = [], float("-inf")
    for box, x in zip(rank, wish, strict=True):
        low = max(x, low + box.width / 2) if low > float("-inf") else x
        from_left.append(low)
        low += box.width / 2 + GAP
    from_right, high = [], float("inf")
    for box, x in zip(reversed(rank), reversed(wish), strict=True):
        high = min(x, high - box.width / 2) if high < float("inf") else x
        from_right.append(high)
        high -= box.width / 2 + GAP
    for box, a, b in zip(rank, from_left, reversed(from_right), strict=True):
        box.x = (a + b) / 2


def _route(chain: list[Box]) -> list[tuple[float, float]]:
    first, last = chain[0], chain[-1]
    middle = [point for b in chain[1:-1] for point in ((b.x, b.y), (b.x, b.y + b.height))]
    return [(first.x, first.y + first.height), *middle, (last.x, last.y)]
