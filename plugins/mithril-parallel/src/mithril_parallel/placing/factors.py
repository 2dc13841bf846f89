"""Division of a node's axis factors over a mesh: which splits of its operands the node can preserve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mithril.graph import Factors, OpAxes, Role
from mithril_parallel.mesh import Mesh, Split, base, blocks, in_blocks

Splits = Sequence[Split | None]
Allows = Callable[[str, Role | None], bool]  # predicate: may a factor of this role be divided?


@dataclass(frozen=True)
class Cut:
    """A factor divided along a mesh axis, in this number of blocks."""

    axis: str
    blocks: int = 1


def divide(axes: OpAxes, splits: Splits, mesh: Mesh, allows: Allows) -> Division:
    """Return the division implied by the operands' splits: factors of results first, then reduced factors."""
    division = Division(axes, mesh, allows)
    requests = list(dict.fromkeys(requested_cuts(axes, splits)))
    if len(requests) > 1:
        order = {f: k for k, f in enumerate(f for fs in axes.results for a in fs for f in a)}
        requests.sort(key=lambda w: order.get(w[0], len(order)))
    for factor, cut in requests:
        division.take(factor, cut)
    return division


def requested_cuts(axes: OpAxes, splits: Splits) -> Iterator[tuple[str, Cut]]:
    """Yield the factors that the operands' splits divide."""
    for fs, split in zip(axes.operands, splits, strict=True):
        for factors, entry in zip(fs or (), split or (), strict=True):
            if entry is not None:
                yield _factor(axes, factors, entry)


def _factor(axes: OpAxes, factors: Factors, entry: str) -> tuple[str, Cut]:
    """Return the factor of an axis that a split entry divides: the factor that starts at, or contains, its blocks."""
    outer, count, match = 1, blocks(entry), ("", 1)
    for f in factors:
        if axes.sizes[f] != 1 and count % outer == 0:
            match = (f, count // outer)
        outer *= length(axes, f)
        if outer > count:
            break
    return match[0], Cut(base(entry), match[1])


def length(axes: OpAxes, factor: str) -> int:
    size = axes.sizes[factor]
    return size if isinstance(size, int) else 1


class Division:
    """The factors of one node that are divided over a mesh."""

    def __init__(self, axes: OpAxes, mesh: Mesh, allows: Allows) -> None:
        self.axes, self.mesh, self.allows = axes, mesh, allows
        self.cuts: dict[str, Cut] = {}

    @property
    def used(self) -> set[str]:
        return {cut.axis for cut in self.cuts.values()}

    def take(self, factor: str, cut: Cut) -> None:
        """Divide a factor if its role allows this, the mesh divides its size, and no other factor conflicts."""
        size = self.axes.sizes.get(factor, 1)
        divides = isinstance(size, int) and size % (self.mesh.size(cut.axis) * cut.blocks) == 0
        if factor in self.cuts or not divides or not self._is_free(factor, cut.axis):
            return
        if self.allows(factor, self.axes.role(factor)):
            self.cuts[factor] = cut

    def _is_free(self, factor: str, axis: str) -> bool:
        """Whether no other divided factor conflicts: none in the same axes, none on the same mesh axis in a value."""
        for other, cut in self.cuts.items():
            both_parallel = self.axes.role(other) is None and self.axes.role(factor) is None
            for fs in (*self.axes.operands, *self.axes.results):
                present = {f for factors in fs or () for f in factors}
                if any(factor in factors and other in factors for factors in fs or ()):
                    return False
                if cut.axis == axis and (not both_parallel or {factor, other} <= present):
                    return False
        return True

    @property
    def operand_splits(self) -> tuple[Split | None, ...]:
        return tuple(None if fs is None else self._split(fs) for fs in self.axes.operands)

    @property
    def result_splits(self) -> tuple[Split, ...]:
        return tuple(self._split(fs) for fs in self.axes.results)

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of reduction over each mesh axis along which a reduced factor is divided."""
        roles = {cut.axis: self.axes.role(f) for f, cut in self.cuts.items()}
        return {axis: role.kind for axis, role in sorted(roles.items()) if role is not None}

    @property
    def lengths(self) -> dict[str, int]:
        """The sizes of the divided factors on one device."""
        return {f: length(self.axes, f) // self.mesh.size(cut.axis) for f, cut in self.cuts.items()}

    def _split(self, fs: Sequence[Factors]) -> Split:
        return tuple(self._entry(factors) for factors in fs)

    def _entry(self, factors: Factors) -> str | None:
        outer = 1
        for f in factors:
            if f in self.cuts:
                return in_blocks(self.cuts[f].axis, outer * self.cuts[f].blocks)
            outer *= length(self.axes, f)
        return None
