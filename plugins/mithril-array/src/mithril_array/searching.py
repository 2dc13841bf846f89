"""Positions and order: extremes, sorting, sets; results of sizes that depend on elements are computed on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mithril import ops
from mithril.graph import DType, DTypeError, InputError, ShapeError, normalize_axis, shape_text
from mithril_array.array import Array, as_array, call, call_open, number, on_host
from mithril_array.dtypes import PYTHON_SCALARS, joined
from mithril_array.elementwise import REALS, astype
from mithril_array.manipulation import reshape


def _real(name: str, x: Array) -> Array:
    x = as_array(x)
    if x.dtype.kind not in REALS:
        raise DTypeError(f"{name} is not defined for {x.dtype}", hint="convert the operand: xp.astype(x, ...)")
    return x


def _argmax(x: Any, *, axis: int, keepdims: bool, dtype: DType) -> Any:
    return ops.cast(ops.argmax(x, axis=axis, keepdims=keepdims), dtype=dtype)


def _argmin(x: Any, *, axis: int, keepdims: bool, dtype: DType) -> Any:
    return ops.cast(ops.argmin(x, axis=axis, keepdims=keepdims), dtype=dtype)


def _position(name: str, kernel: Any, x: Array, axis: int | None, keepdims: bool) -> Array:
    x = _real(name, x)
    rank = x.ndim
    if axis is None or not rank:
        x, axis = reshape(x, (-1,)), 0
        ones = (1,) * rank
    else:
        axis, ones = normalize_axis(axis, rank), None
    if x.shape[axis] == 0:
        raise ShapeError(f"{name} of no elements: shape {shape_text(x.shape)}")
    y: Array = call_open(kernel, x, axis=axis, keepdims=keepdims and ones is None, dtype=x._xp.default_int)
    return reshape(y, ones) if keepdims and ones is not None else y


def argmax(x: Array, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """Return the first position of the largest element; nan counts as the largest."""
    return _position("argmax", _argmax, x, axis, keepdims)


def argmin(x: Array, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
    return _position("argmin", _argmin, x, axis, keepdims)


# -- order -----------------------------------------------------------------------------------------------------------
def _argsort(x: Any, *, axis: int, descending: bool, dtype: DType) -> Any:
    return ops.cast(ops.argsort(x, axis=axis, descending=descending), dtype=dtype)


def _sort(x: Any, *, axis: int, descending: bool) -> Any:
    return ops.sort(x, axis=axis, descending=descending)


def argsort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Positions that sort the elements, always stable; nan is last."""
    x = _real("argsort", x)
    return call(_argsort, x, axis=normalize_axis(axis, x.ndim), descending=descending, dtype=x._xp.default_int)  # type: ignore[no-any-return]


def sort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    x = _real("sort", x)
    return call(_sort, x, axis=normalize_axis(axis, x.ndim), descending=descending)  # type: ignore[no-any-return]


def _searchsorted(x: Any, values: Any, *, right: bool, dtype: DType) -> Any:
    return ops.cast(ops.searchsorted(x, values, right=right), dtype=dtype)


def searchsorted(x1: Array, x2: Any, /, *, side: str = "left", sorter: Array | None = None) -> Array:
    x1 = _real("searchsorted", x1)
    if side not in ("left", "right"):
        raise InputError(f"side cannot be {side!r}", facts=["accepted: 'left', 'right'"])
    x2 = number(x2, x1) if isinstance(x2, PYTHON_SCALARS) else _real("searchsorted", x2)
    dtype = joined(x1.dtype, x2.dtype)
    x1 = x1 if sorter is None else x1[sorter]
    a, b = astype(x1, dtype, copy=False), astype(x2, dtype, copy=False)
    return call(_searchsorted, a, b, right=side == "right", dtype=x1._xp.default_int)  # type: ignore[no-any-return]


# -- sizes that depend on elements -----------------------------------------------------------------------------------
def nonzero(x: Array, /) -> tuple[Array, ...]:
    x = as_array(x)
    if not x.ndim:
        raise _NoAxes("nonzero is of arrays with axes", hint="xp.reshape(x, (1,))")
    return on_host(lambda a: tuple(p.astype(x._xp.default_int.numpy) for p in np.nonzero(a)), x)  # type: ignore[no-any-return]


class _NoAxes(ShapeError, ValueError):
    """An operand without axes has no positions."""


class UniqueAll(NamedTuple):
    """Different elements, where each first occurs, which of them each element is, and how often each occurs."""

    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCounts(NamedTuple):
    """Different elements, and how often each occurs."""

    values: Array
    counts: Array


class UniqueInverse(NamedTuple):
    """Different elements, and which of them each element is."""

    values: Array
    inverse_indices: Array


def _unique(x: Array) -> UniqueAll:
    x = as_array(x)
    values, *positions = on_host(lambda a: tuple(np.unique_all(a)), x)
    return UniqueAll(values, *(astype(p, x._xp.default_int, copy=False) for p in positions))


def unique_all(x: Array, /) -> UniqueAll:
    """Different elements in ascending order; each nan is one of its kind."""
    return _unique(x)


def unique_counts(x: Array, /) -> UniqueCounts:
    result = _unique(x)
    return UniqueCounts(result.values, result.counts)


def unique_inverse(x: Array, /) -> UniqueInverse:
    result = _unique(x)
    return UniqueInverse(result.values, result.inverse_indices)


def unique_values(x: Array, /) -> Array:
    return _unique(x).values


FUNCTIONS = {
    f.__name__: f
    for f in (
        *(argmax, argmin, argsort, nonzero, searchsorted, sort),
        *(unique_all, unique_counts, unique_inverse, unique_values),
    )
}
