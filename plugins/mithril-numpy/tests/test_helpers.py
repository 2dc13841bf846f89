"""Helpers of generated files: memory and values."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np

from mithril_numpy import helpers


def test_erf_needs_memory_for_its_result_and_a_block():
    x = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    tracemalloc.start()
    y = helpers.erf(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * y.nbytes
    expected = [math.erf(v) for v in x[::64].ravel()]
    np.testing.assert_allclose(y[::64].ravel(), expected, rtol=1e-6)
    np.testing.assert_array_equal(helpers.erf(x[:, ::2].T), y[:, ::2].T)
