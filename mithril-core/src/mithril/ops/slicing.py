"""Slicing, padding and Python indexing.

``slice`` holds its positions in one form, a Python slice as it stands: ``x[start:stop:step]``. Starts and stops are
counted from the front and lie within the axis, save with a negative step: a stop past the beginning is ``-size - 1``,
and where the size is not known a position counted from the end stays the negative number it is. Calls may count from
the end and overrun with plain numbers, which are clamped as Python does; a symbolic position must lie within its axis,
which is guarded. ``END`` and ``-END`` stand for "as far as the axis goes" where the size is not known yet.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from mithril.base import (
    Call,
    Dim,
    Shape,
    ShapeError,
    Size,
    TensorType,
    assume,
    at_most,
    bounds,
    equal,
    floordiv,
    maximum,
    minimum,
    operation,
)
from mithril.ir import Axis, Ints, composite, like, normalize_axis, op, sample

END = 2**63 - 1


# -- slice --------------------------------------------------------------------------------------------------------
def _within(position: Size, size: Size) -> bool:
    """Whether ``position <= size`` for sure; ``min(k, size)`` is."""
    if at_most(position, size):
        return True
    call = _call(position)
    if call is None:
        return False
    inner = [_within(arg, size) for arg in call.args]
    return any(inner) if call.function == "min" else call.function == "max" and all(inner)


def _call(size: Size) -> Call | None:
    """The ``min``, ``max``, ... that a size is nothing but."""
    if isinstance(size, Dim) and len(size.terms) == 1 and size.terms[0][1] == 1 and len(size.terms[0][0]) == 1:
        atom = size.terms[0][0][0]
        return atom if isinstance(atom, Call) else None
    return None


def _front(position: Size, size: Size) -> Size:
    """A position of a positive step, counted from the front and clamped to the axis."""
    if isinstance(position, Dim):
        _, high = bounds(position)
        return size + position if high is not None and high < 0 else position
    if position >= 0:
        return size if position == END else minimum(position, size)
    return 0 if position == -END else maximum(size + position, 0)


def _back(position: Size, size: Size) -> Size:
    """A position of a negative step; before the beginning is ``-size - 1``."""
    before = -size - 1
    if isinstance(position, Dim):
        _, high = bounds(position)
        if position == before or high is None or high >= 0:
            return position
        return size + position
    if position >= 0:
        return size - 1 if position == END else minimum(position, size - 1)
    if position == -END:
        return before
    low, high = bounds(size + position)
    if low is None or low < 0:
        return before if high is not None and high < 0 else position  # Python clamps it when the size is known
    return size + position


def _one_form(start: Size, stop: Size, step: int, size: Size) -> tuple[Size, Size]:
    if step > 0:
        ordered = type(start) is int and type(stop) is int and start <= stop and (start < 0) == (stop < 0)
        first, last = _front(start, size), _front(stop, size)
        if ordered or (last == size and type(start) is int) or _within(first, last):
            return first, last
        if isinstance(start, Dim) or isinstance(stop, Dim):
            return first, first if at_most(last, first) else last  # their order is guarded by the shape rule
        return first, maximum(first, last)
    first, last = _back(start, size), _back(stop, size)
    if at_most(_literal(first, size), _literal(last, size)):
        return 0, 0
    return first, last


def _literal(position: Size, size: Size) -> Size:
    """A position of a negative step as the number it means: before the beginning is -1."""
    if position == -size - 1:
        return -1
    _, high = bounds(position)
    return maximum(size + position, -1) if high is not None and high < 0 else position


def _slice_form(types: Sequence[TensorType | None], attributes: dict[str, Any]) -> dict[str, Any]:
    shape = types[0].shape if types[0] is not None else ()
    starts, stops, steps, axes = (attributes[n] for n in ("starts", "stops", "steps", "axes"))
    if not len(starts) == len(stops) == len(steps) == len(axes):
        raise ShapeError(
            "a slice needs a start, a stop and a step for each axis",
            facts=[f"got {len(starts)} starts, {len(stops)} stops, {len(steps)} steps, {len(axes)} axes"],
        )
    rows = []
    for start, stop, step, axis in zip(starts, stops, steps, axes, strict=True):
        k = normalize_axis(axis, len(shape))
        if step == 0:
            raise ShapeError(f"the step of axis {k} is 0", hint="use 1 for all elements, -1 for reversed order")
        rows.append((k, step, *_one_form(start, stop, step, shape[k])))
    rows.sort(key=lambda row: row[0])
    if len({row[0] for row in rows}) != len(rows):
        raise ShapeError(f"an axis is named twice in {tuple(axes)}")
    return {
        "starts": tuple(row[2] for row in rows),
        "stops": tuple(row[3] for row in rows),
        "steps": tuple(row[1] for row in rows),
        "axes": tuple(row[0] for row in rows),
    }


def _slice_size(start: Size, stop: Size, step: int, size: Size) -> Size:
    if step < 0:
        return maximum(floordiv(_literal(start, size) - _literal(stop, size) - step - 1, -step), 0)
    return stop - start if step == 1 else floordiv(stop - start + step - 1, step)


def _slice_shape(x: Shape, *, starts: Shape, stops: Shape, steps: Ints, axes: Ints) -> Shape:
    out = list(x)
    for start, stop, step, axis in zip(starts, stops, steps, axes, strict=True):
        size = x[axis]
        low, high = (start, stop) if step > 0 else (stop, start)
        fits = True
        if step > 0 or _literal(low, size) == low:
            fits = assume(0, "<=", low, f"a slice of axis {axis} starts within it")
        if not (step < 0 and high == size - 1) and not _within(high, size):
            fits = fits and assume(high, "<=", size, f"a slice of axis {axis} stops within it")
        if not fits:
            raise ShapeError(f"the slice {start}:{stop}:{step} leaves axis {axis} of size {size}")
        if step > 0 and not _ordered(low, high):
            assume(low, "<=", high, f"a slice of axis {axis} stops after it starts")
        out[axis] = _slice_size(start, stop, step, size)
    return tuple(out)


def _ordered(low: Size, high: Size) -> bool:
    """Whether ``low <= high`` is sure, if only because the one form made it so by clamping."""
    return _within(low, high) or _call(low) is not None or _call(high) is not None


@op(
    shape=_slice_shape,
    dtype=like,
    canonical=_slice_form,
    samples=[
        sample((4, 5), starts=(1,), stops=(3,), steps=(1,), axes=(1,)),
        sample((6, 7), starts=(5, 1), stops=(-100, 7), steps=(-2, 3), axes=(0, 1), label="steps"),
        sample((3, 4), starts=(-1,), stops=(-END,), steps=(-1,), axes=(-1,), label="reversed"),
        sample((3, 4), starts=(2,), stops=(2,), steps=(1,), axes=(0,), label="empty"),
    ],
    axes="*x -> *x | x[axes] whole",
    moves=True,
    linear="x",
)
def slice(x, *, starts: Shape, stops: Shape, steps: Ints, axes: Ints):
    """Part of each axis named: ``x[start:stop:step]``; steps may be negative.

    Numbers count from the end where negative and are clamped as in Python. See the head of the file for the form in
    which positions reach backends.
    """
    index = [builtins.slice(None)] * x.ndim
    for start, stop, step, axis in zip(starts, stops, steps, axes, strict=True):
        index[axis] = builtins.slice(start, stop, step)
    return x[tuple(index)]


@slice.vjp
def _(g, y, x, *, starts, stops, steps, axes):
    widths: list[tuple[Size, Size]] = [(0, 0)] * x.ndim
    for start, step, axis in zip(starts, steps, axes, strict=True):
        size, count = x.shape[axis], y.shape[axis]
        if count == 0:
            return (operation("full")(shape=x.shape, value=0, dtype=x.dtype),)
        first = start
        if step < 0:
            g = operation("flip")(g, axis=axis)
            first = _literal(start, size) + (count - 1) * step
        span = (count - 1) * abs(step) + 1
        g = _spread(g, axis, abs(step), span)
        widths[axis] = (first, size - first - span)
    return (operation("pad")(g, widths=tuple(widths)),)


def _spread(g: Any, axis: int, step: int, span: Size) -> Any:
    """Elements ``step`` apart, zeros between them, over ``span`` places."""
    if step == 1:
        return g
    shape = g.shape
    apart = operation("reshape")(g, shape=(*shape[: axis + 1], 1, *shape[axis + 1 :]))
    widths = [(0, 0)] * (len(shape) + 1)
    widths[axis + 1] = (0, step - 1)
    long = (*shape[:axis], shape[axis] * step, *shape[axis + 1 :])
    apart = operation("reshape")(operation("pad")(apart, widths=tuple(widths)), shape=long)
    return slice(apart, starts=(0,), stops=(span,), steps=(1,), axes=(axis,))


def narrow(x: Any, axis: int, start: Size, stop: Size) -> Any:
    """``x[..., start:stop, ...]`` along one axis."""
    return slice(x, starts=(start,), stops=(stop,), steps=(1,), axes=(axis,))


# -- composites ---------------------------------------------------------------------------------------------------
@composite(samples=[sample((3, 4, 5), index=(-1, 2), axes=(0, 2))])
def select(x, *, index: Shape, axes: Ints):
    """One element along each axis named; those axes disappear. Negative positions count from the end."""
    if len(index) != len(axes):
        raise ShapeError(f"select got {len(index)} positions for {len(axes)} axes")
    named = [normalize_axis(a, x.ndim) for a in axes]
    starts: list[Size] = []
    stops: list[Size] = []
    for at, axis in zip(index, named, strict=True):
        size = x.shape[axis]
        if type(at) is int:
            lowest: Size = -at if at < 0 else at + 1
            if at_most(lowest, size) is False:
                raise ShapeError(
                    f"index {at} is out of range for axis {axis} of size {size}",
                    facts=[f"accepted: {-size} to {size - 1}" if size != 0 else "accepted: none, the axis is empty"],
                )
            at = at if at >= 0 else size + at
        starts.append(at)
        stops.append(at + 1)
    part = slice(x, starts=tuple(starts), stops=tuple(stops), steps=(1,) * len(named), axes=tuple(named))
    return operation("reshape")(part, shape=tuple(d for k, d in enumerate(x.shape) if k not in named))


@composite(results=(), samples=[sample((6, 2), sizes=(1, 3, 2)), sample((2, 4), sizes=(2, 2), axis=-1, label="axis")])
def split(x, *, sizes: Shape, axis: Axis = 0):
    """Consecutive parts of the given sizes along an axis."""
    parts: list[Any] = []
    start: Size = 0
    for size in sizes:
        parts.append(narrow(x, axis, start, start + size))
        start = start + size
    total = x.shape[axis]
    if equal(start, total) is False:
        raise ShapeError(f"split sizes {list(sizes)} add up to {start}, but axis {axis} has {total}")
    if equal(start, total) is None:
        assume(start, "==", total, f"the parts of a split make up axis {axis}")
    return tuple(parts)


@composite(samples=[sample((3, 4), shift=(1, -2), axis=(0, 1)), sample((5,), shift=(7,), axis=(0,), label="overrun")])
def roll(x, *, shift: Ints, axis: Ints):
    """Move elements ``shift`` places along axes; what leaves at one end comes in at the other.

    An axis of symbolic size must be at least as long as its shift, which is guarded.
    """
    if len(shift) != len(axis):
        raise ShapeError(f"roll got {len(shift)} shifts for {len(axis)} axes")
    for places, where in zip(shift, axis, strict=True):
        k = normalize_axis(where, x.ndim)
        size = x.shape[k]
        if size == 0:
            continue
        if isinstance(size, Dim):
            assume(abs(places), "<=", size, f"axis {k} is rolled by at most its size")
            cut = size - places if places > 0 else -places
        else:
            cut = size - places % size
        if places != 0 and cut != size:
            x = operation("concat")(narrow(x, k, cut, size), narrow(x, k, 0, cut), axis=k)
    return x


__all__ = ["END", "narrow", "roll", "select", "slice", "split"]
