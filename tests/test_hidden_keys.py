"""Keys that a mask hides have no part in attention, whatever they hold: on every backend, in values and gradients."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, dtype as as_dtype

BACKENDS = ("numpy", "torch", "jax", "mlx", "c", "ggml")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SHAPES = ((1, 3, 2, 8), (3, 3, 2, 8), (5, 40, 2, 8), (4, 4, 1, 6))  # queries, keys, heads of keys, size of values
BAD = (np.nan, np.inf, -np.inf)


def attention_graph(shape, dtype, mask, causal):
    queries, keys, heads, size = shape
    kind = as_dtype(dtype)
    with Builder() as b:
        q = b.param("q", (1, 2, queries, 8), kind)
        k, v = (b.param(name, (1, heads, keys, n), kind) for name, n in (("k", 8), ("v", size)))
        m = None if mask is None else b.input("m", (queries, keys), "bool" if mask == "bool" else kind)
        return b.build({"y": ops.attention(q, k, v, m, causal=causal)})


def arrays_of(shape, dtype, mask, bad, place):
    """Return arguments of which one key, hidden from some queries or from all, holds a bad number."""
    queries, keys, heads, size = shape
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((1, *dims)).astype(DTYPES[dtype])
        for name, dims in (("q", (2, queries, 8)), ("k", (heads, keys, 8)), ("v", (heads, keys, size)))
    }
    hidden = keys - 1 if mask is None else 1
    arrays[place][0, 0, hidden, 0] = bad
    seen = np.arange(keys) != hidden
    window = np.abs(np.arange(queries)[:, None] + keys - queries - np.arange(keys)) < 3
    seen = window & seen if queries == 5 else np.broadcast_to(seen, (queries, keys))
    inputs = {"bool": seen, "added": np.where(seen, 0, -np.inf).astype(DTYPES[dtype]), None: None}[mask]
    return arrays, {} if inputs is None else {"m": np.asarray(inputs, order="C")}


def same(actual, expected, dtype):
    tolerance = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}[dtype]
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_hidden_keys_have_no_part(backend):
    few = backend in ("jax", "c")  # where compiling takes long
    dtypes = ["float32"] if few else list(DTYPES)
    for shape, dtype, (mask, causal) in itertools.product(
        SHAPES[1:3] if few else SHAPES, dtypes, [("bool", False), ("bool", True), ("added", True), (None, True)]
    ):
        if mask is None and shape[0] == 1:
            continue  # the only query sees all keys
        graph = attention_graph(shape, dtype, mask, causal)
        compiled = ml.compile(graph, backend)
        for bad, place in itertools.product(BAD, "kv"):
            params, inputs = arrays_of(shape, dtype, mask, bad, place)
            expected = ops.attention(*params.values(), inputs.get("m"), causal=causal)
            y = compiled.backend.to_numpy(compiled.evaluate(params, inputs)["y"])
            same(y, expected, dtype)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "c"])
@pytest.mark.parametrize("mask, causal", [("bool", False), (None, True)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_agree_with_hidden_keys(backend, mask, causal):
    shape = (4, 4, 2, 8)
    graph = attention_graph(shape, "float32", mask, causal)
    g = np.random.default_rng(1).standard_normal((1, 2, 4, 8)).astype(np.float32)
    compiled, reference = (
        ml.compile(graph, b, optimization_level=level) for b, level in ((backend, "medium"), ("numpy", "none"))
    )
    for bad in BAD:
        params, inputs = arrays_of(shape, "float32", mask, bad, "k")
        results = [c.evaluate(params, inputs, output_gradients={"y": g}) for c in (compiled, reference)]
        for name in params:
            same(compiled.backend.to_numpy(results[0][1][name]), results[1][1][name], "float32")
