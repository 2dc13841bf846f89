"""Products of sparse matrices in C: formats, numbers of rows, open sizes, exported C, the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, decompose, evaluate
from mithril.models import Linear, Relu
from mithril_cbackend.graph import sparse_places

FORMATS = [("csr", 0.9), ("block1x16", 0.8)]


@pytest.fixture(scope="module")
def model() -> Any:
    result = ml.Model()
    result += Linear(64, 48, name="first")
    result += Relu()
    result += Linear(48, 16, name="head")
    return result


@pytest.fixture(scope="module")
def weights(model: Any) -> Any:
    return ml.compile(model, "c", shapes={"input": [1, 64]}).randomize_params(seed=0)


def rows(n: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(n).standard_normal((n, 64)).astype(np.float32)


def dense(weights: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    w = {n: np.asarray(a) for n, a in weights.items()}
    hidden = np.maximum(x @ w["first.weight"].T + w["first.bias"], 0)
    return np.asarray(hidden @ w["head.weight"].T + w["head.bias"])


@pytest.mark.parametrize(("format", "sparsity"), FORMATS)
def test_one_program_for_any_number_of_rows(model: Any, weights: Any, format: Any, sparsity: float) -> None:
    sparse = ml.sparsify(weights, sparsity=sparsity, format=format)
    compiled = ml.compile(model, "c", shapes={"input": [None, 64]}, static_inference=True).bind(sparse)
    for n in (1, 2, 7, 16, 37, 64, 100):
        np.testing.assert_allclose(compiled(rows(n))["output"], dense(sparse, rows(n)), rtol=1e-5, atol=1e-5)
    assert "read the stored elements of 2 sparse matrices" in str(compiled.decisions)


@pytest.mark.parametrize(("format", "sparsity"), FORMATS)
def test_fixed_rows_with_threads(model: Any, weights: Any, format: Any, sparsity: float) -> None:
    sparse = ml.sparsify(weights, sparsity=sparsity, format=format)
    for n in (1, 8, 67):
        options = {"shapes": {"input": [n, 64]}, "static_inference": True, "num_threads": 2}
        compiled = ml.compile(model, "c", **options).bind(sparse)
        np.testing.assert_allclose(compiled(rows(n))["output"], dense(sparse, rows(n)), rtol=1e-5, atol=1e-5)


def test_a_matrix_without_elements_gives_its_bias(model: Any, weights: Any) -> None:
    sparse = ml.sparsify({**weights, "head.weight": np.zeros((16, 48), np.float32)}, format="csr")
    compiled = ml.compile(model, "c", shapes={"input": [3, 64]}, static_inference=True).bind(sparse)
    assert np.array_equal(compiled(rows(3))["output"], np.tile(np.asarray(weights["head.bias"]), (3, 1)))


def test_exported_c_and_the_cache_hold_the_stored_elements(model: Any, weights: Any, tmp_path: Any) -> None:
    sparse = ml.sparsify(weights, sparsity=0.9, format="csr")
    options = {"shapes": {"input": [4, 64]}, "static_inference": True, "cache": True, "cache_dir": str(tmp_path)}
    results = []
    for _ in range(2):
        compiled = ml.compile(model, "c", **options).bind(sparse)
        results.append(compiled(rows(4))["output"])
        np.testing.assert_allclose(results[-1], dense(sparse, rows(4)), rtol=1e-5, atol=1e-5)
    assert np.array_equal(*results)
    compiled.export(tmp_path / "exported")
    stored = (tmp_path / "exported" / "model.weights").stat().st_size
    assert stored < 0.4 * sum(np.asarray(a).nbytes for a in weights.values())


def test_places_that_contradict_each_other_are_made_consistent_in_regions_too() -> None:
    with Builder() as b:
        parts = b.input("values", (6,)), b.input("positions", (6,), "int32"), b.input("starts", (4,), "int32")
        x = b.input("x", (3, 2))
        inner = ops.cond(ops.less(0.0, ops.sum(x)), lambda: ops.sparse_matmul(*parts, x), lambda: x)
    graph = b.build({"y": inner})
    positions, starts = np.int32([0, 10**9, -1, -(10**9), 1, 2]), np.int32([5, 2**31 - 1, -7, 3])
    arguments = {"values": np.arange(6, dtype=np.float32), "positions": positions, "starts": starts}
    arguments["x"] = np.arange(6, dtype=np.float32).reshape(3, 2)
    results = ml.CBackend().build(decompose(graph, ml.CBackend().lowers))({}, arguments)
    # rows end at 0, 3 and 6; the columns are 0, 2, 2, 0, 1 and 2
    np.testing.assert_array_equal(results["y"], [[0, 0], [12, 15], [28, 40]])


@pytest.mark.parametrize(
    "places", [([0, 3], [0, 1, 2]), ([0, -1], [0, 1, 2]), ([0, 1], [0, 2, 1]), ([0, 1], [0, 1, 3])]
)
def test_constants_that_contradict_each_other_are_made_consistent(places: Any) -> None:
    with Builder() as b:
        positions, starts = (b.constant(np.int32(a)) for a in places)
        y = ops.sparse_matmul(b.input("values", (2,)), positions, starts, b.input("x", (3, 2)))
    graph = b.build({"y": y})
    assert "sort" in {n.op.name for n in sparse_places.checked(graph).nodes}
    arguments = {"values": np.float32([2, 3]), "x": np.arange(6, dtype=np.float32).reshape(3, 2)}
    results = ml.CBackend().build(decompose(graph, ml.CBackend().lowers))({}, arguments)
    np.testing.assert_array_equal(results["y"], evaluate(graph, arguments)["y"])
