"""``precision="bfloat16"`` takes ordinary float32 arrays: inputs, parameters and cotangents are rounded."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model, Relu
from mithril.plugins import backend_class

X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
BACKENDS = ("numpy", "torch", "jax", "mlx", "c")


def network() -> Model:
    model = Model()
    model |= Linear(8)
    model += Relu()
    model += Linear(4)
    return model


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_arrays_are_rounded(backend, precision):
    exact = ml.compile(network(), "numpy", shapes={"input": [4, 16]})
    params = exact.randomize_params(seed=0)
    slope = np.ones((4, 4), np.float32)
    expected, gradients = exact.evaluate(params, {"input": X}, slope)
    compiled = ml.compile(network(), backend, shapes={"input": [4, 16]}, precision=precision)
    to_numpy = compiled.backend.to_numpy
    for arguments, x in (
        (params, X),
        ({n: compiled.backend.array(p) for n, p in params.items()}, compiled.backend.array(X)),
    ):
        outputs, slopes = compiled.evaluate(arguments, {"input": x}, slope)
        assert to_numpy(outputs["output"]).dtype.name == precision
        np.testing.assert_allclose(to_numpy(outputs["output"]).astype("f4"), expected["output"], atol=0.05)
        for name, g in gradients.items():
            np.testing.assert_allclose(to_numpy(slopes[name]).astype("f4"), g, atol=0.05 * np.abs(g).max() + 0.02)
    compiled.bind(params)
    np.testing.assert_allclose(to_numpy(compiled({"input": X})["output"]).astype("f4"), expected["output"], atol=0.05)
    assert "converted to " + precision in str(compiled.decisions)


SETTINGS = {
    "numpy": {"device": "cpu"},
    "torch": {"device": "cpu", "enable_amp": False},
    "jax": {"device": "cpu", "num_threads": 2},
    "mlx": {"device": "cpu"},
    "c": {"num_threads": 2, "scheduler": "own"},
    "ggml": {"quantize": "q8_0", "num_threads": 2},
}


@pytest.mark.parametrize("backend", SETTINGS)
def test_settings_of_a_backend_survive_copies(backend):
    """Copies are taken for another precision, by ``copy`` and ``pickle``, and for processes of other frameworks."""
    original = backend_class(backend)(**SETTINGS[backend])
    for restored in (copy.copy(original), copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert restored.identity() == original.identity()
        compiled = ml.compile(Linear(8), restored, shapes={"input": [4, 16]}, inference=True)
        assert compiled.bind(compiled.randomize_params(seed=0))({"input": X})["output"].shape == (4, 8)
    half = original.with_precision("bfloat16")
    assert (half.precision, half.dtype.name, original.precision) == ("bfloat16", "bfloat16", None)
    computing = ("precision", "dtype")
    unchanged = [pair for pair in original.identity()[1:] if pair[0] not in computing]
    assert [pair for pair in half.identity()[1:] if pair[0] not in computing] == unchanged
    assert pickle.loads(pickle.dumps(half)).identity() == half.identity()


def test_a_precision_keeps_the_settings_of_third_parties():
    class Tuned(backend_class("numpy")):
        def __init__(self, tiles):
            super().__init__()
            self.tiles = tiles

    compiled = ml.compile(Linear(8), Tuned(4), shapes={"input": [4, 16]}, precision="bfloat16")
    assert (compiled.backend.tiles, compiled.backend.precision) == (4, "bfloat16")


def test_a_declared_dtype_that_cancels_the_precision_is_recorded():
    options = {"shapes": {"input": [4, 16]}, "types": {"input": "float32"}, "precision": "bfloat16"}
    compiled = ml.compile(network(), "numpy", **options)
    assert "not precision='bfloat16'" in str(compiled.decisions)
    with pytest.raises(ml.StrictError, match="not precision='bfloat16'"):
        ml.compile(network(), "numpy", **options, strict=True)


def test_without_precision_nothing_is_rounded():
    compiled = ml.compile(network(), "numpy", shapes={"input": [4, 16]})
    params = compiled.randomize_params()
    with pytest.raises(ml.InputError, match="expected float32, got float64"):
        compiled.evaluate(params, {"input": X.astype(np.float64)})
