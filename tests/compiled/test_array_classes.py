"""Arrays of classes derived from NumPy's are read as plain arrays; masked elements have no value, and are refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.models import Layer, Linear, Sequential

X = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)


class Square(Layer):
    """To a matrix of NumPy, ``*`` is a matrix product."""

    def build(self, x: Any) -> Any:
        return x * x


def matrix(x: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.matrix(x)


def test_values_of_derived_classes_are_those_of_their_arrays(backend: str) -> None:
    compiled = ml.compile(Sequential(Linear(4), Square()), backend, shapes={"input": [4, 4]})
    params = {name: np.asarray(x) for name, x in compiled.randomize_params(0).items()}
    expected = np.asarray(compiled.evaluate(params, {"input": X})["output"])
    for derived in (matrix, np.ma.masked_array):
        weights = {name: derived(x) if x.ndim == 2 else x for name, x in params.items()}
        actual = compiled.evaluate(weights, {"input": derived(X)})["output"]
        assert not isinstance(actual, (np.matrix, np.ma.MaskedArray))
        np.testing.assert_array_equal(np.asarray(actual), expected)


def test_masked_elements_are_refused(backend: str) -> None:
    compiled = ml.compile(Linear(4), backend, shapes={"input": [4, 4]})
    params = {name: np.asarray(x) for name, x in compiled.randomize_params(0).items()}
    masked = np.ma.masked_array(X, mask=np.eye(4, dtype=bool))
    with pytest.raises(ml.InputError, match=r"input 'input' is masked: an operation has no value for 4 of 16 elements"):
        compiled.evaluate(params, {"input": masked})
    with pytest.raises(ml.InputError, match="parameter 'weight' is masked"):
        compiled.evaluate({**params, "weight": np.ma.masked_array(params["weight"], mask=np.eye(4, dtype=bool))}, X)


def test_masked_rows_of_training_are_refused(backend: str) -> None:
    trainer = ml.Trainer(Sequential(Linear(1)), ml.SGD(0.1), loss="mse", backend=backend, seed=0, progress=False)
    with pytest.raises(ml.InputError, match="is masked"):
        trainer.fit(np.ma.masked_array(X, mask=np.eye(4, dtype=bool)), X[:, :1], epochs=1, batch_size=4)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_tensors_whose_elements_cannot_be_read_are_refused(backend: str) -> None:
    torch = pytest.importorskip("torch")
    if backend == "torch":
        pytest.skip("it computes with them itself")
    compiled = ml.compile(Linear(4), backend, shapes={"input": [4, 4]})
    params = compiled.randomize_params(0)
    eye = torch.eye(4)
    for tensor, message in (
        (eye.to_sparse(), "input 'input' is a sparse tensor of PyTorch \\(torch.sparse_coo\\)"),
        (eye.to_sparse_csr(), "input 'input' is a sparse tensor of PyTorch \\(torch.sparse_csr\\)"),
        (eye.to("meta"), "input 'input' is on the device 'meta', where tensors have no elements"),
    ):
        with pytest.raises(ml.InputError, match=message):
            compiled.evaluate(params, {"input": tensor})
    with pytest.raises(ml.InputError, match="sparse tensor"):
        compiled.backend.array(eye.to_sparse())
