"""Attention of long sequences in blocks: equal to the reference, with memory that grows like the sequence."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import dtype
from mithril.models import IOKey, Model, MultiHeadAttention
from mithril_jax import lowering
from mithril_jax.execution import analysis

KEYS = np.random.default_rng(5).random((1, 1, 200, 300)) > 0.3
CASES = {
    "grouped": ((2, 4, 300, 8), (2, 2, 300, 8), {"causal": True}),
    "last positions": ((1, 2, 200, 8), (1, 1, 300, 8), {"causal": True, "scale": 0.2}),
    "mask": ((1, 2, 200, 8), (1, 2, 300, 8), {"mask": KEYS}),
    "mask of keys, 16 bits": ((1, 2, 200, 8), (1, 2, 300, 8), {"mask": KEYS[:, :, :1], "dtype": "bfloat16"}),
}


def attention(queries, keys, mask=None, dtype=None, **attributes):
    types = {"q": queries, "k": keys, "v": keys}
    q, k, v = (IOKey(n, shape=list(shape), dtype=dtype or "float32", trainable=True) for n, shape in types.items())
    return Model.create(outputs={"y": ops.attention(q, k, v, mask, **attributes)})


@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_the_reference(case, monkeypatch):
    monkeypatch.setattr(lowering, "LONG", 0)
    queries, keys, settings = CASES[case]
    model, results = attention(queries, keys, **settings), []
    for backend in ("numpy", ml.JaxBackend(device="cpu")):
        compiled = ml.compile(model, backend)
        params = compiled.randomize_params(3)
        g = np.random.default_rng(4).standard_normal(queries, np.float32)
        cotangent = g.astype(dtype(settings.get("dtype", "float32")).numpy)
        outputs, gradients = compiled.evaluate(params, {}, {"y": cotangent})
        results.append({n: np.asarray(x, np.float32) for n, x in {**outputs, **gradients}.items()})
    assert "blocked_attention(" in compiled.source and "blocked_attention_grad(" in compiled.source
    tolerance = 0.03 if "dtype" in settings else 2e-5
    for name, expected in results[0].items():
        np.testing.assert_allclose(results[1][name], expected, atol=tolerance, rtol=tolerance, err_msg=name)


def test_jax_differentiates_blocks(monkeypatch):
    monkeypatch.setattr(lowering, "LONG", 0)
    shape = (1, 1, 130, 4)
    model = attention(shape, shape, causal=True)
    compiled = ml.compile(model, ml.JaxBackend(device="cpu"))
    params, function = compiled.randomize_params(3), compiled.to_function()
    actual = jax.jit(jax.grad(lambda p: function(p, {})["y"].sum()))(params)
    expected = ml.compile(model, "numpy").evaluate(params, {}, {"y": np.ones(shape, np.float32)})[1]
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, atol=1e-5, err_msg=name)


def test_no_array_has_the_scores_of_all_positions():
    x = np.ones((1, 1024, 4), np.float32)
    model = Model.create(outputs={"y": MultiHeadAttention(4, 1, causal=True)(IOKey("x"))})
    compiled = ml.compile(model, ml.JaxBackend(device="cpu"), shapes={"x": list(x.shape)})
    compiled.evaluate(compiled.randomize_params(0), {"x": x}, {"y": x})
    assert analysis(compiled.programs[-1].executable, {}).temp_size_in_bytes < 1024 * 1024 * x.itemsize / 2


def test_attention_to_a_cache_reads_its_visible_part():
    shape = (1, 1, 512, 4)
    compiled = ml.compile(attention(shape, shape), ml.JaxBackend(device="cpu"))
    (node,) = (n for n in compiled.graph.nodes if n.op is ops.attention)
    table = compiled.backend.table()
    blocks, cached = table.find(node), table.find(node.replaced(tags={"cached": True}))
    assert blocks is not cached and cached is lowering.table.find(node.replaced(tags={"cached": True}))
