"""Reductions over axes, and cumulative sums and products."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril.graph import (
    Axes,
    Axis,
    Shape,
    ShapeError,
    always,
    assume,
    composite,
    dtype as as_dtype,
    exactly,
    float32,
    floating,
    int32,
    ints,
    like,
    logical,
    numeric,
    op,
    per_input,
    product,
    reduced,
    same_shape,
    sample,
    shape_text,
)
from mithril.ops.basic import cast, to_float32
from mithril.ops.creation import full, iota, size_value
from mithril.ops.elementwise import div, equal, exp, log, sqrt, where
from mithril.ops.shape import broadcast_to, concat, flip, reshape, transpose

Array = np.ndarray[Any, Any]
REDUCTIONS = (
    sample((2, 3, 4)),
    sample((2, 3, 4), axis=1, label="axis"),
    sample((2, 3, 4), axis=(0, 2), keepdims=True, label="axes"),
    sample((3, 4), axis=-1, keepdims=True, label="last"),
    sample((), label="scalar"),
)
INTEGERS = (sample(ints((3, 4), -3, 3), axis=1, label="int"),)


def expand(g: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
    """Broadcast a reduced value to the shape of the operand."""
    if not keepdims:
        g = reshape(g, shape=tuple(1 if k in axis else d for k, d in enumerate(x.shape)))
    return broadcast_to(g, shape=x.shape)


def _count(x: Any, axis: Any) -> Any:
    """Return the number of reduced elements, an int or a symbolic size."""
    return product(x.shape[k] for k in axis)


@op(
    shape=reduced,
    dtype=numeric,
    flops=per_input(1),
    samples=REDUCTIONS + INTEGERS,
    axes="*x -> *x~axis | x[axis] sum",
    linear="x",
)
def sum(x, *, axis: Axes = None, keepdims: bool = False):
    """Sum over axes, in the dtype of the operand; 16-bit floats accumulate in float32."""
    return np.sum(to_float32(x), axis=axis, keepdims=keepdims, dtype=to_float32(x).dtype)


@sum.vjp
def _(g, y, x, *, axis, keepdims):
    return (expand(g, x, axis, keepdims),)


@op(
    shape=reduced,
    dtype=numeric,
    flops=per_input(1),
    tolerance=4.0,
    samples=REDUCTIONS + INTEGERS,
    axes="*x -> *x~axis | x[axis] prod",
)
def prod(x, *, axis: Axes = None, keepdims: bool = False):
    """Product over axes."""
    return np.prod(to_float32(x), axis=axis, keepdims=keepdims, dtype=to_float32(x).dtype)


@prod.vjp
def _(g, y, x, *, axis, keepdims):
    """Multiply all other elements by exclusive cumulative products from both ends, which is exact for zeros."""
    remaining = tuple(k for k in range(len(x.shape)) if k not in axis)
    from mithril.ops.shape import transpose

    perm = remaining + axis
    flat = reshape(transpose(x, perm=perm), shape=(*(x.shape[k] for k in remaining), _count(x, axis)))
    products = cumprod(flat, axis=-1, exclusive=True) * cumprod(flat, axis=-1, exclusive=True, reverse=True)
    back = reshape(products, shape=tuple(x.shape[k] for k in perm))
    inverse = tuple(perm.index(k) for k in range(len(perm)))
    return (expand(g, x, axis, keepdims) * transpose(back, perm=inverse),)


def _extreme_vjp(g: Any, y: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
    """Return the gradient of max or min: ties split it evenly."""
    is_extreme = cast(equal(x, expand(y, x, axis, keepdims)), dtype=g.dtype)
    share = is_extreme / expand(sum(is_extreme, axis=axis, keepdims=True), x, axis, True)
    return expand(g, x, axis, keepdims) * share


def _low(x: Array) -> Any:
    kind = as_dtype(x.dtype)
    return -np.inf if kind.is_float else kind.limits[0]


def _high(x: Array) -> Any:
    kind = as_dtype(x.dtype)
    return np.inf if kind.is_float else kind.limits[1]


@op(shape=reduced, dtype=like, flops=per_input(1), samples=REDUCTIONS + INTEGERS, axes="*x -> *x~axis | x[axis] max")
def max(x, *, axis: Axes = None, keepdims: bool = False):
    """Maximum over axes; nan propagates; the smallest value of the dtype for empty axes."""
    return np.max(x, axis=axis, keepdims=keepdims, initial=_low(x))


@max.vjp
def _(g, y, x, *, axis, keepdims):
    return (_extreme_vjp(g, y, x, axis, keepdims),)


@op(shape=reduced, dtype=like, flops=per_input(1), samples=REDUCTIONS + INTEGERS, axes="*x -> *x~axis | x[axis] min")
def min(x, *, axis: Axes = None, keepdims: bool = False):
    """Minimum over axes; nan propagates; the largest value of the dtype for empty axes."""
    return np.min(x, axis=axis, keepdims=keepdims, initial=_high(x))


@min.vjp
def _(g, y, x, *, axis, keepdims):
    return (_extreme_vjp(g, y, x, axis, keepdims),)


# Both outcomes occur in each sample, so that a backend that returns a constant fails.
BOOLS = (
    sample(exactly(*[False] * 12, *[True] * 12, dtype="bool", shape=(2, 3, 4)), axis=(1, 2)),
    sample(
        exactly(False, False, False, True, False, True, True, True, True, dtype="bool", shape=(3, 3)),
        axis=1,
        keepdims=True,
        label="axis",
    ),
    sample(exactly(False, True, False, False, True, True, dtype="bool", shape=(2, 3)), axis=0, label="columns"),
    sample(exactly(*[False] * 4, dtype="bool", shape=(2, 2)), label="none"),
    sample(exactly(*[True] * 4, dtype="bool", shape=(2, 2)), label="every"),
)


@op(shape=reduced, dtype=logical, flops=per_input(1), samples=BOOLS, axes="*x -> *x~axis | x[axis] any")
def any(x, *, axis: Axes = None, keepdims: bool = False):
    """Whether any element over the axes is True."""
    return np.any(x, axis=axis, keepdims=keepdims)


@op(shape=reduced, dtype=logical, flops=per_input(1), samples=BOOLS, axes="*x -> *x~axis | x[axis] all")
def all(x, *, axis: Axes = None, keepdims: bool = False):
    """Whether all elements over the axes are True."""
    return np.all(x, axis=axis, keepdims=keepdims)


any.no_vjp("its result is a bool")
all.no_vjp("its result is a bool")


def _position_shape(x: Shape, *, axis: int, keepdims: bool) -> Shape:
    if not assume(1, "<=", x[axis], "argmax and argmin require a non-empty axis"):
        raise ShapeError(
            f"argmax and argmin require a non-empty axis, but axis {axis} has size 0",
            facts=[f"operand {shape_text(x)}"],
            hint="pass an operand with at least one element along the axis",
        )
    return reduced(x, axis=(axis,), keepdims=keepdims)


POSITIONS = (
    sample((3, 5)),
    sample((3, 5), axis=0, keepdims=True, label="axis"),
    sample(exactly(1.0, 3.0, 3.0, 2.0), label="tie"),
    sample(exactly(1.0, float("nan"), 3.0, float("nan")), label="nan"),
    sample(ints((3, 5), -2, 2), label="int"),
)


@op(
    shape=_position_shape,
    dtype=always(int32),
    flops=per_input(1),
    samples=POSITIONS,
    axes="*x -> *x~axis | x[axis] whole",
)
def argmax(x, *, axis: Axis = -1, keepdims: bool = False):
    """Position of the maximum, int32; the first of equal elements wins, nan is the largest."""
    return np.argmax(x, axis=axis, keepdims=keepdims).astype(np.int32)


@op(
    shape=_position_shape,
    dtype=always(int32),
    flops=per_input(1),
    samples=POSITIONS,
    axes="*x -> *x~axis | x[axis] whole",
)
def argmin(x, *, axis: Axis = -1, keepdims: bool = False):
    """Position of the minimum, int32; the first of equal elements wins, nan is the smallest."""
    return np.argmin(x, axis=axis, keepdims=keepdims).astype(np.int32)


argmax.no_vjp("its results are positions")
argmin.no_vjp("its results are positions")

# -- cumulative sums and products ---------------------------------------------------------------------------------
RUNNING = (
    sample((3, 4)),
    sample((3, 4), axis=0, reverse=True, label="reverse"),
    sample((3, 4), exclusive=True, label="exclusive"),
    sample((3, 4), reverse=True, exclusive=True, label="both"),
    sample(ints((3, 4), -3, 3), label="int"),
)


def _cumulative(x: Array, accumulate: Any, start: int, axis: int, reverse: bool, exclusive: bool) -> Array:
    z = np.flip(to_float32(x), axis) if reverse else to_float32(x)
    out = accumulate(z, axis=axis, dtype=z.dtype)
    if exclusive:
        out = np.roll(out, 1, axis)
        first = [slice(None)] * out.ndim
        first[axis] = slice(0, 1)
        out[tuple(first)] = start
    return np.flip(out, axis) if reverse else out


@op(shape=same_shape, dtype=numeric, flops=per_input(1), samples=RUNNING, axes="*x -> *x | x[axis] whole", linear="x")
def cumsum(x, *, axis: Axis = -1, reverse: bool = False, exclusive: bool = False):
    """Cumulative sum along an axis, from the end with ``reverse``, without the element itself with ``exclusive``."""
    return _cumulative(x, np.cumsum, 0, axis, reverse, exclusive)


@cumsum.vjp
def _(g, y, x, *, axis, reverse, exclusive):
    return (cumsum(g, axis=axis, reverse=not reverse, exclusive=exclusive),)


@op(
    shape=same_shape, dtype=numeric, flops=per_input(1), tolerance=4.0, samples=RUNNING, axes="*x -> *x | x[axis] whole"
)
def cumprod(x, *, axis: Axis = -1, reverse: bool = False, exclusive: bool = False):
    """Cumulative product along an axis; ``reverse`` starts at the end, ``exclusive`` excludes the element itself."""
    return _cumulative(x, np.cumprod, 1, axis, reverse, exclusive)


@cumprod.vjp
def _(g, y, x, *, axis, reverse, exclusive):
    """Compute the gradient without division, so that it is exact for zeros.

    The gradient at i is the product of the elements before i times s_i = g_i + x_(i+1) s_(i+1).
    """
    # The recurrence has log2(size) steps, a number that the graph must know.
    if not isinstance(x.shape[axis], int):
        return (_cumprod_vjp_of_open_size(g, x, axis, reverse, exclusive),)
    if x.shape[axis] == 0:
        return (x,)
    if reverse:
        x, g = flip(x, axis=(axis,)), flip(g, axis=(axis,))
    zero = full(shape=_part(x, axis, 0, 1).shape, value=0.0, dtype=x.dtype)
    factors = concat(_part(x, axis, 1, None), zero, axis=axis)
    terms = concat(_part(g, axis, 1, None), zero, axis=axis) if exclusive else g
    slope = cumprod(x, axis=axis, exclusive=True) * _linear_recurrence(factors, terms, axis)
    return (flip(slope, axis=(axis,)) if reverse else slope,)


def _part(x: Any, axis: int, start: int | None, stop: int | None) -> Any:
    return x[(slice(None),) * axis + (slice(start, stop),)]


def _linear_recurrence(factors: Any, terms: Any, axis: int) -> Any:
    """Return s with s_i = terms_i + factors_i s_(i+1), in log2(size) steps."""
    n, step = terms.shape[axis], 1
    # Doubling (Hillis and Steele): each step combines elements at twice the distance.
    while step < n:
        first, second = _part(factors, axis, 0, n - step), _part(factors, axis, step, None)
        carried = _part(terms, axis, 0, n - step) + first * _part(terms, axis, step, None)
        terms = concat(carried, _part(terms, axis, n - step, None), axis=axis)
        factors = concat(first * second, _part(factors, axis, n - step, None), axis=axis)
        step *= 2
    return terms


def _cumprod_vjp_of_open_size(g: Any, x: Any, axis: int, reverse: bool, exclusive: bool) -> Any:
    """Compute dy_j/dx_i for all pairs (i, j) as products in which 1 replaces x_i, then sum over j."""
    rank, n = len(x.shape), x.shape[axis]
    perm = (*(k for k in range(rank) if k != axis), axis)
    inverse = tuple(perm.index(k) for k in range(rank))
    flat, cotangent = transpose(x, perm=perm), transpose(g, perm=perm)
    square = (*flat.shape, n)
    i, j = iota(shape=(n, n), axis=0), iota(shape=(n, n), axis=1)
    spread = broadcast_to(reshape(flat, shape=(*flat.shape[:-1], 1, n)), shape=square)
    without = cumprod(where(equal(i, j), 1.0, spread), axis=-1, reverse=reverse, exclusive=exclusive)
    before = (j > i if exclusive else j >= i) if not reverse else (j < i if exclusive else j <= i)
    terms = where(before, without * reshape(cotangent, shape=(*flat.shape[:-1], 1, n)), 0.0)
    return transpose(sum(terms, axis=-1), perm=inverse)


# -- means and composites -----------------------------------------------------------------------------------------
def size_as_divisor(count: Any, dtype: Any) -> Any:
    """Return a number of elements as a divisor: a float, or a scalar computed at run time if it is symbolic."""
    return float(count) if type(count) is int else cast(size_value(value=count), dtype=dtype)


@op(
    shape=reduced,
    dtype=floating,
    flops=per_input(1),
    promotes="float",
    samples=REDUCTIONS,
    axes="*x -> *x~axis | x[axis] mean",
    linear="x",
)
def mean(x, *, axis: Axes = None, keepdims: bool = False):
    """Arithmetic mean over axes; 16-bit floats accumulate in float32; nan for empty axes."""
    total = np.sum(to_float32(x), axis=axis, keepdims=keepdims, dtype=to_float32(x).dtype)
    axes = range(x.ndim) if axis is None else np.atleast_1d(axis)
    return total / total.dtype.type(math.prod(x.shape[k] for k in axes))


@mean.vjp
def _(g, y, x, *, axis, keepdims):
    return (div(expand(g, x, axis, keepdims), size_as_divisor(_count(x, axis), g.dtype)),)


SINGLE = sample((3, 1), axis=1, ddof=1, label="ddof of one element", gradient=False)


@composite(
    promotes="float",
    flops=per_input(4),
    tolerance=2.0,
    samples=[*REDUCTIONS[:4], sample((3, 4), axis=1, ddof=1, label="ddof"), SINGLE],
)
def var(x, *, axis: Axes = None, keepdims: bool = False, ddof: int = 0):
    """Variance over axes: the sum of squared deviations from the mean, divided by n - ddof."""
    kind = as_dtype(x.dtype)
    z = cast(x, dtype=float32) if kind.bits == 16 else x
    center = z - mean(z, axis=axis, keepdims=True)
    total = mean(center * center, axis=axis, keepdims=keepdims)
    if ddof:
        count = _count(z, axis)
        n = size_as_divisor(count, as_dtype(z.dtype))
        total = total * (
            math.inf if count == ddof else n / (n - float(ddof))
        )  # 0 * inf is nan: the variance is undefined
    return cast(total, dtype=kind) if kind.bits == 16 else total


@composite(
    promotes="float",
    flops=per_input(4),
    tolerance=2.0,
    samples=[*REDUCTIONS[:4], sample((3, 4), axis=1, ddof=1, label="ddof"), SINGLE],
)
def std(x, *, axis: Axes = None, keepdims: bool = False, ddof: int = 0):
    """Standard deviation over axes, with n - ddof as the divisor; its gradient at equal elements is undefined."""
    return sqrt(var(x, axis=axis, keepdims=keepdims, ddof=ddof))


@composite(
    promotes="float", flops=per_input(14), samples=[*REDUCTIONS, sample((3, 0), axis=1, label="empty", gradient=False)]
)
def logsumexp(x, *, axis: Axes = None, keepdims: bool = False):
    """log(sum(exp(x))) over axes without overflow; -inf for rows of -inf."""
    top = max(x, axis=axis, keepdims=True)
    shift = where(equal(top - top, 0.0), top, 0.0)  # do not subtract infinities and nan
    total = log(sum(exp(x - shift), axis=axis, keepdims=True)) + shift
    if keepdims:
        return total
    return reshape(total, shape=reduced(tuple(x.shape), axis=axis, keepdims=False))


@logsumexp.vjp
def _(g, y, x, *, axis, keepdims):
    return (expand(g, x, axis, keepdims) * exp(x - expand(y, x, axis, keepdims)),)
