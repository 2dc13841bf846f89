"""Shuffling: a seed gives the same order on every platform and in every version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permutation(n: int, seed: int, epoch: int = 0) -> np.ndarray[Any, Any]:
    """Return a shuffled ``arange(n)``: indices sorted by a 64-bit hash of (seed, epoch, index).

    NumPy's generators may change their streams between versions; this formula does not.
    """
    with np.errstate(over="ignore"):
        start = _hash(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64)) + np.uint64(epoch)
        keys = _hash(np.arange(n, dtype=np.uint64) + _hash(start))
    order: np.ndarray[Any, Any] = np.argsort(keys, kind="stable")
    return order


def _hash(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Mix 64-bit words bijectively, so that different indices never share a key."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    mixed: np.ndarray[Any, Any] = x ^ (x >> np.uint64(31))
    return mixed


def batches(order: Any, size: int, drop_last: bool, start: int = 0) -> Iterator[Any]:
    """Yield slices of an order, from the ``start``-th sample on."""
    for k in range(batch_count(len(order) - start, size, drop_last)):
        yield order[start + k * size : start + (k + 1) * size]


def batch_count(n: int, size: int, drop_last: bool) -> int:
    return n // size if drop_last else -(-n // size)
