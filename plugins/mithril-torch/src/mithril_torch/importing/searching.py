"""ATen operators that search, count, rank and combine by position."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Op, UnsupportedError, is_static, product
from mithril_importing.arrays import as_value, reshape
from mithril_torch.importing.indexing import like_index
from mithril_torch.importing.reductions import in_order
from mithril_torch.importing.table import axis_of, cast, is_tensor, known, line, row

INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


def _is_float(x: Any) -> bool:
    return "float" in str(x.dtype)


# -- sorted sequences ---------------------------------------------------------------------------------------------
@row("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    sequence: Any, values: Any, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Any:
    """Return the positions of values in sorted rows, before or after equal elements."""
    if not is_tensor(values):
        values = np.asarray(values, np.asarray(0, str(sequence.dtype)).dtype)
    if sorter is not None:
        sequence = ops.take_along_axis(sequence, sorter, axis=len(sequence.shape) - 1)
    after = right if side is None else side == "right"
    kind = "int32" if out_int32 else "int64"
    common = np.promote_types(str(sequence.dtype), str(values.dtype)).name
    sequence, values = cast(sequence, common), cast(values, common)
    if len(sequence.shape) == 1:
        return cast(ops.searchsorted(sequence, values, right=after), kind)
    return cast(_rows_searched(sequence, values, after), kind)


def _rows_searched(sequence: Any, values: Any, right: bool) -> Any:
    """Return positions by binary search in each row."""
    size, axis = sequence.shape[-1], len(sequence.shape) - 1
    if not isinstance(size, int):
        raise UnsupportedError("searchsorted in rows of an open length is not supported")
    precedes = ops.less_equal if right else ops.less
    place = ops.full(shape=tuple(values.shape), value=0, dtype="int32")
    step = 1 << size.bit_length()
    while step := step // 2:
        target = ops.add(place, step)
        in_range = ops.less_equal(target, size)
        index = ops.sub(ops.minimum(target, size), 1)
        ahead = precedes(ops.take_along_axis(sequence, index, axis=axis), values)
        place = ops.where(ops.logical_and(in_range, ahead), target, place)
    return place


@row("bucketize.Tensor", "bucketize.Scalar")
def bucketize(values: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    return searchsorted(boundaries, values, out_int32, right)


# -- counts -------------------------------------------------------------------------------------------------------
def _bins(x: Any, low: Any, high: Any, margin: float) -> tuple[Any, Any]:
    """Return the ends of a histogram: those of the elements if both are 0, and if they are equal, with a margin."""
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low != high:
        return ops.full(shape=(), value=float(low), dtype=str(x.dtype)), ops.full(
            shape=(), value=float(high), dtype=str(x.dtype)
        )
    if low == 0 and high == 0:
        flat = reshape(x, (-1,))
        empty = type(flat.shape[0]) is int and flat.shape[0] == 0
        low, high = (np.zeros((), str(x.dtype)),) * 2 if empty else (ops.min(flat), ops.max(flat))
    low, high = (cast(v, str(x.dtype)) for v in (low, high))
    is_point = ops.equal(low, high)
    return ops.where(is_point, ops.sub(low, margin), low), ops.where(is_point, ops.add(high, margin), high)


def _counted(x: Any, bins: int, low: Any, high: Any, weights: Any = None) -> Any:
    """Return the sums of weights of the elements in each of equal bins; the last one contains its end."""
    x = reshape(x, (-1,))
    in_range = ops.logical_and(ops.greater_equal(x, low), ops.less_equal(x, high))
    scaled = ops.floor(ops.mul(ops.sub(x, low), ops.div(float(bins), ops.sub(high, low))))
    place = cast(ops.where(in_range, ops.minimum(scaled, float(bins - 1)), float(bins)), "int32")
    ones = cast(in_range, str(x.dtype)) if weights is None else reshape(weights, (-1,))
    return _summed(place, ones, bins)


def _summed(place: Any, weights: Any, bins: int) -> Any:
    """Return sums of weights by position, without those at ``bins``."""
    zeros = ops.full(shape=(bins + 1,), value=0, dtype=str(weights.dtype))
    return ops.scatter_nd_add(zeros, reshape(place, (-1, 1)), weights)[:bins]


@row("histc")
def histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    kind = str(x.dtype)
    x = x if _is_float(x) else cast(x, "float32")
    return cast(_counted(x, bins, *_bins(x, min, max, 1.0)), kind)


@row("histogram.bin_ct")
def histogram(x: Any, bins: int = 100, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    low, high = (0, 0) if range is None else range
    low, high = _bins(x, low, high, 0.5)
    counts = _counted(x, bins, low, high, weight)
    steps = np.arange(bins + 1).astype(str(x.dtype)) / bins
    edges = ops.add(ops.mul(ops.sub(high, low), steps), low)
    return _dense(counts, edges, density), edges


@row("histogram.bins_tensor")
def histogram_of_edges(x: Any, edges: Any, *, weight: Any = None, density: bool = False) -> Any:
    flat, bins = reshape(x, (-1,)), edges.shape[0] - 1
    place = ops.sub(ops.searchsorted(edges, flat, right=True), 1)
    place = ops.where(ops.equal(flat, edges[-1]), bins - 1, place)
    in_range = ops.logical_and(ops.greater_equal(flat, edges[0]), ops.less_equal(flat, edges[-1]))
    ones = cast(in_range, str(x.dtype)) if weight is None else reshape(weight, (-1,))
    return _dense(_summed(ops.where(in_range, place, bins), ones, bins), edges, density), edges


def _dense(counts: Any, edges: Any, density: bool) -> Any:
    if not density:
        return counts
    return ops.div(counts, ops.mul(ops.sub(edges[1:], edges[:-1]), ops.sum(counts)))


# -- order statistics ---------------------------------------------------------------------------------------------
def _at_rank(x: Any, axis: int, rank: Any, keepdim: bool) -> tuple[Any, Any]:
    """Return the elements of a rank along an axis, and their positions."""
    order = in_order(x, axis, False)
    place = ops.take_along_axis(order, rank, axis=axis) if is_tensor(rank) else _slice(order, axis, rank)
    values = ops.take_along_axis(x, place, axis=axis)
    place = cast(place, "int64")
    return (values, place) if keepdim else (_squeezed(values, axis), _squeezed(place, axis))


def _slice(x: Any, axis: int, k: int) -> Any:
    return x[(*[slice(None)] * axis, slice(k, k + 1))]


def _squeezed(x: Any, axis: int) -> Any:
    return reshape(x, (*x.shape[:axis], *x.shape[axis + 1 :]))


def _length(x: Any, axis: int, purpose: str) -> int:
    size = x.shape[axis]
    if not isinstance(size, int):
        raise UnsupportedError(f"{purpose} along an open size is not supported", hint="leave it out of dynamic_shapes")
    return size


@row("kthvalue")
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    return _at_rank(x, axis_of(x, dim), k - 1, keepdim) if len(x.shape) else (x, np.zeros((), np.int64))


@row("median.dim")
def median_along(x: Any, dim: int, keepdim: bool = False) -> Any:
    """Return the lower median and its position; nan if an element is."""
    if not len(x.shape):
        return x, np.zeros((), np.int64)
    axis = axis_of(x, dim)
    size = _length(x, axis, "a median")
    rank = np.full([1 if k == axis else n for k, n in enumerate(x.shape)], (size - 1) // 2, np.int32)
    if not _is_float(x):
        return _at_rank(x, axis, rank, keepdim)
    is_nan = ops.isnan(x)
    first = ops.sub(size, ops.sum(cast(is_nan, "int32"), axis=(axis,), keepdims=True))  # nan are last
    return _at_rank(x, axis, ops.where(ops.less(first, size), first, rank), keepdim)


@row("nanmedian.dim")
def nanmedian_along(x: Any, dim: int, keepdim: bool = False) -> Any:
    if not len(x.shape) or not _is_float(x):
        return median_along(x, dim, keepdim)
    axis = axis_of(x, dim)
    count = ops.sum(cast(ops.logical_not(ops.isnan(x)), "int32"), axis=(axis,), keepdims=True)
    return _at_rank(x, axis, ops.floordiv(ops.maximum(ops.sub(count, 1), 0), 2), keepdim)


@row("median")
def median(x: Any) -> Any:
    return median_along(reshape(x, (-1,)), 0)[0]


@row("nanmedian")
def nanmedian(x: Any) -> Any:
    return nanmedian_along(reshape(x, (-1,)), 0)[0]


@row("mode")
def mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the least of the most frequent elements along an axis, and its last position."""
    if not len(x.shape):
        return x, np.zeros((), np.int64)
    axis = axis_of(x, dim)
    rows, columns = (ops.unsqueeze(x, axis=k) for k in (axis, axis + 1))
    counts = ops.sum(cast(ops.equal(rows, columns), "int32"), axis=(axis + 1,))
    order = in_order(x, axis, False)
    mode_rank = ops.argmax(ops.take_along_axis(counts, order, axis=axis), axis=axis, keepdims=True)
    result = ops.take_along_axis(x, ops.take_along_axis(order, mode_rank, axis=axis), axis=axis)
    steps = reshape(line(x.shape[axis], "int32"), [-1 if k == axis else 1 for k in range(len(x.shape))])
    place = ops.max(ops.where(ops.equal(x, result), steps, -1), axis=(axis,), keepdims=True)
    values, place = ops.take_along_axis(x, place, axis=axis), cast(place, "int64")
    return (values, place) if keepdim else (_squeezed(values, axis), _squeezed(place, axis))


@row("cummax")
def cummax(x: Any, dim: int) -> Any:
    return _running(ops.cummax, x, dim)


@row("cummin")
def cummin(x: Any, dim: int) -> Any:
    return _running(ops.cummin, x, dim)


def _running(op: Op, x: Any, dim: int) -> Any:
    """Return the running extreme elements and the last of their positions."""
    if not len(x.shape):
        return x, np.zeros((), np.int64)
    axis = axis_of(x, dim)
    extreme = op(x, axis=axis)
    reached = ops.equal(x, extreme)
    if _is_float(x):
        reached = ops.logical_or(reached, ops.isnan(x))
    steps = reshape(line(x.shape[axis], "int32"), [-1 if k == axis else 1 for k in range(len(x.shape))])
    place = ops.cummax(ops.where(reached, steps, 0), axis=axis)
    return ops.take_along_axis(x, place, axis=axis), cast(place, "int64")


# -- reductions by position ---------------------------------------------------------------------------------------
REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min", "mean": "add"}
IDENTITIES = {"sum": 0, "prod": 1, "mean": 0}


def _identity(reduce: str, kind: str) -> Any:
    if reduce in IDENTITIES:
        return IDENTITIES[reduce]
    if "float" in kind:
        return float("-inf") if reduce == "amax" else float("inf")
    return (np.iinfo(kind).min if reduce == "amax" else np.iinfo(kind).max) if kind != "bool" else reduce == "amin"


@row("scatter_reduce.two")
def scatter_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    if not len(x.shape):
        x, index, source = (reshape(t, (1,)) for t in (x, index, source))
        return reshape(scatter_reduce(x, 0, index, source, reduce, include_self=include_self), ())
    axis = axis_of(x, dim)
    source = like_index(source, index, -1)
    return _reduced(x, _places(x, index, axis), source, reduce, include_self)


def _places(x: Any, index: Any, axis: int) -> Any:
    """Return the positions of an index along an axis in all axes."""
    shape = tuple(index.shape)
    index = ops.where(ops.less(index, 0), ops.add(cast(index, "int64"), x.shape[axis]), cast(index, "int64"))
    coordinates = [
        ops.broadcast_to(reshape(line(n, "int64"), [-1 if k == j else 1 for j in range(len(shape))]), shape=shape)
        for k, n in enumerate(shape)
    ]
    return ops.stack(*(index if k == axis else coordinate for k, coordinate in enumerate(coordinates)), axis=-1)


def _reduced(x: Any, places: Any, source: Any, reduce: str, include_self: bool) -> Any:
    """Combine ``x`` with updates at positions; without ``include_self`` its own elements there do not count."""
    kind, start = str(x.dtype), x
    ones = ops.full(shape=tuple(source.shape), value=1, dtype="int32")
    counts = ops.scatter_nd_add(ops.full(shape=tuple(x.shape), value=0, dtype="int32"), places, ones)
    if not include_self:
        start = ops.where(ops.greater(counts, 0), cast(np.asarray(_identity(reduce, kind)), kind), x)
    if reduce in ("amax", "amin") and _is_float(x):
        return _extreme(start, places, source, reduce == "amax")
    y = ops.scatter_nd_reduce(start, places, source, reduction=REDUCTIONS[reduce])
    if reduce != "mean":
        return y
    number = cast(ops.maximum(ops.add(counts, 1) if include_self else counts, 1), kind)
    return ops.div(y, number) if _is_float(x) else ops.floordiv(y, number)


def _extreme(x: Any, places: Any, source: Any, largest: bool) -> Any:
    """Return the extreme elements; those that are equal share the gradient, as in PyTorch."""
    y = ops.stop_gradient(ops.scatter_nd_reduce(x, places, source, reduction="max" if largest else "min"))
    is_own = ops.logical_or(ops.equal(x, y), ops.logical_and(ops.isnan(x), ops.isnan(y)))
    target = ops.gather_nd(y, places)
    is_source = ops.logical_or(ops.equal(source, target), ops.logical_and(ops.isnan(source), ops.isnan(target)))
    weights = cast(is_own, str(x.dtype)), cast(is_source, str(x.dtype))
    total = ops.scatter_nd_add(weights[0], places, weights[1])
    moving = [ops.where(m, ops.sub(t, ops.stop_gradient(t)), 0.0) for m, t in ((is_own, x), (is_source, source))]
    slopes = ops.scatter_nd_add(moving[0], places, moving[1])
    return ops.add(y, ops.where(ops.isfinite(y), ops.div(slopes, total), 0.0))


@row("index_reduce")
def index_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    if not len(x.shape):
        x, source = reshape(x, (1,)), reshape(source, (1,))
        return reshape(index_reduce(x, 0, reshape(index, (1,)), source, reduce, include_self=include_self), ())
    axis = axis_of(x, dim)
    positions = reshape(index, [-1 if k == axis else 1 for k in range(len(x.shape))])
    positions = ops.broadcast_to(positions, shape=tuple(source.shape))
    return _reduced(x, _places(x, positions, axis), source, reduce, include_self)


@row("segment_reduce")
def segment_reduce(
    x: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Any:
    """Reduce consecutive parts of an axis, of these lengths or between these offsets."""
    if lengths is None and offsets is None:
        raise UnsupportedError("segment_reduce takes lengths or offsets", hint="use scatter_reduce for indices")
    names = {"max": "amax", "min": "amin"}
    name, lead = names.get(reduce, reduce), len((lengths if lengths is not None else offsets).shape) - 1
    if offsets is None:
        zero = ops.mul(lengths[..., :1], 0)
        offsets = ops.concat(zero, ops.cumsum(lengths, axis=-1), axis=-1)
    steps = line(x.shape[axis], str(offsets.dtype))
    starts, ends = (ops.unsqueeze(o, axis=-1) for o in (offsets[..., :-1], offsets[..., 1:]))
    member = ops.logical_and(ops.greater_equal(steps, starts), ops.less(steps, ends))  # [..., segments, elements]
    member = reshape(member, (*member.shape, *[1] * (len(x.shape) - axis - 1)))
    elements = ops.unsqueeze(x, axis=axis)
    neutral = _identity(name, str(x.dtype))
    members = ops.where(member, elements, cast(np.asarray(neutral), str(x.dtype)))
    reductions = {"sum": ops.sum, "mean": ops.sum, "prod": ops.prod, "amax": ops.max, "amin": ops.min}
    y = reductions[name](members, axis=(lead + 1,))
    count = ops.sum(cast(member, str(x.dtype)), axis=(lead + 1,))
    if initial is not None:
        merge = {"sum": ops.add, "mean": ops.add, "prod": ops.mul, "amax": ops.maximum, "amin": ops.minimum}
        y = merge[name](y, cast(np.asarray(initial), str(x.dtype)))
    if name == "mean":
        empty = ops.equal(count, 0.0)
        mean = ops.div(y, ops.where(empty, 1.0, count))
        y = ops.where(empty, float("nan") if initial is None else float(initial), mean)
    return y


# -- elements selected by data ------------------------------------------------------------------------------------
@row("masked_scatter")
def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """Replace masked elements by those of the source, in order."""
    shape = tuple(np.broadcast_shapes(x.shape, mask.shape)) if is_static(x.shape) else tuple(x.shape)
    x, mask = (ops.broadcast_to(t, shape=shape) for t in (x, mask))
    if type(product(source.shape)) is int and product(source.shape) == 0:
        return x
    order = ops.cumsum(cast(reshape(mask, (-1,)), "int32"), axis=0)
    place = ops.minimum(ops.maximum(ops.sub(order, 1), 0), product(source.shape) - 1)
    return ops.where(mask, reshape(ops.take(reshape(source, (-1,)), place, axis=0), shape), x)


@row("masked_select")
def masked_select(x: Any, mask: Any) -> Any:
    """Return the elements that a mask selects, which must be known."""
    mask = known(mask, "masked_select")
    shape = tuple(np.broadcast_shapes(tuple(x.shape), mask.shape))
    places = np.flatnonzero(np.broadcast_to(mask, shape))
    return ops.take(reshape(ops.broadcast_to(x, shape=shape), (-1,)), places, axis=0)


@row("_local_scalar_dense")
def element(x: Any) -> Any:
    """Return the element of a tensor, which is a number in PyTorch."""
    return reshape(x, ())


@row("nonzero_static")
def nonzero_static(x: Any, *, size: int, fill_value: int = -1) -> Any:
    if not len(x.shape):
        return np.zeros((size, 0), np.int64)
    return cast(ops.nonzero(as_value(x), size=size, fill=fill_value)[0], "int64")


@row("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample: Any = None,
    include_last: bool = False,
    padding: int = -1,
    like: Any = None,
) -> Any:
    """Return the sum, mean or maximum of the rows of each bag; indices equal to ``padding`` do not count."""
    count, bags = indices.shape[0], offsets.shape[0] - include_last
    bag = ops.sub(ops.searchsorted(offsets[:bags], line(count, str(offsets.dtype)), right=True), 1)
    rows = ops.take(weight, indices, axis=0)
    valid = ops.full(shape=(count,), value=True, dtype="bool")
    if padding >= 0:
        valid = ops.not_equal(indices, padding)
    member = ops.logical_and(ops.equal(reshape(bag, (1, -1)), reshape(line(bags, "int32"), (-1, 1))), valid)
    kind = str(weight.dtype)
    sizes = ops.sum(cast(member, "int64"), axis=(1,))
    if mode == 2:
        members = ops.where(ops.unsqueeze(member, axis=2), rows, float("-inf"))
        y = (
            ops.max(members, axis=(1,))
            if not (type(count) is int and count == 0)
            else ops.mul(members[:, :1][:, 0], 0.0)
        )
        empty = reshape(ops.equal(sizes, 0), (-1, 1))
        y = ops.where(empty, 0.0, y)
    else:
        if per_sample is not None:
            rows = ops.mul(rows, reshape(per_sample, (-1, 1)))
        y = ops.matmul(cast(member, kind), rows)
        if mode == 1:
            y = ops.div(y, cast(reshape(ops.maximum(sizes, 1), (-1, 1)), kind))
    return y, None, None, None
