"""Functions imported from JAX compute the same on every backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mithril as ml

BACKENDS = sorted(ml.plugins.backends())
W = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)


def network(params: Any, x: Any) -> Any:
    """Return the outputs of a recurrent network with noise, and a gradient."""

    def run(x: Any) -> Any:
        step = jax.checkpoint(lambda h, e: (jnp.tanh(h @ params["w"] + e), h.sum(-1)))
        h, sums = jax.lax.scan(step, jnp.zeros((x.shape[0], 4)), x.transpose(1, 0, 2))
        return jax.nn.softmax(h, -1) + jax.nn.relu(sums.T[:, :1])

    noise = jax.random.uniform(jax.random.key(7), (4,))
    return run(x) + noise, jax.grad(lambda a: (run(a) ** 2).sum())(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_imported_functions_on_every_backend(backend: str) -> None:
    x = np.random.default_rng(1).standard_normal((3, 5, 4)).astype(np.float32)
    model = ml.from_jax(network, x, params={"w": W})
    compiled = ml.compile(model, backend, inference=True)
    results = compiled.evaluate({"x": x})
    for result, expected in zip(results.values(), network({"w": W}, x), strict=True):
        np.testing.assert_allclose(compiled.backend.to_numpy(result), expected, rtol=1e-4, atol=2e-5)


def positions(x: Any, i: Any) -> Any:
    """Return reads and updates at positions of which some are outside."""
    added = x.at[i].add(x[: len(i)], mode="drop")
    return x.at[i].set(1.0), added, x.at[i].max(0.5), jnp.take(x, i, axis=0, fill_value=7.0), jax.grad(weighted)(x, i)


def weighted(x: Any, i: Any) -> Any:
    return (jnp.take(x, i, axis=0, mode="fill", fill_value=0.0) ** 2).sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_outside_on_every_backend(backend: str) -> None:
    x, i = W, np.array([1, 9, -2, -7], np.int32)
    compiled = ml.compile(ml.from_jax(positions, x, i), backend, inference=True)
    results = compiled.evaluate({"x": x, "i": i})
    for result, expected in zip(results.values(), positions(jnp.asarray(x), i), strict=True):
        np.testing.assert_allclose(compiled.backend.to_numpy(result), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_programs_of_stablehlo_on_every_backend(backend: str) -> None:
    x = np.random.default_rng(1).standard_normal((3, 5, 4)).astype(np.float32)
    model = ml.from_stablehlo(jax.jit(lambda w, x: network({"w": w}, x)).lower(W, x), params={"arg0": W})
    compiled = ml.compile(model, backend, inference=True)
    results = compiled.evaluate({"arg1": x})
    for result, expected in zip(results.values(), network({"w": W}, x), strict=True):
        np.testing.assert_allclose(compiled.backend.to_numpy(result), expected, rtol=1e-4, atol=2e-5)
