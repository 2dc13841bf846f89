"""Layers that provide values of their parameters: bound by ``ml.compile``, kept by ``randomize_params``, trained."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.models import BatchNorm1d, Layer, Linear, Model, Relu
from mithril.system import fingerprint

BACKENDS = sorted(ml.plugins.backends())
generator = np.random.default_rng(0)
W = generator.normal(size=(3, 4)).astype(np.float32)
B = generator.normal(size=3).astype(np.float32)
X = generator.normal(size=(2, 4)).astype(np.float32)


def pretrained_linear() -> Linear:
    layer = Linear(3)
    layer.pretrained = {"weight": W, "bias": B}
    return layer


class Block(Layer):
    """A layer that calls a pretrained layer, of which it replaces the bias."""

    def __init__(self) -> None:
        self.inner = pretrained_linear()
        self.pretrained = {"inner.bias": B + 1}

    def build(self, x: Any) -> Any:
        return self.inner(x)


def quiet(compiled: ml.CompiledModel, *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return np.asarray(compiled.backend.to_numpy(compiled.evaluate(*arguments)["output"]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"shapes": {"input": [2, 4]}}, {}, {"inference": True}], ids=str)
def test_a_compiled_model_starts_with_the_arrays_that_the_model_provides(backend: str, options: dict[str, Any]) -> None:
    model = Model(pretrained_linear())
    compiled = ml.compile(model, backend, **options)
    np.testing.assert_allclose(quiet(compiled, {"input": X}), X @ W.T + B, rtol=1e-3, atol=1e-4)
    assert compiled.params is not None and set(compiled.params) == {"linear.weight", "linear.bias"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_static_inference_embeds_them(backend: str) -> None:
    compiled = ml.compile(pretrained_linear(), backend, shapes={"input": [2, 4]}, static_inference=True)
    np.testing.assert_allclose(quiet(compiled, {"input": X}), X @ W.T + B, rtol=1e-3, atol=1e-4)


def test_static_inference_compiles_one_program() -> None:
    compiled = ml.compile(Model(pretrained_linear()), "numpy", static_inference=True, shapes={"input": [2, 4]})
    compiled({"input": X})
    assert len(compiled.programs) == 1


def test_models_around_a_layer_take_precedence_and_layers_within_layers_count() -> None:
    outer = Model()
    outer += Model(Block(), Relu())
    compiled = ml.compile(outer, "numpy", shapes={"input": [2, 4]})
    np.testing.assert_allclose(quiet(compiled, {"input": X}), np.maximum(X @ W.T + B + 1, 0), rtol=1e-6)
    outer.pretrained = {"model.block.inner.bias": B - 1}
    compiled = ml.compile(outer, "numpy", shapes={"input": [2, 4]})
    np.testing.assert_allclose(quiet(compiled, {"input": X}), np.maximum(X @ W.T + B - 1, 0), rtol=1e-6)


class Wrapper(Layer):
    """A layer that calls a model, of which a model within provides the arrays."""

    def __init__(self) -> None:
        inner = Model(Linear(3))
        inner.pretrained = {"linear.weight": W, "linear.bias": B}
        self.body = Model(inner, Relu())

    def build(self, x: Any) -> Any:
        return self.body(x)


def test_models_called_in_layers_provide_arrays() -> None:
    compiled = ml.compile(Model(Wrapper()), "numpy", shapes={"input": [2, 4]})
    np.testing.assert_allclose(quiet(compiled, {"input": X}), np.maximum(X @ W.T + B, 0), rtol=1e-6)


def test_missing_parameters_are_drawn_and_counted() -> None:
    model = Model(pretrained_linear(), Linear(2))
    compiled = ml.compile(model, "numpy", shapes={"input": [2, 4]})
    assert compiled.params is None
    params = compiled.randomize_params(seed=3)
    np.testing.assert_array_equal(params["linear.weight"], W)
    head = ml.compile(Model(Linear(3), Linear(2)), "numpy", shapes={"input": [2, 4]}).randomize_params(seed=3)
    np.testing.assert_array_equal(params["linear_1.weight"], head["linear_1.weight"])
    with pytest.warns(UserWarning, match="for 2 of 4 parameters"):
        compiled({"input": X})


def test_states_too() -> None:
    model = Model(BatchNorm1d())
    zeros, fours = np.zeros(4, np.float32), np.full(4, 4, np.float32)
    compiled = ml.compile(model, "numpy", shapes={"input": [2, 4]}, inference=True)
    names = {*compiled.randomize_params(), *compiled.initial_state()}
    model.pretrained = {name: fours if "var" in name or "weight" in name else zeros for name in names}
    compiled = ml.compile(model, "numpy", shapes={"input": [2, 4]}, inference=True)
    np.testing.assert_allclose(quiet(compiled, {"input": X}), X * 2, rtol=1e-5)


def test_a_wrong_shape_is_an_error_with_both_shapes() -> None:
    layer = Linear(3)
    layer.pretrained = {"weight": W.T, "bias": B}
    with pytest.raises(ml.ShapeError, match=r"'weight' has shape \[4, 3\], expected \[3, 4\]"):
        ml.compile(layer, "numpy", shapes={"input": [2, 4]})


def test_copies_share_the_arrays_and_the_values_do_not_change_programs() -> None:
    layer = pretrained_linear()
    assert copy.deepcopy(layer).pretrained is layer.pretrained
    other = Linear(3)
    other.pretrained = {"weight": W + 1, "bias": B}
    assert fingerprint(layer) == fingerprint(other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_follow_the_parameters(backend: str) -> None:
    layer = Linear(3)
    layer.pretrained = {"weight": W.astype(np.float64), "bias": B.astype(np.float16)}
    compiled = ml.compile(layer, backend, shapes={"input": [2, 4]})
    expected = X @ W.T + B.astype(np.float16)
    np.testing.assert_allclose(quiet(compiled, {"input": X}), expected, rtol=1e-3, atol=1e-3)


def test_training_starts_from_them() -> None:
    trainer = ml.Trainer(Model(pretrained_linear()), ml.SGD(0.0), loss="mse", backend="numpy", progress=False)
    trainer.fit(ml.DataLoader({"input": X, "target": X @ W.T + B}, batch_size=2), epochs=1)
    np.testing.assert_array_equal(trainer.params["linear.weight"], W)
