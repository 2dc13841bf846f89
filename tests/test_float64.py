"""``precision="float64"``: no layer rounds to float32 on the way, and engines agree to the digits of float64."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import models
from mithril_tools.reference.layers import EXAMPLES

FLOATS = sorted(n for n in EXAMPLES if not issubclass(getattr(models, n), models.Metric) and n != "Embedding")


@pytest.mark.parametrize("name", FLOATS)
def test_layers_do_not_round_to_float32(name):
    text, shapes = EXAMPLES[name]
    layer = eval(text, {n: getattr(models, n) for n in models.__all__})
    shapes = shapes if isinstance(shapes, dict) else {"input": shapes}
    compiled = ml.compile(layer, "numpy", precision="float64", shapes=shapes, types=dict.fromkeys(shapes, "float64"))
    values = [v for node in compiled.graph.nodes for v in node.results]
    assert [str(v) for v in values if v.type.dtype is ml.float32] == []


@pytest.mark.parametrize("backend", ["jax", "torch", "c", "ggml"])
def test_engines_agree_to_the_digits_of_float64(backend):
    model = models.Sequential(models.TransformerEncoderLayer(8, 2, 16), models.Linear(1))
    x = np.random.default_rng(0).normal(size=(2, 3, 8))
    expected, result = (
        ml.compile(model, b, precision="float64", shapes={"input": x.shape}) for b in ("numpy", backend)
    )
    params = expected.randomize_params(0)
    y = expected.evaluate(params, {"input": x})["output"]
    converted = {n: result.backend.array(p, ml.float64) for n, p in params.items()}
    np.testing.assert_allclose(
        result.backend.to_numpy(result.evaluate(converted, {"input": x})["output"]), y, rtol=1e-13
    )


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch", "c"])
def test_training_in_float64_uses_all_digits_of_the_data(backend):
    """Move the parameters by a difference in the tenth digit of the targets."""
    x = np.linspace(-1, 1, 32)[:, None]
    params = []
    for shift in (0.0, 1e-10):
        trainer = ml.Trainer(
            models.Linear(1), ml.SGD(0.1), loss="mse", backend=backend, precision="float64", progress=False
        )
        trainer.fit(x, 3 * x + shift, 2, batch_size=16, shuffle=False)
        params.append(trainer.engine.to_numpy())
    distance = np.abs(params[1]["bias"] - params[0]["bias"])
    assert 1e-12 < distance < 1e-9
