"""Sums, products, extremes, and their cumulative forms."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any

from mithril import ops
from mithril.graph import DType, DTypeError, ShapeError, bool_, normalize_axis, shape_text
from mithril_array import complex_numbers as pairs
from mithril_array.array import Array, as_array, call, call_open
from mithril_array.complex_numbers import Pair
from mithril_array.dtypes import summed
from mithril_array.elementwise import FUNCTIONS as ELEMENTWISE, NUMBERS, REALS, astype, cast
from mithril_array.manipulation import concat

Axis = int | Sequence[int] | None
Kernel = Callable[..., Any]


def _axes(x: Array, axis: Axis) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(x.ndim))
    return tuple(normalize_axis(int(a), x.ndim) for a in ((axis,) if isinstance(axis, int) else axis))


def _require(name: str, x: Array, kinds: tuple[str, ...]) -> Array:
    x = as_array(x)
    if x.dtype.kind not in kinds:
        raise DTypeError(f"{name} is not defined for {x.dtype}", hint="convert the operand: xp.astype(x, ...)")
    return x


def _total(x: Array, dtype: Any) -> DType:
    """Return the dtype of a sum."""
    return summed(x.dtype, x._xp.dtypes) if dtype is None else x._xp.dtype(dtype)


# -- sums and products -----------------------------------------------------------------------------------------------
def _sum(x: Any, *, axis: tuple[int, ...], keepdims: bool, dtype: DType) -> Any:
    x = cast(x, dtype)
    if isinstance(x, Pair):
        return Pair(*(ops.sum(part, axis=axis, keepdims=keepdims) for part in x))
    return ops.sum(x, axis=axis, keepdims=keepdims)


def _prod(x: Any, *, axis: tuple[int, ...], keepdims: bool, dtype: DType) -> Any:
    x = cast(x, dtype)
    if not isinstance(x, Pair):
        return ops.prod(x, axis=axis, keepdims=keepdims)
    for a in sorted(axis, reverse=True):
        x = _product(x, a, keepdims)
    return x


def _product(z: Pair, axis: int, keepdims: bool) -> Pair:
    """Multiply along an axis by halves."""
    while (size := z.shape[axis]) > 1:
        half = size // 2
        first, second, rest = (_part(z, axis, *span) for span in ((0, half), (half, 2 * half), (2 * half, size)))
        z = pairs.mul(first, second)
        if size % 2:
            z = Pair(*(ops.concat(a, b, axis=axis) for a, b in zip(z, rest, strict=True)))
    shape = tuple(1 if k == axis else n for k, n in enumerate(z.shape) if keepdims or k != axis)
    if z.shape[axis] == 0:
        return Pair(*(ops.full(shape=shape, value=v, dtype=z.re.dtype) for v in (1.0, 0.0)))
    return Pair(*(ops.reshape(part, shape=shape) for part in z))


def _part(z: Any, axis: int, start: int, stop: int) -> Any:
    key = (*(slice(None),) * axis, slice(start, stop))
    return Pair(z.re[key], z.im[key]) if isinstance(z, Pair) else z[key]


def sum(x: Array, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Array:
    x = as_array(x)
    return call_open(_sum, x, axis=_axes(x, axis), keepdims=keepdims, dtype=_total(x, dtype))  # type: ignore[no-any-return]


def prod(x: Array, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Array:
    x = as_array(x)
    total = _total(x, dtype)
    run = call if total.kind == "complex" else call_open
    return run(_prod, x, axis=_axes(x, axis), keepdims=keepdims, dtype=total)  # type: ignore[no-any-return]


def _mean(x: Any, *, axis: tuple[int, ...], keepdims: bool) -> Any:
    if isinstance(x, Pair):
        return Pair(*(ops.mean(part, axis=axis, keepdims=keepdims) for part in x))
    return ops.mean(x, axis=axis, keepdims=keepdims)


def _floating(name: str, x: Array) -> Array:
    x = as_array(x)
    return astype(x, x._xp.default_float) if x.dtype.is_integer else _require(name, x, ("float", "complex"))


def mean(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    x = _floating("mean", x)
    return call(_mean, x, axis=_axes(x, axis), keepdims=keepdims)  # type: ignore[no-any-return]


def _variance(x: Any, *, axis: tuple[int, ...], keepdims: bool, correction: float, root: bool) -> Any:
    count = math.prod(x.shape[a] for a in axis)
    gap = x - ops.mean(x, axis=axis, keepdims=True)
    divisor = ops.full(shape=(), value=builtins.max(count - correction, 0.0), dtype=x.dtype)
    y = ops.sum(gap * gap, axis=axis, keepdims=keepdims) / divisor
    return ops.sqrt(y) if root else y


def var(x: Array, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    x = _require("var", _floating("var", x), ("float",))
    return call(_variance, x, axis=_axes(x, axis), keepdims=keepdims, correction=float(correction), root=False)  # type: ignore[no-any-return]


def std(x: Array, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    x = _require("std", _floating("std", x), ("float",))
    return call(_variance, x, axis=_axes(x, axis), keepdims=keepdims, correction=float(correction), root=True)  # type: ignore[no-any-return]


# -- extremes --------------------------------------------------------------------------------------------------------
def _max(x: Any, *, axis: tuple[int, ...], keepdims: bool) -> Any:
    return ops.max(x, axis=axis, keepdims=keepdims)


def _min(x: Any, *, axis: tuple[int, ...], keepdims: bool) -> Any:
    return ops.min(x, axis=axis, keepdims=keepdims)


def _extreme(name: str, kernel: Kernel, x: Array, axis: Axis, keepdims: bool) -> Array:
    x = _require(name, x, REALS)
    axes = _axes(x, axis)
    for a in axes:
        if x.shape[a] == 0:
            raise ShapeError(f"{name} of no elements: axis {a} of {shape_text(x.shape)} is empty")
    return call_open(kernel, x, axis=axes, keepdims=keepdims)  # type: ignore[no-any-return]


def max(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    return _extreme("max", _max, x, axis, keepdims)


def min(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    return _extreme("min", _min, x, axis, keepdims)


# -- bools -----------------------------------------------------------------------------------------------------------
def _is_nonzero(x: Any) -> Any:
    if isinstance(x, Pair):
        return ops.logical_or(ops.not_equal(x.re, 0.0), ops.not_equal(x.im, 0.0))
    return x if x.dtype is bool_ else ops.not_equal(x, 0)


def _all(x: Any, *, axis: tuple[int, ...], keepdims: bool) -> Any:
    return ops.all(_is_nonzero(x), axis=axis, keepdims=keepdims)


def _any(x: Any, *, axis: tuple[int, ...], keepdims: bool) -> Any:
    return ops.any(_is_nonzero(x), axis=axis, keepdims=keepdims)


def _count(x: Any, *, axis: tuple[int, ...], keepdims: bool, dtype: DType) -> Any:
    return ops.sum(ops.cast(_is_nonzero(x), dtype=dtype), axis=axis, keepdims=keepdims)


def all(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    x = as_array(x)
    return call_open(_all, x, axis=_axes(x, axis), keepdims=keepdims)  # type: ignore[no-any-return]


def any(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    x = as_array(x)
    return call_open(_any, x, axis=_axes(x, axis), keepdims=keepdims)  # type: ignore[no-any-return]


def count_nonzero(x: Array, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    x = as_array(x)
    return call_open(_count, x, axis=_axes(x, axis), keepdims=keepdims, dtype=x._xp.default_int)  # type: ignore[no-any-return]


# -- along an axis ---------------------------------------------------------------------------------------------------
def _running(x: Any, *, axis: int, dtype: DType, product: bool, initial: bool) -> Any:
    x = cast(x, dtype)
    if isinstance(x, Pair):
        y = _pair_products(x, axis) if product else Pair(*(ops.cumsum(part, axis=axis) for part in x))
        if initial:
            y = Pair(_from_start(y.re, axis, int(product)), _from_start(y.im, axis, 0))
        return y
    y = ops.cumprod(x, axis=axis) if product else ops.cumsum(x, axis=axis)
    return _from_start(y, axis, int(product)) if initial else y


def _from_start(y: Any, axis: int, value: int) -> Any:
    shape = tuple(1 if k == axis else n for k, n in enumerate(y.shape))
    return ops.concat(ops.full(shape=shape, value=value, dtype=y.dtype), y, axis=axis)


def _pair_products(z: Pair, axis: int) -> Pair:
    """Multiply each element with all before it: step k multiplies by the results of the elements 2^k before."""
    size, step = z.shape[axis], 1
    while step < size:
        later = pairs.mul(_part(z, axis, step, size), _part(z, axis, 0, size - step))
        z = Pair(*(ops.concat(a, b, axis=axis) for a, b in zip(_part(z, axis, 0, step), later, strict=True)))
        step *= 2
    return z


def _cumulative(name: str, x: Array, axis: int | None, dtype: Any, product: bool, initial: bool) -> Array:
    x = _require(name, x, ("bool", *NUMBERS))
    if axis is None and x.ndim != 1:
        raise ShapeError(f"{name} of shape {shape_text(x.shape)} needs an axis", hint="axis=0")
    k = 0 if axis is None else normalize_axis(axis, x.ndim)
    return call(_running, x, axis=k, dtype=_total(x, dtype), product=product, initial=initial)  # type: ignore[no-any-return]


def cumulative_sum(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    return _cumulative("cumulative_sum", x, axis, dtype, False, include_initial)


def cumulative_prod(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    return _cumulative("cumulative_prod", x, axis, dtype, True, include_initial)


def diff(
    x: Array, /, *, axis: int = -1, n: int = 1, prepend: Array | None = None, append: Array | None = None
) -> Array:
    """Return the n-th difference of neighbors along an axis."""
    x = as_array(x)
    k = normalize_axis(axis, x.ndim)
    x = concat([part for part in (prepend, x, append) if part is not None], axis=k)
    lead = (slice(None),) * k
    step = ELEMENTWISE["not_equal" if x.dtype is bool_ else "subtract"]
    for _ in range(n):
        x = step(x[(*lead, slice(1, None))], x[(*lead, slice(None, -1))])
    return x


FUNCTIONS = {
    f.__name__: f
    for f in (*(all, any, count_nonzero, cumulative_prod, cumulative_sum, diff, max, mean, min, prod, std, sum, var),)
}
