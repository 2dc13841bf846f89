"""Networks of TensorFlow Lite files on every backend: results equal those of its interpreter, else of NumPy."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import mithril as ml

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins/mithril-tflite/tests"))
import tflite_networks as networks
from tflite_files import interpreted


@pytest.fixture(scope="module", params=["keyword", "recurrent"])
def network(request):
    pytest.importorskip("mithril_tflite")
    file, x = getattr(networks, f"{request.param}_network")()
    model = ml.from_tflite(file.bytes())
    if find_spec("ai_edge_litert"):
        return model, x, interpreted(file, [x])[0]
    return model, x, results(model, x, "numpy")


def results(model, x, backend):
    (y,) = ml.compile(model, backend, inference=True)({model.inputs[0]: x}).values()
    return np.asarray(y)


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch", "mlx", "c"])
def test_results_equal_those_of_the_interpreter(network, backend):
    model, x, expected = network
    y = results(model, x, backend)
    assert y.dtype == expected.dtype
    if y.dtype == np.int8:
        assert np.ptp(expected) > 20  # not saturated
        assert np.abs(y.astype(int) - expected).max() <= 1
    else:
        np.testing.assert_allclose(y, expected, atol=1e-5)
