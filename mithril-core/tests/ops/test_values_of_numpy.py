"""Composites without an array function of their own against NumPy: their references are their own bodies."""

from __future__ import annotations

import numpy as np
import pytest

from mithril import ops

generator = np.random.default_rng(3)
SIZES = (1, 2, 3, 7, 16, 33)


def draw(*shape):
    return generator.normal(size=shape).astype(np.float32)


# -- cumulative extremes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cumulative_extremes(size, reverse, axis):
    x = np.moveaxis(draw(3, 2, size), -1, axis)
    x[0, 0, 0] = np.nan
    flipped = np.flip(x, axis) if reverse else x
    for op, ufunc in ((ops.cummax, np.maximum), (ops.cummin, np.minimum)):
        expected = ufunc.accumulate(flipped, axis=axis)
        np.testing.assert_array_equal(
            op(x, axis=axis, reverse=reverse), np.flip(expected, axis) if reverse else expected
        )
    integers = generator.integers(-9, 9, x.shape).astype(np.int32)
    np.testing.assert_array_equal(ops.cummax(integers, axis=axis), np.maximum.accumulate(integers, axis=axis))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reverse", [False, True])
def test_cumulative_sums_of_exponentials(size, reverse):
    x = 30 * draw(4, size).astype(np.float64)
    x[0, 0], x[1, size // 2 :] = -np.inf, np.inf
    x[2, :] = -np.inf
    flipped = np.flip(x, 1) if reverse else x
    with np.errstate(invalid="ignore"):
        expected = np.logaddexp.accumulate(flipped, axis=1)
        actual = ops.logcumsumexp(x, axis=1, reverse=reverse)
    np.testing.assert_allclose(actual, np.flip(expected, 1) if reverse else expected, rtol=1e-12)


# -- scatters -----------------------------------------------------------------------------------------------------
UFUNCS = {"add": np.add, "max": np.maximum, "min": np.minimum, "mul": np.multiply}


@pytest.mark.parametrize("reduction", UFUNCS)
@pytest.mark.parametrize("count", [1, 2, 5, 9, 20])
def test_scatters_combine_all_updates(reduction, count):
    x, indices = draw(4, 3), generator.integers(-4, 4, (count, 1)).astype(np.int32)
    updates, expected = draw(count, 3), x.copy()
    UFUNCS[reduction].at(expected, indices[:, 0], updates)
    actual = ops.scatter_nd_reduce(x, indices, updates, reduction=reduction)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ops.scatter_reduce(x, indices[:, 0], updates, reduction=reduction), actual)


@pytest.mark.parametrize("reduction", UFUNCS)
def test_scatters_along_other_axes_and_at_single_elements(reduction):
    x, indices, updates = draw(2, 5), generator.integers(-5, 5, 7).astype(np.int32), draw(2, 7)
    expected = x.copy()
    UFUNCS[reduction].at(expected, (slice(None), indices), updates)
    actual = ops.scatter_reduce(x, indices, updates, reduction=reduction, axis=1)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    places = generator.integers(0, 5, (2, 7)).astype(np.int32)
    expected = x.copy()
    UFUNCS[reduction].at(expected, (np.arange(2)[:, None], places), updates)
    actual = ops.scatter_reduce_along_axis(x, places, updates, reduction=reduction, axis=1)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    pairs = np.stack([generator.integers(0, 2, 9), generator.integers(0, 5, 9)], 1).astype(np.int32)
    one_each, expected = draw(9), x.copy()
    UFUNCS[reduction].at(expected, tuple(pairs.T), one_each)
    actual = ops.scatter_nd_reduce(x, pairs, one_each, reduction=reduction)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_nan_wins_scatters_of_extremes():
    x, updates = np.zeros(3, np.float32), np.array([1.0, np.nan, 2.0, -1.0], np.float32)
    rows = np.array([[0], [0], [0], [2]], np.int32)
    np.testing.assert_array_equal(ops.scatter_nd_reduce(x, rows, updates, reduction="max"), [np.nan, 0, 0])
    np.testing.assert_array_equal(ops.scatter_nd_reduce(x, rows, updates, reduction="min"), [np.nan, 0, -1])


# -- counting -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, *SIZES])
def test_positions_in_sorted_vectors(size):
    x = np.sort(generator.integers(0, 9, size)).astype(np.float32)
    values = generator.integers(-1, 11, (3, 5)).astype(np.float32)
    for right in (False, True):
        expected = np.searchsorted(x, values, side="right" if right else "left")
        np.testing.assert_array_equal(ops.searchsorted(x, values, right=right), expected)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_counts(size):
    x = generator.integers(-3, 8, (5, 6)).astype(np.int64)
    counted = x[(x >= 0) & (x < size)]
    np.testing.assert_array_equal(ops.bincount(x, size=size), np.bincount(counted, minlength=size))
    data = generator.integers(-8, 9, 200) / np.float32(4.0)  # many elements on the edges
    expected, _ = np.histogram(data, bins=size, range=(-1.5, 1.5 + size / 8))
    edges = np.linspace(-1.5, 1.5 + size / 8, size + 1)
    if not np.isin(np.float32(edges[1:-1]), data).any():
        np.testing.assert_array_equal(ops.histogram(data, bins=size, low=-1.5, high=1.5 + size / 8), expected)
    np.testing.assert_array_equal(
        ops.histogram(data, bins=16, low=-2.0, high=2.0), np.histogram(data, bins=16, range=(-2, 2))[0]
    )


@pytest.mark.parametrize("size", [2, 5, 30])
def test_positions_of_nonzero_elements(size):
    x = generator.integers(0, 3, (4, 5)).astype(np.float32)
    expected = np.argwhere(x)
    indices, count = ops.nonzero(x, size=size, fill=-7)
    number = min(size, len(expected))
    assert count == number
    np.testing.assert_array_equal(indices[:number], expected[:size])
    np.testing.assert_array_equal(indices[number:], np.full((size - number, 2), -7))


@pytest.mark.parametrize("size", [1, 4, 12])
def test_distinct_elements(size):
    x = generator.integers(-4, 4, (3, 6)).astype(np.float32)
    values, inverse, counts, count = ops.unique(x, size=size, fill=99.0)
    distinct, places, occurrences = np.unique(x, return_inverse=True, return_counts=True)
    number = min(size, len(distinct))
    assert count == number
    np.testing.assert_array_equal(values, [*distinct[:size], *[99.0] * (size - number)])
    np.testing.assert_array_equal(counts, [*occurrences[:size], *[0] * (size - number)])
    np.testing.assert_array_equal(inverse, places.reshape(x.shape))
