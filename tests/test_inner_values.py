"""Values inside a model as outputs by path, and hooks that read or change them, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import LSTM, Layer, Linear, Model, Relu, Sequential, TransformerEncoder, hook

BACKENDS = sorted(ml.plugins.backends())
X = np.random.default_rng(2).normal(size=(2, 3, 8)).astype(np.float32)


def nested() -> Model:
    block = Model()
    block |= Linear(8)(input="x", output="hidden")
    block |= Relu()(input="hidden", output="y")
    model = Model()
    model |= block(x="input", y="h")
    model |= Sequential(Linear(4), Relu())(input="h", output="output")
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_nested_models_and_layers(backend: str) -> None:
    names = ["model.hidden", "model.relu", "output", "sequential.0"]
    compiled = ml.compile(nested(), backend, shapes={"input": [2, 3, 8]}, outputs=names)
    params = compiled.randomize_params(seed=1)
    values = {n: compiled.backend.to_numpy(v) for n, v in compiled.evaluate(params, {"input": X}).items()}
    assert list(values) == names
    weights = {n: compiled.backend.to_numpy(v) for n, v in params.items()}
    hidden = X @ weights["model.linear.weight"].T + weights["model.linear.bias"]
    np.testing.assert_allclose(values["model.hidden"], hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values["model.relu"], np.maximum(hidden, 0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values["output"], np.maximum(values["sequential.0"], 0), rtol=1e-5)


def test_layers_that_a_build_method_calls() -> None:
    encoder = TransformerEncoder(2, 8, heads=2)
    path = "layers.1.self_attn"
    compiled = ml.compile(encoder, "numpy", shapes={"input": [2, 3, 8]}, outputs=["output", path])
    values = compiled.evaluate(compiled.randomize_params(), {"input": X})
    assert values[path].shape == (2, 3, 8)
    plain = ml.compile(encoder, "numpy", shapes={"input": [2, 3, 8]})
    expected = plain.evaluate(plain.randomize_params(), {"input": X})["output"]
    np.testing.assert_allclose(values["output"], expected, rtol=1e-6)


def test_further_results_of_a_layer() -> None:
    compiled = ml.compile(Model(LSTM(4)), "numpy", shapes={"input": [2, 3, 8]}, outputs=["lstm.last_cell"])
    assert compiled.evaluate(compiled.randomize_params(), {"input": X})["lstm.last_cell"].shape == (1, 2, 4)


@pytest.mark.parametrize("name", ["model.hiden", "modell.hidden", "sequential.2", "nothing"])
def test_unknown_paths_are_refused(name: str) -> None:
    with pytest.raises(ml.ModelError, match=f"no terminal '{name}'"):
        ml.compile(nested(), "numpy", shapes={"input": [2, 3, 8]}, outputs=[name])


class Loop(Layer):
    def __init__(self) -> None:
        self.cell = Linear(8)

    def build(self, x: Any) -> Any:
        return ops.scan(lambda h, row: (self.cell(h) + row, None), x[0], x)[0]


def test_a_value_inside_a_loop_is_refused() -> None:
    with pytest.raises(ml.ModelError, match="the result of layer 'cell' cannot be an output"):
        ml.compile(Loop(), "numpy", shapes={"input": [2, 3, 8]}, outputs=["cell"]).evaluate({}, {"input": X})


# -- hooks --------------------------------------------------------------------------------------------------------
def test_hooks_change_values_and_keep_names() -> None:
    model = nested()
    plain = ml.compile(model, "numpy", shapes={"input": [2, 3, 8]}, outputs=["sequential.0"])
    params = plain.randomize_params(seed=1)
    before = plain.evaluate(params, {"input": X})["sequential.0"]
    model.replace("sequential.0", hook(lambda y: ops.clip(y, low=-0.1, high=0.1)))
    compiled = ml.compile(model, "numpy", shapes={"input": [2, 3, 8]}, outputs=["output"])
    values = compiled.evaluate(params, {"input": X})["output"]
    np.testing.assert_allclose(values, np.clip(np.maximum(before, 0), None, 0.1), rtol=1e-5)


def test_hooks_read_values() -> None:
    read: list[tuple[Any, ...]] = []
    model = nested().replace("*.relu", hook(lambda y: read.append(y.shape)))
    y = model(X)
    assert read == [(2, 3, 8)]
    np.testing.assert_array_equal(y, nested()(X))
    with pytest.raises(ml.ModelError, match="hook requires a function, got 3"):
        hook(3)  # type: ignore[arg-type]
