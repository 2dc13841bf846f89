"""Products of bfloat16 have the form that XLA for CPUs passes to oneDNN."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model, Relu


@pytest.mark.parametrize(
    "options", [{}, {"inference": True}, {"static_inference": True}, {"optimization_level": "none"}]
)
@pytest.mark.parametrize(("shape", "count"), [((4, 512), 2), ((1, 512), 0), ((2, 3, 512), 2)])
def test_rows_of_weights_are_contracted(shape, count, options):
    model = Model(Linear(512), Relu(), Linear(512))
    exact = ml.compile(model, "numpy", shapes={"input": list(shape)})
    compiled = ml.compile(model, "jax", shapes={"input": list(shape)}, precision="bfloat16", **options)
    params = exact.randomize_params(seed=0)
    compiled.bind({n: compiled.backend.array(a, dtype="bfloat16") for n, a in params.items()})
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    y = np.asarray(compiled({"input": x})["output"], np.float32)
    expected = exact.evaluate(params, {"input": x})["output"]
    assert np.abs(y - expected).max() < 0.03 * np.abs(expected).max()
    body = compiled.source.partition("def forward")[2]
    assert body.count("product_of_row(") == 2 - count
    assert body.count("lax.dot_general(") == count
    assert body.count(f"(({len(shape) - 1},), (1,))") == count


def test_other_products_stay():
    compiled = ml.compile(Model(Linear(512)), "jax", shapes={"input": [4, 512]}, precision="float16")
    compiled.bind(compiled.randomize_params(seed=0))
    compiled({"input": np.ones((4, 512), np.float32)})
    assert "jnp.matmul(" in compiled.source
