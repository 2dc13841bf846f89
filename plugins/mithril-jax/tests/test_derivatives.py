"""Derivatives of compiled graphs against ``jax.jacobian``, ``jax.jvp`` and ``jax.hessian`` of the same function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril_jax.backend import JaxBackend

RNG = np.random.default_rng(0)
X, T = RNG.normal(size=(2, 5)).astype(np.float32)
W, U = RNG.normal(size=(2, 5, 4)).astype(np.float32)


def network(x, w):
    h = ops.layer_norm(ops.gelu(x @ w))
    return ops.softmax(h * ops.sum(x))


def reference(x, w):
    h = jax.nn.gelu(x @ w, approximate=False)
    h = (h - h.mean()) / jnp.sqrt(h.var() + 1e-5)
    return jax.nn.softmax(h * x.sum())


def graph(function):
    with ml.Builder() as b:
        y = function(b.input("x", (5,)), b.input("w", (5, 4)))
    return b.build({"y": y})


def run(transformed, **values):
    return ml.compile(transformed, JaxBackend()).evaluate({}, {"x": X, "w": W, **values})


def close(results, reference):
    np.testing.assert_allclose(results, reference, 2e-4, 2e-5)


def test_products():
    value, slope = jax.jvp(reference, (X, W), (T, U))
    results = run(ml.jvp(graph(network), wrt=["x", "w"]), **{"tangent/x": T, "tangent/w": U})
    close(results["y"], value)
    close(results["tangent/y"], slope)


def test_jacobians():
    results = run(ml.jacobian(graph(network)))
    for k, name in enumerate("xw"):
        close(results[f"jacobian/y/{name}"], jax.jacobian(reference, k)(X, W))


@pytest.mark.parametrize("size", [None, 3])
def test_hessians(size):
    blocks = jax.hessian(lambda x, w: jnp.sum(reference(x, w) ** 2), (0, 1))
    energy = ml.hessian(graph(lambda x, w: ops.sum(ops.square(network(x, w)))))
    expected = blocks(X, W)
    results = run(energy)
    for k, a in enumerate("xw"):
        for j, b in enumerate("xw"):
            close(results[f"hessian/{a}" if a == b else f"hessian/{a}/{b}"], expected[k][j])
    rows = np.stack([X, T, X + T])
    vectorized = ml.compile(ml.vmap(energy, {"w": None}, size=size), JaxBackend()).evaluate({}, {"x": rows, "w": W})
    close(vectorized["hessian/w"], jax.vmap(blocks, (0, None))(rows, W)[1][1])


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)], ids=["experts", "features", "results"])
def test_products_of_experts_may_have_no_elements(shape):
    _, features, results = shape
    with ml.Builder() as b:
        x, w = b.input("x", (6, features)), b.input("w", shape)
        y = ops.expert_matmul(x, w, b.input("experts", (6,), "int32"))
    inputs = {"x": np.ones((6, features)), "w": np.ones(shape), "experts": np.zeros(6)}
    types = {"x": np.float32, "w": np.float32, "experts": np.int32}
    inputs = {name: array.astype(types[name]) for name, array in inputs.items()}
    compiled = ml.compile(b.build({"y": y}), JaxBackend(), inference=False)
    outputs, gradients = compiled.evaluate({}, inputs, {"y": np.ones((6, results), np.float32)}, wrt=["x", "w"])
    assert not np.any(outputs["y"])
    assert all(x.shape == inputs[name].shape and not np.any(x) for name, x in gradients.items())
