"""``precision="bfloat16"`` takes ordinary float32 arrays: inputs, parameters and cotangents are rounded."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model, Relu

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
