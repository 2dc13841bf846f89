"""Counting and searching with results of bounded size: the number of results does not depend on the data."""

from __future__ import annotations

from typing import Any

from mithril.graph import (
    DTypeError,
    ShapeError,
    bools,
    composite,
    dtype as as_dtype,
    exactly,
    int32,
    ints,
    sample,
    shape_text,
)
from mithril.ops.basic import cast
from mithril.ops.creation import full, iota, size_value
from mithril.ops.elementwise import (
    equal,
    floor,
    greater_equal,
    less,
    less_equal,
    logical_and,
    minimum,
    not_equal,
    where,
)
from mithril.ops.indexing import scatter_nd, scatter_nd_add, take, wide_positions
from mithril.ops.reduction import cumsum, sum
from mithril.ops.shape import concat, reshape, unsqueeze
from mithril.ops.slicing import narrow
from mithril.ops.sorting import argsort


def _count(x: Any) -> int:
    """Return the static number of elements of a vector."""
    if len(x.shape) != 1 or not isinstance(x.shape[0], int):
        raise ShapeError(f"expected a vector of static size, got shape {list(x.shape)}")
    return int(x.shape[0])


@composite(
    samples=[
        sample(exactly(-1.0, 0.0, 0.0, 2.0), (3, 2)),
        sample(exactly(1, 2, 2, 5, dtype="int32"), ints((6,), 0, 6), right=True, label="right"),
    ],
)
def searchsorted(x, values, *, right: bool = False):
    """Positions (int32) at which values keep the sorted vector x in order: before equal elements, or after them."""
    if len(x.shape) != 1:
        raise ShapeError(f"searchsorted requires a sorted vector, got shape {shape_text(x.shape)}")
    (size,) = x.shape
    precedes = less_equal if right else less
    place = full(shape=tuple(values.shape), value=0, dtype="int32")
    if isinstance(size, int):
        bits, last = size.bit_length(), size
    else:  # positions are int32; one more element, which nothing reads, leaves no vector without elements
        bits, last = 31, size_value(value=size)
        x = concat(x, full(shape=(1,), value=0, dtype=x.dtype), axis=0)
    step = 1 << bits
    while step := step // 2:  # binary search: x[place - 1] precedes the value
        target = place + step
        in_range = less_equal(target, last)
        ahead = precedes(take(x, minimum(target, last) - 1), values) if size != 0 else in_range
        place = where(logical_and(in_range, ahead), target, place)
    return place


@composite(samples=[sample(ints((7,), 0, 3), size=4), sample(ints((2, 3), -1, 5), size=3, label="outside")])
def bincount(x, *, size: int):
    """How often each integer from 0 to size - 1 occurs (int32); other integers are not counted."""
    kind = as_dtype(x.dtype)
    if not kind.is_integer:
        raise DTypeError(f"bincount requires integers, got {kind}", hint="cast them: cast(x, dtype='int32')")
    flat = reshape(wide_positions(x), shape=(-1,))
    in_range = logical_and(greater_equal(flat, 0), less(flat, size))
    place = unsqueeze(where(in_range, cast(flat, dtype=int32), size), axis=(-1,))  # one more bin for the others
    counts = scatter_nd_add(full(shape=(size + 1,), value=0, dtype="int32"), place, cast(in_range, dtype=int32))
    return narrow(counts, 0, 0, size)


@composite(
    samples=[sample((9,), bins=4, low=-1.0, high=1.0), sample((3, 4), bins=2, low=0.0, high=2.0, label="matrix")]
)
def histogram(x, *, bins: int, low: float, high: float):
    """How many elements fall in each of ``bins`` equal intervals from low to high (int32); ``high`` is in the last."""
    if bins < 1 or not low < high:
        raise ShapeError(f"histogram requires bins >= 1 and low < high, got {bins} bins from {low} to {high}")
    in_range = logical_and(greater_equal(x, low), less_equal(x, high))
    scaled = minimum(floor((x - low) * (bins / (high - low))), float(bins - 1))
    return bincount(cast(where(in_range, scaled, -1.0), dtype=int32), size=bins)


@composite(
    results=("indices", "count"),
    samples=[sample(bools((6,)), size=4), sample(ints((3, 3), 0, 1), size=9, fill=-1, label="matrix")],
)
def nonzero(x, *, size: int, fill: int = -1):
    """Positions [size, rank] (int32) of the first ``size`` nonzero elements, ``fill`` beyond them, and their number."""
    mask = x if as_dtype(x.dtype).is_bool else not_equal(x, 0)
    flat = cast(reshape(mask, shape=(-1,)), dtype=int32)
    place = minimum(where(equal(flat, 1), cumsum(flat) - 1, size), size)
    axes = [reshape(iota(shape=tuple(x.shape), axis=k, dtype="int32"), shape=(-1, 1)) for k in range(len(x.shape))]
    rows = full(shape=(size + 1, len(axes)), value=fill, dtype="int32")
    indices = scatter_nd(rows, unsqueeze(place, axis=(-1,)), concat(*axes, axis=1))
    return narrow(indices, 0, 0, size), minimum(sum(flat), size)


@composite(
    results=("values", "inverse", "counts", "count"),
    samples=[
        sample(ints((7,), 0, 3), size=5),
        sample(exactly(2.0, -1.0, 0.5), size=2, label="cut"),
    ],
)
def unique(x, *, size: int, fill: float = 0.0):
    """The ``size`` least distinct elements in order, ``fill`` beyond them; positions of all elements among the distinct
    ones, how often each occurs, and their number."""
    flat = reshape(wide_positions(x), shape=(-1,))
    count = _count(flat)
    order = argsort(flat)
    ordered = take(flat, order)
    starts = not_equal(narrow(ordered, 0, 1, count), narrow(ordered, 0, 0, count - 1))
    run = cumsum(concat(full(shape=(1,), value=0, dtype="int32"), cast(starts, dtype=int32), axis=0))
    place = unsqueeze(minimum(run, size), axis=(-1,))
    values = scatter_nd(full(shape=(size + 1,), value=fill, dtype=x.dtype), place, ordered)
    ones = full(shape=(count,), value=1, dtype="int32")
    counts = scatter_nd_add(full(shape=(size + 1,), value=0, dtype="int32"), place, ones)
    inverse = scatter_nd(full(shape=(count,), value=0, dtype="int32"), unsqueeze(order, axis=(-1,)), run)
    number = reshape(narrow(run, 0, count - 1, count), shape=()) + 1
    return (
        narrow(values, 0, 0, size),
        reshape(inverse, shape=tuple(x.shape)),
        narrow(counts, 0, 0, size),
        minimum(number, size),
    )


__all__ = ["bincount", "histogram", "nonzero", "searchsorted", "unique"]
