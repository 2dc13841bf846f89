"""Axes of reshapes and barriers, which cannot be declared as strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from mithril.graph import OpAxes, Role, Shape, Size, floordiv, mod, unknown_axes


def reshape_axes(shapes: Sequence[Shape | None], attributes: Mapping[str, Any], results: Sequence[Shape]) -> OpAxes:
    """Factor both shapes of a reshape into common factors; sizes without a common factor are mixed."""
    before, after = shapes[0] or (), results[0]
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    sizes: dict[str, Size] = {}
    roles: dict[str, Role] = {}
    # Axes of size 1 have no factor, so their position does not matter.
    rest = [[(k, n) for k, n in enumerate(shape) if n != 1] for shape in (before, after)]
    if any(n == 0 for n in (*before, *after)):
        return _mixed_axes(before, after)
    while rest[0] and rest[1]:
        (i, a), (j, b) = rest[0][0], rest[1][0]
        size = _common(a, b)
        if size == 1:
            break
        name = f"f{len(sizes)}"
        sizes[name] = size
        left[i].append(name)
        right[j].append(name)
        for side, (k, n) in zip(rest, ((i, a), (j, b)), strict=True):
            more = floordiv(n, size)
            side[:1] = [(k, more)] if more != 1 else []
    for side, axes in zip(rest, (left, right), strict=True):
        for k, n in side:
            name = f"f{len(sizes)}"
            sizes[name], roles[name] = n, Role("mixed")
            axes[k].append(name)
    return OpAxes(
        (tuple(map(tuple, left)),), (tuple(map(tuple, right)),), sizes, roles, (tuple(after),), shape_attribute="shape"
    )


def _common(a: Size, b: Size) -> Size:
    """Return the largest common factor of two sizes that is known statically."""
    if isinstance(a, int) and isinstance(b, int):
        return gcd(a, b)
    return a if a == b else b if mod(a, b) == 0 else a if mod(b, a) == 0 else 1


def _mixed_axes(before: Shape, after: Shape) -> OpAxes:
    axes = unknown_axes([before], [after])
    return OpAxes(
        axes.operands, axes.results, axes.sizes, dict.fromkeys(axes.sizes, Role("mixed")), axes.shapes, "shape"
    )


def barrier_axes(shapes: Sequence[Shape | None], attributes: Mapping[str, Any], results: Sequence[Shape]) -> OpAxes:
    """Return the axes of a barrier: each result has the axes of its operand."""
    axes = tuple(tuple((f"x{k}_{i}",) for i in range(len(s or ()))) for k, s in enumerate(shapes))
    sizes = {f"x{k}_{i}": n for k, s in enumerate(shapes) for i, n in enumerate(s or ())}
    return OpAxes(axes, axes, sizes, {}, tuple(results))
