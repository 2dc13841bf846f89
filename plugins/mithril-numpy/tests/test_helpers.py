"""Helpers of generated files: memory and values."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from mithril.backend import SparseWeight, pruned_mask, sparse_matmul, sparse_matmul_transposed
from mithril_numpy import helpers


@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 1e-6), ("float64", 4.5e-16)])
def test_erf_needs_memory_for_its_result_and_a_block(kind, tolerance):
    x = np.random.default_rng(0).standard_normal((512, 1024)).astype(kind) * 2
    tracemalloc.start()
    y = helpers.erf(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * y.nbytes
    expected = [math.erf(v) for v in x[::64].ravel()]
    np.testing.assert_allclose(y[::64].ravel(), expected, rtol=tolerance)
    np.testing.assert_array_equal(helpers.erf(x[:, ::2].T), y[:, ::2].T)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_erf_of_numbers_without_a_series(kind):
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-30, 1e30, -7.0], kind)
    y = helpers.erf(x)
    np.testing.assert_allclose(y, [1, -1, np.nan, 0, 0, 1.1283791670955126e-30, 1, -1], rtol=1e-6)
    np.testing.assert_array_equal(np.signbit(y[3:5]), [False, True])


@pytest.mark.parametrize(("format", "sparsity"), [("csr", 0.8), ("block1x16", 0.5)])
def test_sparse_products_without_scipy(format, sparsity):
    matrix = np.random.default_rng(0).normal(size=(6, 32)).astype(np.float32)
    matrix *= pruned_mask(matrix, sparsity, format)
    matrix[2] = 0
    parts, x = SparseWeight.of(matrix, format).parts, np.random.default_rng(1).normal(size=(32, 3)).astype(np.float32)
    np.testing.assert_allclose(sparse_matmul(**parts, x=x), matrix @ x, rtol=1e-5, atol=1e-6)
    y = x[:6]
    np.testing.assert_allclose(sparse_matmul_transposed(**parts, x=y, columns=32), matrix.T @ y, rtol=1e-5, atol=1e-6)
