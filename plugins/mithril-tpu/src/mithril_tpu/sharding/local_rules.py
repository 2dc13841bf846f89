"""Which operations run on parts of their operands, exactly: read off the axes that the operations declare.

The placing rules predict how a compiler partitions an operation. Here no compiler comes after: a split is only kept
where the operation on parts, with its attributes changed to sizes of parts, gives parts of the result, bit for bit the
result of one device except for the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mithril.ir import Graph, Node, Value
from mithril.ir.axes import Axes, Factors
from mithril_tpu.partitioning.mesh import Mesh, Split, base, blocks, in_blocks
from mithril_tpu.partitioning.rules import sizes

Splits = Sequence[Split | None]


@dataclass(frozen=True)
class Local:
    """How a node runs on parts. ``joins`` says over which axes its results are joined at once, and how."""

    needs: tuple[Split | None, ...]
    gives: tuple[Split, ...]
    sums: frozenset[str] = frozenset()
    attributes: Mapping[str, Any] = field(default_factory=dict)  # those that change
    scale: float = 1.0  # of sums that represent means
    joins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Cut:
    """A factor divided along a mesh axis, in this number of blocks."""

    axis: str
    blocks: int = 1


def local(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local | None:
    """Return how a node runs on operands in these splits; None if a composite must be taken apart to keep one."""
    choice = _Choice(graph, node, mesh)
    wanted = list(_wanted(node.axes, splits))
    given = {f: k for k, f in enumerate(f for fs in node.axes.results for a in fs for f in a)}
    for factor, cut in sorted(wanted, key=lambda w: given.get(w[0], len(given))):
        choice.take(factor, cut)
    lost = [cut for factor, cut in wanted if choice.cuts.get(factor) != cut and cut.axis not in choice.used]
    if lost and getattr(node.op, "composite", False) and not getattr(node.op, "elementwise", False):
        return None
    return choice.local(splits)


def _wanted(axes: Axes, splits: Splits) -> Iterator[tuple[str, _Cut]]:
    """Yield the factors that the operands' splits divide."""
    for fs, split in zip(axes.operands, splits, strict=True):
        for factors, entry in zip(fs or (), split or (), strict=True):
            if entry is not None:
                yield _factor(axes, factors, entry)


def _factor(axes: Axes, factors: Factors, entry: str) -> tuple[str, _Cut]:
    """Return the factor of an axis that an entry divides: the one that begins at its blocks, or has them inside."""
    outer, count, found = 1, blocks(entry), ("", 1)
    for f in factors:
        if axes.sizes[f] != 1 and count % outer == 0:
            found = (f, count // outer)
        outer *= _length(axes, f)
        if outer > count:
            break
    return found[0], _Cut(base(entry), found[1])


def _length(axes: Axes, factor: str) -> int:
    size = axes.sizes[factor]
    return size if isinstance(size, int) else 1


class _Choice:
    """Factors of one node that are divided over a mesh."""

    def __init__(self, graph: Graph, node: Node, mesh: Mesh) -> None:
        self.graph, self.node, self.mesh = graph, node, mesh
        self.axes: Axes = node.axes
        self.cuts: dict[str, _Cut] = {}

    @property
    def used(self) -> set[str]:
        return {cut.axis for cut in self.cuts.values()}

    def take(self, factor: str, cut: _Cut) -> None:
        """Divide a factor if its role allows it, the mesh divides it, and no other one is in the way."""
        length = self.axes.sizes.get(factor, 1)
        divides = isinstance(length, int) and length % (self.mesh.size(cut.axis) * cut.blocks) == 0
        if factor not in self.cuts and divides and self._allowed(factor) and self._free(factor, cut.axis):
            self.cuts[factor] = cut

    def _allowed(self, factor: str) -> bool:
        role = self.axes.role(factor)
        if role is None or role.kind in ("mean", "max", "min"):
            return True
        if role.kind != "sum":
            return False
        into = self.node.operands[role.operand] if role.operand is not None else None
        return into is None or is_zero(self.graph, into)

    def _free(self, factor: str, axis: str) -> bool:
        """Whether a factor meets no other one of its mesh axis, and none within the same axis of a value."""
        for other, cut in self.cuts.items():
            both_parallel = self.axes.role(other) is None and self.axes.role(factor) is None
            for fs in (*self.axes.operands, *self.axes.results):
                present = {f for factors in fs or () for f in factors}
                if any(factor in factors and other in factors for factors in fs or ()):
                    return False
                if cut.axis == axis and (not both_parallel or {factor, other} <= present):
                    return False
        return True

    def local(self, splits: Splits) -> Local:
        roles = {cut.axis: self.axes.role(f) for f, cut in self.cuts.items()}
        kinds = {axis: role.kind for axis, role in roles.items() if role is not None}
        scale = 1.0
        for axis, kind in kinds.items():
            scale /= self.mesh.size(axis) if kind == "mean" else 1
        lengths = {f: _length(self.axes, f) // self.mesh.size(cut.axis) for f, cut in self.cuts.items()}
        return Local(
            tuple(None if fs is None else self._split(fs) for fs in self.axes.operands),
            tuple(self._split(fs) for fs in self.axes.results),
            frozenset(axis for axis, kind in kinds.items() if kind in ("sum", "mean")),
            self.axes.cut(lengths),
            scale,
            {axis: kind for axis, kind in sorted(kinds.items()) if kind in ("max", "min")},
        )

    def _split(self, fs: Sequence[Factors]) -> Split:
        return tuple(self._entry(factors) for factors in fs)

    def _entry(self, factors: Factors) -> str | None:
        outer = 1
        for f in factors:
            if f in self.cuts:
                return in_blocks(self.cuts[f].axis, outer * self.cuts[f].blocks)
            outer *= _length(self.axes, f)
        return None


def own_places(graph: Graph, x: Value, at: Value) -> list[int]:
    """Axes along which each row of places in ``at`` names its own place in ``x``, as ``x[i, places[i]]`` does."""
    stacked = graph.producers.get(at)
    if stacked is None or stacked.op.name != "concat" or stacked.attributes["axis"] != at.ndim - 1:
        return []
    found = []
    for k, v in enumerate(stacked.operands):
        while v is not None and (node := graph.producers.get(v)) is not None and node.op.name in ("reshape", "cast"):
            v = node.operands[0]
        counts = v is not None and node is not None and node.op.name == "iota" and node.attributes["axis"] == k
        if counts and v is not None and v.shape == at.shape[:-1] and x.shape[k] == at.shape[k]:
            found.append(k)
    return found if len(stacked.operands) == sizes(at)[-1] else []


def is_zero(graph: Graph, v: Value) -> bool:
    """Whether a value is zero everywhere, and known to be."""
    while (node := graph.producers.get(v)) is not None:
        if node.op.name in ("full", "constant"):
            return bool(node.attributes["value"] == 0)
        if node.op.name not in ("broadcast_to", "cast", "reshape") or node.operands[0] is None:
            return False
        v = node.operands[0]
    return False
