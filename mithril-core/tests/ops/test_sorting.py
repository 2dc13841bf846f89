"""Sorting: stable, nan last in both directions, every dtype."""

from __future__ import annotations

import numpy as np
import pytest

from mithril.graph.errors import ShapeError
from mithril.graph.registry import operation
from mithril.ops import sorting as ops

nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nan_last_and_stable(dtype):
    x = operation("cast")(np.array([2.0, nan, 1.0, inf, 2.0, -inf, nan]), dtype=dtype)
    assert ops.argsort(x).tolist() == [5, 2, 0, 4, 3, 1, 6]
    assert ops.argsort(x, descending=True).tolist() == [3, 0, 4, 2, 5, 1, 6]
    assert ops.sort(x).dtype == x.dtype
    np.testing.assert_array_equal(ops.sort(x, descending=True).astype(float), [inf, 2, 2, 1, -inf, nan, nan])


def test_zeros_of_both_signs_keep_their_order():
    assert ops.argsort(np.array([0.0, -0.0, 0.0])).tolist() == [0, 1, 2]
    assert ops.argsort(np.array([0.0, -0.0, 0.0]), descending=True).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8, np.uint64, bool])
def test_extreme_integers(dtype):
    low, high = (0, 1) if dtype is bool else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    x = np.array([high, low, 1, low, high], dtype)
    np.testing.assert_array_equal(ops.sort(x, descending=True), np.sort(x)[::-1])
    assert ops.argsort(x, descending=True).tolist()[-2:] == [1, 3]
    assert ops.argsort(x).dtype == np.int32


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axes(axis):
    x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    np.testing.assert_array_equal(ops.sort(x, axis=axis), np.sort(x, axis))
    np.testing.assert_array_equal(ops.argsort(x, axis=axis), np.argsort(x, axis, kind="stable"))
    values, indices = ops.top_k(x, k=2, axis=axis)
    np.testing.assert_array_equal(values, np.take(-np.sort(-x, axis), [0, 1], axis))
    np.testing.assert_array_equal(np.take_along_axis(x, indices, axis), values)
    assert indices.dtype == np.int32


def test_top_k_takes_the_first_of_equal_ones():
    values, indices = ops.top_k(np.array([3, 1, 3, nan, 3], np.float32), k=4)
    assert values.tolist() == [3, 3, 3, 1]
    assert indices.tolist() == [0, 2, 4, 1]
    assert [r.shape for r in ops.top_k(np.ones((2, 3)), k=0)] == [(2, 0), (2, 0)]


def test_empty():
    assert ops.sort(np.zeros((0, 3)), axis=0).shape == (0, 3)
    assert ops.argsort(np.zeros((2, 0))).shape == (2, 0)


def test_errors():
    with pytest.raises(ShapeError, match="top_k: k=4 exceeds the 3 elements of axis 0\n  accepted: 0 to 3"):
        ops.top_k(np.ones(3), k=4)
    with pytest.raises(ShapeError, match="axis -1 is out of range for rank 0\n  accepted: none: it is a scalar"):
        ops.sort(np.float32(1))
