"""Operators on vectors of sizes, computed at import: symbolic sizes stay sizes, which reshapes need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mithril.graph import Dim, product
from mithril_tflite.flatbuffer import Array


def _result(x: Any) -> Array:
    """Return integers if no element is symbolic any more."""
    array = np.asarray(x, object)
    return array if any(isinstance(d, Dim) for d in array.reshape(-1)) else array.astype(np.int64)


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Array]:
    def compute(a: Array, b: Array, **_: Any) -> Array:
        x, y = np.broadcast_arrays(a.astype(object), b.astype(object))
        out = np.empty(x.shape, object)
        for index in np.ndindex(x.shape):
            out[index] = function(x[index], y[index])
        return _result(out)

    return compute


def _selected(x: Array, index: Any) -> Array:
    item = x[index]
    if isinstance(item, np.ndarray):
        return _result(item)
    out = np.empty((), object)
    out[()] = item
    return _result(out)


def _gather(x: Array, indices: Array, *, axis: int, **_: Any) -> Array:
    return _selected(x, (slice(None),) * (axis % x.ndim) + (indices.astype(np.int64)[()],))


def _strided_slice(x: Array, begin: Array, end: Array, strides: Array, **masks: Any) -> Array:
    from mithril_tflite.operators.shape import slice_index

    index: Any = slice_index(x.ndim, begin, end, strides, **masks)  # type: ignore[no-untyped-call]
    return _selected(x, index)


def _slice(x: Array, begin: Array, size: Array) -> Array:
    stops = [None if n == -1 else a + n for a, n in zip(begin.tolist(), size.tolist(), strict=True)]
    return _selected(x, tuple(slice(a, b) for a, b in zip(begin.tolist(), stops, strict=True)))


def _pack(*xs: Array, axis: int) -> Array:
    return _result(np.stack([x.astype(object) for x in xs], axis))


def _concatenation(*xs: Array, axis: int) -> Array:
    return _result(np.concatenate([x.astype(object) for x in xs], axis))


def _reshape(x: Array, shape: Array | None = None, *, new_shape: Sequence[int]) -> Array:
    return _result(x.reshape(tuple(int(n) for n in (new_shape if shape is None else shape))))


def _product(x: Array, axes: Array, *, keep_dims: bool) -> Array:
    out = np.empty((1,) if keep_dims else (), object)
    out[...] = product([d if isinstance(d, Dim) else int(d) for d in x.reshape(-1)])
    return _result(out)


def _unpack(x: Array, *, num: int, axis: int) -> tuple[Array, ...]:
    return tuple(_selected(x, (k,)) for k in range(len(x)))


SIZES: dict[str, Callable[..., Any]] = {
    "ADD": _binary(lambda a, b: a + b),
    "SUB": _binary(lambda a, b: a - b),
    "MUL": _binary(lambda a, b: a * b),
    "DIV": _binary(lambda a, b: a // b),
    "FLOOR_DIV": _binary(lambda a, b: a // b),
    "FLOOR_MOD": _binary(lambda a, b: a % b),
    "CAST": lambda x: x,
    "CONCATENATION": _concatenation,
    "EXPAND_DIMS": lambda x, axis: _result(np.expand_dims(x, int(axis.reshape(-1)[0]))),
    "GATHER": _gather,
    "PACK": _pack,
    "REDUCE_PROD": _product,
    "RESHAPE": _reshape,
    "SLICE": _slice,
    "SQUEEZE": lambda x, squeeze_dims: _result(np.squeeze(x, tuple(squeeze_dims) or None)),
    "STRIDED_SLICE": _strided_slice,
    "UNPACK": _unpack,
}
