"""Axes of operations: which axes of operands and results share a loop, and the role of each loop.

``"... m? k, ... k n? -> ... m? n? | k sum"`` is the declaration of ``matmul``. Each axis is a *factor* or a product of
factors; a factor without a role is parallel: applying the operation to slices yields slices of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mithril.graph.axes_notation import REDUCING
from mithril.graph.dims import Shape, Size, product

# The factors of an axis by name; its size is their product.
Factors = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a factor. ``operand`` is the number of the indices for "index", of the addend for "sum into"."""

    kind: str
    operand: int | None = None

    @property
    def reduces(self) -> bool:
        return self.kind in REDUCING


WHOLE = Role("whole")


@dataclass(frozen=True, eq=False)
class OpAxes:
    """The factors of each axis of one call, outermost first, and their roles."""

    operands: tuple[tuple[Factors, ...] | None, ...]
    results: tuple[tuple[Factors, ...], ...]
    sizes: Mapping[str, Size]
    roles: Mapping[str, Role] = field(default_factory=dict)  # factors without one are parallel
    shapes: tuple[Shape, ...] = ()  # of the results
    shape_attribute: str = ""  # name of the attribute that holds the first result's shape
    counted: Mapping[str, str] = field(default_factory=dict)  # factor -> attribute that holds its size
    moves: bool = False  # the operation only moves elements
    uneven: tuple[str, ...] = ()  # factors of several sizes that the declaration does not mark as whole

    def role(self, factor: str) -> Role | None:
        """Return the role of a factor, or None if it is parallel."""
        return self.roles.get(factor)

    @cached_property
    def parallel(self) -> tuple[str, ...]:
        return tuple(f for f in self.sizes if f not in self.roles)

    @cached_property
    def reduced(self) -> tuple[str, ...]:
        return tuple(f for f in self.sizes if f in self.roles and self.roles[f].reduces)

    @cached_property
    def is_product(self) -> bool:
        """Whether a factor shared by two operands is summed."""
        return any(
            self.roles[f].kind == "sum" and self.roles[f].operand is None and len(self.readers(f)) > 1
            for f in self.reduced
        )

    @property
    def terms(self) -> Size:
        """The size of the iteration space: all factors but windows, which follow from the others."""
        windows = {f for f, role in self.roles.items() if role.kind == "window"}
        return product(n for f, n in self.sizes.items() if f not in windows)

    @cached_property
    def is_layout(self) -> bool:
        """Whether elements are only moved or repeated: a transpose, a reshape, a broadcast."""
        return self.moves and bool(self.operands) and all(role.kind == "mixed" for role in self.roles.values())

    @cached_property
    def is_view(self) -> bool:
        """Whether the results have the operands' elements in the same row-major order."""
        if not self.is_layout or len(self.operands) != len(self.results):
            return False
        pairs = zip(self.operands, self.results, strict=True)
        return all(x is not None and self._flat(x) == self._flat(y) for x, y in pairs)

    def _flat(self, axes: Iterable[Factors]) -> list[str]:
        return [f for factors in axes for f in factors if f not in self.roles and self.sizes[f] != 1]

    def readers(self, factor: str) -> list[int]:
        """Return the numbers of the operands that have the factor."""
        return [k for k, axes in enumerate(self.operands) if axes is not None and any(factor in a for a in axes)]

    def has_in_result(self, factor: str) -> bool:
        """Whether a result has the factor."""
        return any(factor in a for axes in self.results for a in axes)

    def rows(self, operand: int, axis: int) -> str | None:
        """Return the parallel factor that spans exactly one axis of an operand, or None."""
        return self._parallel_axis(self.operands[operand], axis)

    def result_rows(self, axis: int, result: int = 0) -> str | None:
        """Return the parallel factor that spans exactly one axis of a result, or None."""
        return self._parallel_axis(self.results[result], axis)

    def _parallel_axis(self, axes: Sequence[Factors] | None, axis: int) -> str | None:
        factors = axes[axis] if axes is not None else ()
        long = [f for f in factors if self.sizes[f] != 1] or list(factors[:1])
        return long[0] if len(long) == 1 and long[0] not in self.roles else None

    @cached_property
    def lookups(self) -> tuple[tuple[int, int, int], ...]:
        """The look-ups as (operand of indices, indexed operand, indexed axis)."""
        return tuple(
            (role.operand, k, axis)
            for f, role in self.roles.items()
            if role.kind == "index" and role.operand is not None
            for k in self.readers(f)
            for axis, factors in enumerate(self.operands[k] or ())
            if f in factors
        )

    def reads_rows(self, operand: int) -> str | None:
        """Return "rows" or "columns", whichever of a matrix each sum or look-up reads, or None if neither."""
        axes = self.operands[operand]
        if axes is None or len(axes) != 2 or any(len(factors) != 1 for factors in axes):
            return None
        first, last = axes[0][0], axes[1][0]
        for inner, outer, answer in ((last, first, "rows"), (first, last, "columns")):
            role = self.roles.get(inner)
            summed = role is not None and role.kind == "sum" and role.operand is None and len(self.readers(inner)) == 2
            if summed and outer not in self.roles and self.readers(outer) == [operand]:
                return answer
        role = self.roles.get(first)
        looked_up = role is not None and role.kind == "index" and not self.has_in_result(first)
        return "rows" if looked_up and last not in self.roles else None

    def cut(self, local: Mapping[str, Size]) -> dict[str, Any]:
        """Return the attributes that change when factors have these local sizes."""
        changed: dict[str, Any] = {name: local[f] for f, name in self.counted.items() if f in local}
        if self.shape_attribute and any(self.has_in_result(f) for f in local):
            changed[self.shape_attribute] = self.local_shape(self.shapes[0], self.results[0], local)
        return changed

    def local_shape(self, shape: Shape, axes: Sequence[Factors], local: Mapping[str, Size]) -> Shape:
        """Return the shape in which factors have these local sizes."""
        return tuple(
            product(local.get(f, self.sizes[f]) for f in factors) if any(f in local for f in factors) else n
            for n, factors in zip(shape, axes, strict=True)
        )


def unknown_axes(shapes: Sequence[Shape | None], results: Sequence[Shape]) -> OpAxes:
    """Return the axes of an operation without a declaration: all are whole."""
    operands = tuple(None if s is None else tuple((f"{k}.{i}",) for i in range(len(s))) for k, s in enumerate(shapes))
    written = tuple(tuple((f"-{k}.{i}",) for i in range(len(s))) for k, s in enumerate(results))
    sizes = {
        factors[0]: n
        for axes, shape in zip((*operands, *written), (*shapes, *results), strict=True)
        if axes is not None and shape is not None
        for factors, n in zip(axes, shape, strict=True)
    }
    return OpAxes(operands, written, sizes, dict.fromkeys(sizes, WHOLE), tuple(results))
