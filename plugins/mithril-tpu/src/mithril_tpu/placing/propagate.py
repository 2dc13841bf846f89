"""The split of every value of a graph, from those of its inputs; and the exchanges between devices this implies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from mithril.graph import Graph, Node, Value
from mithril_tpu.placing.layout import Mesh, Split, whole
from mithril_tpu.placing.rules import passage, sizes


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective: ``bytes`` is one device's part of its result (of the larger side, where a sum is scattered)."""

    kind: str
    axis: str
    bytes: int
    node: Node


@dataclass
class Placed:
    """A graph on a mesh."""

    mesh: Mesh
    splits: dict[Value, Split] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)

    def local(self, v: Value) -> tuple[int, ...]:
        """The shape of one device's part of a value."""
        return self.mesh.local(sizes(v), self.splits.get(v) or whole(v.ndim))

    def bytes(self, v: Value) -> int:
        """Bytes of one device's part of a value."""
        return prod(self.local(v)) * v.dtype.itemsize


def propagate(graph: Graph, mesh: Mesh, given: Mapping[str, Split]) -> Placed:
    """Walk the graph once, in order; inputs that ``given`` does not name are whole everywhere."""
    placed = Placed(mesh)
    moved: set[tuple[Value, Split]] = set()
    for i in graph.inputs:
        placed.splits[i.value] = given.get(i.name, whole(i.value.ndim))
    for node in graph.nodes:
        step(placed, node, moved)
    return placed


def step(placed: Placed, node: Node, moved: set[tuple[Value, Split]]) -> None:
    """Place the results of one node; a value that was moved for an earlier reader is not moved again."""
    have = [None if v is None else placed.splits[v] for v in node.operands]
    found = passage(node, have, placed.mesh)
    for v, split, need in zip(node.operands, have, found.needs, strict=True):
        if v is not None and split is not None and need is not None and (v, need) not in moved:
            _move(placed, node, v, split, need)
            moved.add((v, need))
    for v, split in zip(node.results, found.gives, strict=True):
        placed.splits[v] = split
        placed.exchanges += [
            Exchange("all-reduce", axis, placed.bytes(v), node)
            for axis in sorted(found.sums)
            if placed.mesh.size(axis) > 1
        ]


def _move(placed: Placed, node: Node, v: Value, have: Split, need: Split) -> None:
    """What it takes to get from one split to another: giving up a split gathers, taking one on is free."""
    mesh = placed.mesh
    for k, axis in enumerate(have):
        if axis is None or need[k] == axis or mesh.size(axis) == 1:
            continue
        kind = "all-to-all" if axis in need else "all-gather"
        size = prod(mesh.local(sizes(v), need)) * v.dtype.itemsize
        placed.exchanges.append(Exchange(kind, axis, size, node))
