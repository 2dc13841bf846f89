"""Operators on vectors of sizes, computed at import: symbolic sizes stay sizes, which reshapes need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mithril.graph import product
from mithril_importing.arrays import Array, as_sizes, on_sizes, sizes_array, sizes_of


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Array]:
    return lambda a, b, **_: on_sizes(function, a, b)


def _gather(x: Array, indices: Array, *, axis: int, **_: Any) -> Array:
    return as_sizes(x[(slice(None),) * (axis % x.ndim) + (indices.astype(np.int64)[()],)])


def _strided_slice(x: Array, begin: Array, end: Array, strides: Array, **masks: Any) -> Array:
    from mithril_tflite.operators.shape import slice_index

    index: Any = slice_index(x.ndim, begin, end, strides, **masks)  # type: ignore[no-untyped-call]
    return as_sizes(x[index])


def _slice(x: Array, begin: Array, size: Array) -> Array:
    stops = [None if n == -1 else a + n for a, n in zip(begin.tolist(), size.tolist(), strict=True)]
    return as_sizes(x[tuple(slice(a, b) for a, b in zip(begin.tolist(), stops, strict=True))])


def _pack(*xs: Array, axis: int) -> Array:
    return as_sizes(np.stack([x.astype(object) for x in xs], axis))


def _concatenation(*xs: Array, axis: int) -> Array:
    return as_sizes(np.concatenate([x.astype(object) for x in xs], axis))


def _reshape(x: Array, shape: Array | None = None, *, new_shape: Sequence[int]) -> Array:
    return as_sizes(x.reshape(tuple(int(n) for n in (new_shape if shape is None else shape))))


def _product(x: Array, axes: Array, *, keep_dims: bool) -> Array:
    total = product(sizes_of(x))
    return sizes_array([total] if keep_dims else total)


def _unpack(x: Array, *, num: int, axis: int) -> tuple[Array, ...]:
    return tuple(as_sizes(x[k]) for k in range(len(x)))


SIZES: dict[str, Callable[..., Any]] = {
    "ADD": _binary(lambda a, b: a + b),
    "SUB": _binary(lambda a, b: a - b),
    "MUL": _binary(lambda a, b: a * b),
    "DIV": _binary(lambda a, b: a // b),
    "FLOOR_DIV": _binary(lambda a, b: a // b),
    "FLOOR_MOD": _binary(lambda a, b: a % b),
    "CAST": lambda x: x,
    "CONCATENATION": _concatenation,
    "EXPAND_DIMS": lambda x, axis: as_sizes(np.expand_dims(x, int(axis.reshape(-1)[0]))),
    "GATHER": _gather,
    "PACK": _pack,
    "REDUCE_PROD": _product,
    "RESHAPE": _reshape,
    "SLICE": _slice,
    "SQUEEZE": lambda x, squeeze_dims: as_sizes(np.squeeze(x, tuple(squeeze_dims) or None)),
    "STRIDED_SLICE": _strided_slice,
    "UNPACK": _unpack,
}
