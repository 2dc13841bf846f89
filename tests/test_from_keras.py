"""Models of Keras archives on every backend: results equal to those that Keras recorded."""

import sys
from pathlib import Path

import numpy as np
import pytest

import mithril as ml

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins/mithril-keras/tests"))
from archives import record

BACKENDS = ["jax", "torch", "mlx", "c", "ggml"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["images", "masks", "recurrent", "transformer"])
def test_results_equal_those_of_keras(name, backend):
    path, inputs, expected = record(name)
    compiled = ml.load(path, backend=backend, shapes={n: a.shape for n, a in inputs.items()})
    for result, value in zip(compiled(inputs).values(), expected, strict=True):
        tolerance = 5e-6 * max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(np.asarray(result, np.float32), value, rtol=0, atol=tolerance)
