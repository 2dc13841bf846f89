"""Inputs of scipy.sparse: results and gradients without a dense matrix, and arrays that are refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import InputError, ModelError, OptionError, StrictError
from mithril.models import IOKey, Linear, Relu

scipy_sparse = pytest.importorskip("scipy.sparse")
WORDS = 300


def classifier(sparse: Any, words: int = WORDS) -> Any:
    model = ml.Model()
    model |= Linear(16, name="first")(input=IOKey("input", shape=[None, words], sparse=sparse), output="h")
    model += Relu()(input="h", output="a")
    model += Linear(4, name="head")(input="a", output="output")
    return model


@pytest.fixture(scope="module")
def exact() -> Any:
    return ml.compile(classifier(None), "numpy")


@pytest.fixture(scope="module")
def params(exact: Any) -> Any:
    return exact.randomize_params(seed=0)


def bag(rows: int, density: float = 0.05, words: int = WORDS) -> Any:
    rng = np.random.default_rng(rows)
    dense = rng.standard_normal((rows, words)).astype(np.float32) * (rng.random((rows, words)) < density)
    return scipy_sparse.csr_array(dense)


@pytest.mark.parametrize("backend", ["numpy", "c", "ggml"])
def test_results_and_gradients_are_those_of_the_dense_matrix(backend: str, exact: Any, params: Any) -> None:
    pytest.importorskip({"numpy": "mithril_numpy", "c": "mithril_cbackend", "ggml": "mithril_ggml"}[backend])
    compiled = ml.compile(classifier("csr"), backend)
    for rows, density in ((5, 0.05), (9, 0.02), (3, 0.0)):
        x = bag(rows, density)
        slope = {"output": np.random.default_rng(1).standard_normal((rows, 4)).astype(np.float32)}
        results, gradients = compiled.evaluate(params, {"input": x}, slope)
        expected, slopes = exact.evaluate(params, {"input": x.toarray()}, slope)
        np.testing.assert_allclose(results["output"], expected["output"], rtol=1e-5, atol=1e-6)
        for name in slopes:
            np.testing.assert_allclose(gradients[name], slopes[name], rtol=1e-4, atol=1e-5)
    words = "is decoded: backend 'ggml'" if backend == "ggml" else "read the stored elements of 1 sparse matrices"
    assert words in str(compiled.decisions)


def test_no_dense_matrix_is_built() -> None:
    words, rows = 200_000, 64
    x = bag(rows, 0.0001, words)
    compiled = ml.compile(classifier("csr", words), "numpy")
    compiled.bind(compiled.randomize_params(seed=0))
    slope = {"output": np.ones((rows, 4), np.float32)}
    compiled({"input": x}, slope)
    tracemalloc.start()
    compiled({"input": x}, slope)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gradient = words * 16 * 4
    assert peak < 3 * gradient < rows * words * 4


def test_numbers_of_elements_share_programs_and_the_cache(params: Any, tmp_path: Any) -> None:
    for _ in range(2):
        compiled = ml.compile(classifier("csr"), "numpy", cache=True, cache_dir=str(tmp_path))
        for density in (0.008, 0.009, 0.010):
            compiled.evaluate(params, {"input": bag(16, density)})
        assert len(compiled.programs) == 1
        assert compiled.evaluate(params, {"input": bag(16, 0.5)})["output"].shape == (16, 4)
        assert len(compiled.programs) == 2
    assert "up to 4096 elements of 'input'" in str(compiled.decisions)


def test_functions_of_zero_stay_sparse_and_others_say_so(params: Any) -> None:
    for layer, word in ((ml.models.Tanh(), "read the stored"), (ml.models.Sigmoid(), "is decoded for sigmoid")):
        model = ml.Model()
        model |= layer(input=IOKey("input", shape=[None, WORDS], sparse="csr"), output="t")
        model += Linear(16, name="first")(input="t", output="output")
        compiled = ml.compile(model, "numpy")
        weights = {n: x for n, x in params.items() if n.startswith("first")}
        y = compiled.evaluate(weights, {"input": bag(4)})["output"]
        dense = bag(4).toarray()
        t = np.tanh(dense) if word == "read the stored" else 1 / (1 + np.exp(-dense))
        np.testing.assert_allclose(y, t @ weights["first.weight"].T + weights["first.bias"], rtol=1e-4, atol=1e-5)
        assert word in str(compiled.decisions)


def changed(**parts: Any) -> Any:
    x = scipy_sparse.csr_array(np.eye(4, WORDS, dtype=np.float32) + np.eye(4, WORDS, 5, dtype=np.float32))
    for name, values in parts.items():
        setattr(x, name, np.asarray(values, getattr(x, name).dtype))
    return x


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((4, WORDS), np.float32), "input 'input' is declared sparse='csr', but got ndarray"),
        (bag(4).tocoo(), "is a sparse array in the format 'coo' with 2 axes"),
        (scipy_sparse.csr_array((4, 7), dtype=np.float32), "expected 300"),
        (changed(indices=[5, 0, 1, 6, 2, 7, 3, 8]), "columns of a row are not sorted, or occur twice"),
        (changed(indices=[0, 0, 1, 6, 2, 7, 3, 8]), "columns of a row are not sorted, or occur twice"),
        (changed(indices=[0, 999, 1, 6, 2, 7, 3, 8]), "it has columns from 0 to 999 of 300"),
        (changed(indptr=[0, 4, 2, 6, 8]), "the starts of its rows do not begin with 0 and increase"),
        (changed(indptr=[0, 2, 4, 6, 99]), "its rows have 99 elements, but 8 are stored"),
    ],
)
def test_inconsistent_arrays_are_errors_before_any_work(x: Any, message: str, params: Any) -> None:
    compiled = ml.compile(classifier("csr"), "numpy")
    with pytest.raises(InputError) as error:
        compiled.evaluate(params, {"input": x})
    assert message in str(error.value)
    assert not compiled.programs


def test_wrong_declarations_are_errors(exact: Any, params: Any) -> None:
    with pytest.raises(InputError, match="is a sparse array, but the model declares a dense one"):
        exact.evaluate(params, {"input": bag(4)})
    with pytest.raises((OptionError, ModelError, TypeError), match="csc"):
        IOKey("input", sparse="csc")
    with pytest.raises(ModelError, match="cannot be both sparse and trainable"):
        IOKey("input", sparse="csr", trainable=True)
    with pytest.raises(InputError, match="Type mismatch: expected float32, got float64"):
        ml.compile(classifier("csr"), "numpy").evaluate(params, {"input": bag(4).astype(np.float64)})
    with pytest.raises(InputError, match="sparse input 'input' has no gradient"):
        ml.compile(classifier("csr"), "numpy").evaluate(
            params, {"input": bag(4)}, {"output": np.ones((4, 4), np.float32)}, wrt=("input",)
        )
    pytest.importorskip("mithril_ggml")
    with pytest.raises(StrictError, match="sparse input 'input' is decoded"):
        ml.compile(classifier("csr"), "ggml", strict=True).evaluate(params, {"input": bag(4)})


def test_profiles_and_data_sets_say_what_they_read(params: Any) -> None:
    compiled = ml.compile(classifier("csr"), "numpy").bind(params)
    with ml.profile() as profile:
        compiled({"input": bag(4)})
    assert "sparse_matmul" in profile.summary()
    pytest.importorskip("mithril_train")
    trainer = ml.Trainer(classifier("csr"), ml.Adam(), loss="cross_entropy", backend="numpy", progress=False)
    with pytest.raises(InputError, match="column 'input' of a dataset is a sparse array"):
        trainer.fit((bag(4), np.zeros(4, np.int32)))


def test_saved_models_frozen_layers_and_adapters_keep_the_declaration(exact: Any, params: Any) -> None:
    pytest.importorskip("mithril_lora")
    again = ml.Model.from_json(classifier("csr").to_json())
    compiled = ml.compile(again.replace("head", ml.LoRA(rank=2)).freeze("first"), "numpy")
    weights = {**compiled.randomize_params(seed=0), **params}
    results, gradients = compiled.evaluate(weights, {"input": bag(4)}, {"output": np.ones((4, 4), np.float32)})
    np.testing.assert_allclose(
        results["output"], exact.evaluate(params, {"input": bag(4).toarray()})["output"], rtol=1e-5, atol=1e-6
    )
    assert "first.weight" not in gradients
    assert any("lora" in name.lower() or "down" in name for name in gradients)
