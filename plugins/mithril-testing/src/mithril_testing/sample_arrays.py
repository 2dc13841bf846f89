"""Arrays for samples: the same numbers everywhere, from a name."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from mithril.graph import Arr, DType, Sample, dtype as as_dtype

# Values that go wrong first: signed zeros, infinities, nan, numbers next to one, halves, bounds of exp.
SPECIAL_FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    3.0,
    -7.0,
    1e-3,
    87.0,
    -87.0,
    np.inf,
    -np.inf,
    np.nan,
)


def make_array(spec: Arr, seed: str, dtype: DType | None = None) -> np.ndarray[Any, Any]:
    """Return the array of a sample, in its own or another dtype of the kind."""
    kind = dtype or as_dtype(spec.dtype)
    shape = tuple(int(n) for n in spec.shape)
    if spec.values is not None:
        return np.array(spec.values, dtype=kind.numpy).reshape(shape)
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    if kind.is_bool:
        return rng.random(shape) < 0.5
    if kind.is_integer:
        low, high = kind.limits
        numbers = rng.integers(max(int(spec.low), low), min(int(spec.high), high) + 1, shape, dtype=np.int64)
        return numbers.astype(kind.numpy)
    return rng.uniform(spec.low, spec.high, shape).astype(kind.numpy)


def arrays_for(sample: Sample, seed: str, dtype: DType | None = None) -> list[np.ndarray[Any, Any] | None]:
    """Return all operands of a sample. ``dtype`` replaces the dtype of operands with the first operand's kind."""
    base = next((as_dtype(s.dtype) for s in sample.operands if s is not None), None)
    arrays: list[np.ndarray[Any, Any] | None] = []
    for k, spec in enumerate(sample.operands):
        if spec is None:
            arrays.append(None)
            continue
        has_base_dtype = dtype is not None and base is not None and as_dtype(spec.dtype) is base
        arrays.append(make_array(spec, f"{seed}/{k}", dtype if has_base_dtype else None))
    return arrays


def hostile_integers(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return integers of the same shape and dtype, most of them out of bounds as positions."""
    low, high = as_dtype(array.dtype).limits
    numbers = (low, low + 1, -(10**9), -9, -2, -1, 1, 2, 9, 10**9, 10**18, high - 1, high)
    fitting = np.array([n for n in numbers if low <= n <= high], array.dtype)
    return np.asarray(np.random.default_rng(0).choice(fitting, array.shape), array.dtype)


def special_array(dtype: DType, denormals: bool = False) -> np.ndarray[Any, Any]:
    """Return the awkward values of a dtype, its extremes included; denormal numbers only where they have a meaning."""
    if dtype.is_bool:
        return np.array([False, True])
    if dtype.is_integer:
        low, high = dtype.limits
        signed = [-1, -7, low // 2] if low else [7]
        numbers = [low, low + 1, 0, 1, 2, 5, high // 2, high // 2 + 1, high - 1, high, *signed]
        return np.array(sorted(set(numbers)), dtype=dtype.numpy)
    limits = ml_dtypes.finfo(dtype.numpy)
    large, tiny = float(limits.max), float(limits.smallest_normal)
    extremes = [large, -large, large / 4, tiny, -tiny, tiny * 4, float(limits.eps), large**0.5 * 1.5, -(large**0.5)]
    if denormals:
        extremes += [float(limits.smallest_subnormal), -float(limits.smallest_subnormal), tiny / 2]
    return np.array([*SPECIAL_FLOATS, *extremes], dtype=dtype.numpy)


def random_array(dtype: DType, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return numbers of all magnitudes: integers over the whole range, floats around zero and far from it."""
    rng = np.random.default_rng(seed)
    if dtype.is_bool:
        return rng.random(count) < 0.5
    if dtype.is_integer:
        low, high = dtype.limits
        return rng.integers(low, high, count, dtype=dtype.numpy, endpoint=True)
    ordinary = rng.uniform(-12.0, 12.0, count)
    scaled = ordinary * 10.0 ** rng.uniform(-6.0, 3.0, count)
    return np.where(rng.random(count) < 0.7, ordinary, scaled).astype(dtype.numpy)


def all_pairs(values: np.ndarray[Any, Any], count: int) -> Sequence[np.ndarray[Any, Any]]:
    """Return operands that hold every combination of the values."""
    if count == 1:
        return [values]
    grids = np.meshgrid(*[values] * count, indexing="ij")
    return [np.asarray(g.ravel(), order="C") for g in grids]
