"""Slicing: slice, select, split, roll.

A guard checks that symbolic positions are within the axis. ``END`` and ``-END`` mean the end and the beginning of an
axis whose size is not known yet.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from mithril.graph import (
    Axis,
    Call,
    Dim,
    Ints,
    Shape,
    ShapeError,
    Size,
    TensorType,
    assume,
    at_most,
    bounds,
    composite,
    equal,
    floordiv,
    like,
    maximum,
    minimum,
    normalize_axis,
    op,
    operation,
    sample,
)

# Larger than any size, as ends that are left open are written in ONNX.
END = 2**63 - 1


# -- slice --------------------------------------------------------------------------------------------------------
def _provably_at_most(position: Size, size: Size) -> bool:
    """Whether ``position <= size`` is provable, as for ``min(k, size)``."""
    if at_most(position, size):
        return True
    call = _call(position)
    if call is None:
        return False
    inner = [_provably_at_most(arg, size) for arg in call.args]
    return any(inner) if call.function == "min" else call.function == "max" and all(inner)


def _call(size: Size) -> Call | None:
    """Return the call of ``min``, ``max``, ... if the size is only such a call, or None."""
    if isinstance(size, Dim) and len(size.terms) == 1 and size.terms[0][1] == 1 and len(size.terms[0][0]) == 1:
        atom = size.terms[0][0][0]
        return atom if isinstance(atom, Call) else None
    return None


def _clamp_forward(position: Size, size: Size) -> Size:
    """Canonicalize a position for a positive step: non-negative and clamped to the axis."""
    if isinstance(position, Dim):
        _, high = bounds(position)
        return size + position if high is not None and high < 0 else position
    if position >= 0:
        return size if position == END else minimum(position, size)
    return 0 if position == -END else maximum(size + position, 0)


def _clamp_backward(position: Size, size: Size) -> Size:
    """Canonicalize a position for a negative step; before the first element is ``-size - 1``."""
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
        # Python clamps the position when the size is known.
        return before if high is not None and high < 0 else position
    return size + position


def _one_form(start: Size, stop: Size, step: int, size: Size) -> tuple[Size, Size]:
    if step > 0:
        ordered = type(start) is int and type(stop) is int and start <= stop and (start < 0) == (stop < 0)
        first, last = _clamp_forward(start, size), _clamp_forward(stop, size)
        if ordered or (last == size and type(start) is int) or _provably_at_most(first, last):
            return first, last
        if isinstance(start, Dim) or isinstance(stop, Dim):
            return first, first if at_most(last, first) else last  # the shape rule guards their order
        return first, maximum(first, last)
    first, last = _clamp_backward(start, size), _clamp_backward(stop, size)
    if at_most(_literal(first, size), _literal(last, size)):
        return 0, 0
    return first, last


def _literal(position: Size, size: Size) -> Size:
    """Return the actual index of a canonical position for a negative step; before the first element is -1."""
    if position == -size - 1:
        return -1
    _, high = bounds(position)
    return maximum(size + position, -1) if high is not None and high < 0 else position


def _slice_form(types: Sequence[TensorType | None], attributes: dict[str, Any]) -> dict[str, Any]:
    shape = types[0].shape if types[0] is not None else ()
    starts, stops, steps, axes = (attributes[n] for n in ("starts", "stops", "steps", "axes"))
    if not len(starts) == len(stops) == len(steps) == len(axes):
        raise ShapeError(
            "a slice requires one start, stop and step per axis",
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
        raise ShapeError(f"duplicate axis in {tuple(axes)}")
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
        if not (step < 0 and high == size - 1) and not _provably_at_most(high, size):
            fits = fits and assume(high, "<=", size, f"a slice of axis {axis} stops within it")
        if not fits:
            raise ShapeError(f"the slice {start}:{stop}:{step} exceeds axis {axis} of size {size}")
        if step > 0 and not _ordered(low, high):
            assume(low, "<=", high, f"a slice of axis {axis} stops after it starts")
        out[axis] = _slice_size(start, stop, step, size)
    return tuple(out)


def _ordered(low: Size, high: Size) -> bool:
    """Whether ``low <= high`` is provable, or ensured by the clamping of the canonical form."""
    return _provably_at_most(low, high) or _call(low) is not None or _call(high) is not None


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
    """``x[start:stop:step]`` along each of ``axes``; steps can be negative.

    Negative ints count from the end and are clamped as in Python. Backends receive starts and stops from 0 to the size
    of the axis, with two exceptions: with a negative step, a stop before the first element is ``-size - 1``, and a
    negative position along an axis of symbolic size is unchanged.
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
    """Insert ``step - 1`` zeros between elements; the new size is ``span``."""
    if step == 1:
        return g
    shape = g.shape
    spaced = operation("reshape")(g, shape=(*shape[: axis + 1], 1, *shape[axis + 1 :]))
    widths = [(0, 0)] * (len(shape) + 1)
    widths[axis + 1] = (0, step - 1)
    long = (*shape[:axis], shape[axis] * step, *shape[axis + 1 :])
    spaced = operation("reshape")(operation("pad")(spaced, widths=tuple(widths)), shape=long)
    return slice(spaced, starts=(0,), stops=(span,), steps=(1,), axes=(axis,))


def narrow(x: Any, axis: int, start: Size, stop: Size) -> Any:
    """Return ``x[..., start:stop, ...]`` along one axis."""
    return slice(x, starts=(start,), stops=(stop,), steps=(1,), axes=(axis,))


# -- composites ---------------------------------------------------------------------------------------------------
@composite(samples=[sample((3, 4, 5), index=(-1, 2), axes=(0, 2))])
def select(x, *, index: Shape, axes: Ints):
    """The element at ``index`` along each of ``axes``, which are dropped; negative positions count from the end."""
    if len(index) != len(axes):
        raise ShapeError(f"select got {len(index)} positions for {len(axes)} axes")
    selected_axes = [normalize_axis(a, x.ndim) for a in axes]
    starts: list[Size] = []
    stops: list[Size] = []
    for position, axis in zip(index, selected_axes, strict=True):
        size = x.shape[axis]
        if type(position) is int:
            lowest: Size = -position if position < 0 else position + 1
            if at_most(lowest, size) is False:
                raise ShapeError(
                    f"index {position} is out of range for axis {axis} of size {size}",
                    facts=[f"accepted: {-size} to {size - 1}" if size != 0 else "accepted: none, as the axis is empty"],
                )
            position = position if position >= 0 else size + position
        starts.append(position)
        stops.append(position + 1)
    part = slice(
        x, starts=tuple(starts), stops=tuple(stops), steps=(1,) * len(selected_axes), axes=tuple(selected_axes)
    )
    return operation("reshape")(part, shape=tuple(d for k, d in enumerate(x.shape) if k not in selected_axes))


@composite(results=(), samples=[sample((6, 2), sizes=(1, 3, 2)), sample((2, 4), sizes=(2, 2), axis=-1, label="axis")])
def split(x, *, sizes: Shape, axis: Axis = 0):
    """Consecutive segments of the given sizes along an axis."""
    parts: list[Any] = []
    start: Size = 0
    for size in sizes:
        parts.append(narrow(x, axis, start, start + size))
        start = start + size
    total = x.shape[axis]
    if equal(start, total) is False:
        raise ShapeError(
            f"split sizes {list(sizes)} add up to {start}, but axis {axis} has {total}",
            hint="write the size of each part: sizes=(2, 2) for two halves of 4",
        )
    if equal(start, total) is None:
        assume(start, "==", total, f"the sizes of a split add up to that of axis {axis}")
    return tuple(parts)


@composite(samples=[sample((3, 4), shift=(1, -2), axis=(0, 1)), sample((5,), shift=(7,), axis=(0,), label="overrun")])
def roll(x, *, shift: Ints, axis: Ints):
    """Elements shifted by ``shift`` positions along axes, wrapping around at the ends.

    A guard checks that an axis of symbolic size is at least as long as its shift.
    """
    if len(shift) != len(axis):
        raise ShapeError(f"roll got {len(shift)} shifts for {len(axis)} axes")
    for offset, raw_axis in zip(shift, axis, strict=True):
        k = normalize_axis(raw_axis, x.ndim)
        size = x.shape[k]
        if size == 0:
            continue
        if isinstance(size, Dim):
            assume(abs(offset), "<=", size, f"axis {k} is rolled by at most its size")
            cut = size - offset if offset > 0 else -offset
        else:
            cut = size - offset % size
        if offset != 0 and cut != size:
            x = operation("concat")(narrow(x, k, cut, size), narrow(x, k, 0, cut), axis=k)
    return x


__all__ = ["END", "narrow", "roll", "select", "slice", "split"]
