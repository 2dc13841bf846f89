"""Linear algebra on every backend, with gradients; where a backend has no function, its host call is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.models import Layer

BACKENDS = sorted(ml.plugins.backends())
generator = np.random.default_rng(0)
A = generator.normal(size=(2, 4, 4)).astype(np.float32) + 3 * np.eye(4, dtype=np.float32)
B = generator.normal(size=(2, 4, 3)).astype(np.float32)
ON_HOST = {"mlx", "c"}


class GaussianLogLikelihood(Layer):
    """Uses a factor, two solutions and a determinant."""

    def build(self, a: Any) -> Any:
        covariance = ml.ops.matmul(a, ml.ops.transpose(a, perm=(0, 2, 1)))
        factor = ml.ops.cholesky(covariance)
        white = ml.ops.triangular_solve(factor, B)
        x = ml.ops.solve(a, B)
        return ml.ops.sum(white * white) + ml.ops.sum(x * x) + ml.ops.sum(ml.ops.slogdet(a)[1])


def expected(a: np.ndarray[Any, Any]) -> float:
    white = np.linalg.solve(np.linalg.cholesky(a @ np.swapaxes(a, 1, 2)), B.astype(np.float64))
    return float(
        (white**2).sum() + (np.linalg.solve(a, B.astype(np.float64)) ** 2).sum() + np.linalg.slogdet(a)[1].sum()
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients(backend: str) -> None:
    model = GaussianLogLikelihood()
    compiled = ml.compile(model, backend, shapes={"input": [2, 4, 4]}, trainable=["input"])
    outputs, gradients = compiled.evaluate({}, {"input": A}, output_gradients="output")
    exact = A.astype(np.float64)
    np.testing.assert_allclose(float(compiled.backend.to_numpy(outputs["output"])), expected(exact), rtol=1e-4)
    direction = generator.normal(size=A.shape)
    step = 1e-6 * direction
    slope = (expected(exact + step) - expected(exact - step)) / 2e-6
    actual = float((compiled.backend.to_numpy(gradients["input"]) * direction).sum())
    np.testing.assert_allclose(actual, slope, rtol=2e-3)
    fallbacks = [d for d in compiled.decisions if d.kind == "fallback"]
    assert bool(fallbacks) == (backend in ON_HOST)


@pytest.mark.parametrize("backend", sorted(ON_HOST & set(BACKENDS)))
def test_strict_refuses_host_calls(backend: str) -> None:
    with pytest.raises(ml.MithrilError, match="cholesky"):
        ml.compile(GaussianLogLikelihood(), backend, shapes={"input": [2, 4, 4]}, strict=True)


def test_matrices_without_a_factorization_give_nan_for_themselves_only() -> None:
    stacked = np.stack([np.eye(2), [[1.0, 2.0], [2.0, 1.0]]]).astype(np.float32)
    singular = np.stack([np.eye(2), np.zeros((2, 2))]).astype(np.float32)
    for backend in BACKENDS:
        with ml.Builder() as b:
            x, y = b.input("x", (2, 2, 2)), b.input("y", (2, 2, 2))
            graph = b.build({"factor": ml.ops.cholesky(x), "inverse": ml.ops.inv(y)})
        results = ml.compile(graph, backend).evaluate({}, {"x": stacked, "y": singular})
        factor, inverse = (np.asarray(results[n]) for n in ("factor", "inverse"))
        assert np.isfinite(factor[0]).all() and np.isnan(factor[1]).any(), backend
        assert np.isfinite(inverse[0]).all() and not np.isfinite(inverse[1]).any(), backend
