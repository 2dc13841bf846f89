"""Sparse weights: pruning by magnitude, packed formats, and models with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import InputError, OptionError, StrictError
from mithril.backend import PairWeight, SparseWeight, held_weights
from mithril.models import Conv2d, Embedding, Linear, Relu

RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 64)).astype(np.float32)
SHAPES = {"input": [8, 64]}


@pytest.fixture(scope="module")
def model() -> Any:
    result = ml.Model()
    result += Linear(64, 96, name="first")
    result += Relu()
    result += Linear(96, 16, name="head")
    return result


@pytest.fixture(scope="module")
def weights(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    return dict(ml.compile(model, "numpy", shapes=SHAPES).randomize_params(seed=0))


def bound(model: Any, params: Any, **options: Any) -> Any:
    return ml.compile(model, "numpy", shapes=SHAPES, **{"static_inference": True, **options}).bind(params)


@pytest.mark.parametrize(
    ("format", "sparsity", "unit", "kind"),
    [("csr", 0.9, 1, SparseWeight), ("block1x16", 0.75, 16, SparseWeight), ("2:4", None, 4, PairWeight)],
)
def test_the_largest_elements_stay(weights: Any, format: Any, sparsity: Any, unit: int, kind: type) -> None:
    sparse = ml.sparsify(weights, sparsity=sparsity, format=format)
    for name in ("first.weight", "head.weight"):
        dense, packed = weights[name], sparse[name]
        assert isinstance(packed, kind)
        decoded = np.asarray(packed)
        assert np.array_equal(decoded[decoded != 0], dense[decoded != 0])
        groups = np.abs(decoded).reshape(-1, unit)
        if format == "2:4":
            assert (np.count_nonzero(groups, axis=1) == 2).all()
            assert (groups.max(axis=1) == np.abs(dense).reshape(-1, 4).max(axis=1)).all()
            assert packed.nbytes == dense.nbytes * 17 // 32
            continue
        stored = groups.any(axis=1)
        assert stored.sum() == round(stored.size * (1 - sparsity))
        sizes = np.square(dense.reshape(-1, unit)).sum(axis=1)
        assert sizes[stored].min() >= sizes[~stored].max()
        assert packed.nbytes < 0.35 * dense.nbytes
    assert sparse["first.bias"] is weights["first.bias"]


def test_products_read_stored_elements_and_hold_nothing_else(model: Any, weights: Any) -> None:
    for format, sparsity in (("csr", 0.9), ("block1x16", 0.75)):
        sparse = ml.sparsify(weights, sparsity=sparsity, format=format)
        expected = bound(model, {n: np.asarray(x) for n, x in sparse.items()})(X)["output"]
        compiled = bound(model, sparse)
        np.testing.assert_allclose(compiled(X)["output"], expected, rtol=1e-5, atol=1e-6)
        assert "products read the stored elements of 2 sparse matrices" in str(compiled.decisions)
        assert "sparse_to_dense" not in compiled.source
        packed = [sparse["first.weight"], sparse["head.weight"]]
        assert held_weights(packed).in_memory == sum(w.nbytes for w in packed)


def test_auto_takes_the_smallest_format_or_none(weights: Any) -> None:
    blocks = {n: np.asarray(x) for n, x in ml.sparsify(weights, sparsity=0.9, format="block1x16").items()}
    automatic = ml.sparsify(blocks)
    assert automatic["first.weight"].format == "block1x16"
    assert np.array_equal(np.asarray(automatic["first.weight"]), blocks["first.weight"])
    assert ml.sparsify(weights, sparsity=0.9)["first.weight"].format == "csr"
    assert isinstance(ml.sparsify(weights, sparsity=0.3)["first.weight"], np.ndarray)


def test_a_compiled_model_is_bound_to_the_packed_weights(model: Any, weights: Any) -> None:
    compiled = bound(model, weights)
    assert ml.sparsify(compiled, pattern="first.*", sparsity=0.9, format="csr") is compiled
    assert isinstance(compiled.params["first.weight"], SparseWeight)


def test_weights_of_a_file_are_packed_again(model: Any, weights: Any, tmp_path: Any) -> None:
    pytest.importorskip("mithril_hub", reason="opens files of weights")
    compiled = ml.sparsify(bound(model, weights), pattern="first.*", sparsity=0.9, format="csr")
    results = compiled(X)["output"]
    compiled.save(tmp_path / "weights.safetensors")
    again = bound(model, ml.sparsify(ml.open_weights(tmp_path / "weights.safetensors")))
    assert repr(again.params["first.weight"]) == repr(compiled.params["first.weight"])
    np.testing.assert_allclose(again(X)["output"], results, rtol=1e-5, atol=1e-6)


def test_other_programs_and_operations_decode_and_say_so(model: Any, weights: Any) -> None:
    sparse = ml.sparsify(weights, sparsity=0.9, format="csr")
    trained = bound(model, sparse, static_inference=False)
    expected = bound(model, {n: np.asarray(x) for n, x in sparse.items()})(X)["output"]
    np.testing.assert_allclose(trained(X)["output"], expected, rtol=1e-5, atol=1e-6)
    assert "sparse weights are decoded, because static_inference is off" in str(trained.decisions)
    _, gradients = trained.evaluate({"input": X}, None, {"output": np.ones((8, 16), np.float32)})
    assert gradients["first.weight"].shape == (96, 64)
    pairs = bound(model, ml.sparsify(weights, format="2:4"))
    pairs(X)
    assert "backend 'numpy' reads no such format" in str(pairs.decisions)
    with pytest.raises(StrictError, match="sparse weights are decoded"):
        bound(model, sparse, static_inference=False, strict=True)
    table = ml.Model()
    table += Embedding(50, 16, name="table")
    rows = ml.compile(table, "numpy", shapes={"input": [3]}, types={"input": "int32"}, static_inference=True)
    params = ml.sparsify(rows.randomize_params(seed=0), sparsity=0.9, format="csr")
    ids = np.array([3, 0, 49], np.int32)
    assert np.array_equal(rows.bind(params)({"input": ids})["output"], np.asarray(params["table.weight"])[ids])
    assert "the sparse matrix 'table.weight' is decoded for" in str(rows.decisions)


def test_kernels_of_images_are_pruned_but_not_packed() -> None:
    image = ml.Model()
    image += Conv2d(4, 8, kernel_size=3, name="conv")
    weights = ml.compile(image, "numpy", shapes={"input": [1, 4, 8, 8]}).randomize_params(seed=0)
    pruned = ml.sparsify(weights, sparsity=0.75)["conv.weight"]
    assert isinstance(pruned, np.ndarray)
    assert np.count_nonzero(pruned) == pruned.size // 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.0}, "sparsity=1.0 is not a fraction of zeros, from 0 to less than 1"),
        ({"sparsity": 0.9, "format": "2:4"}, "format='2:4' has 0.5 of its elements, not sparsity=0.9"),
        ({"format": "csc"}, "'csc'"),
        ({"pattern": "*.wieght"}, "'*.wieght' in pattern= matches no weight"),
        ({"pattern": "odd", "format": "block1x16"}, "needs rows of a multiple of 16 elements, but 'odd' has 10"),
        ({"pattern": "half", "sparsity": 0.5}, "'half' is float16"),
    ],
)
def test_impossible_requests_are_errors(weights: Any, arguments: Any, message: str) -> None:
    more = {"odd": np.ones((4, 10), np.float32), "half": np.ones((4, 16), np.float16)}
    with pytest.raises((OptionError, InputError), match="^(?s:.*)") as error:
        ml.sparsify({**weights, **more}, **arguments)
    assert message in str(error.value)


def test_a_model_without_parameters_is_an_error(model: Any) -> None:
    with pytest.raises(InputError, match="takes weights by name, or a compiled model with bound parameters, not Model"):
        ml.sparsify(model, sparsity=0.5)
