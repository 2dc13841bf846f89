"""Rows and derivatives of models on every backend: values of the NumPy backend, row by row and by differences."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import Dropout, If, Layer, LayerNorm, Linear, Model, Multiply, Negate, Sequential, Sum, Tanh, While

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
T = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)


def scalar() -> Model:
    """Return a model that is written for one row and gives a scalar."""
    model = Model()
    model |= Linear(8)(input="input", output="hidden")
    model |= LayerNorm()(input="hidden", output="normal")
    model |= Tanh()(input="normal", output="active")
    model |= Linear(2)(input="active", output="pair")
    model |= Sum()(input="pair", output="output")
    return model


def run(model, backend, inputs, params=None, **options):
    compiled = ml.compile(model, backend, **options)
    params = compiled.randomize_params(seed=0, inputs=inputs) if params is None else params
    return compiled.evaluate(params, inputs), params


@pytest.fixture(scope="module")
def rows():
    """Return the parameters, and the outputs of one row after the other on NumPy."""
    shapes = {"input": [3]}
    compiled = ml.compile(ml.hessian(scalar(), wrt="input"), "numpy", shapes=shapes)
    params = compiled.randomize_params(seed=0)
    return params, [compiled.evaluate(params, {"input": x}) for x in X]


def test_rows_of_a_model(backend, rows):
    params, expected = rows
    outputs, _ = run(ml.vmap(scalar()), backend, {"input": X}, params)
    np.testing.assert_allclose(outputs["output"], [r["output"] for r in expected], 1e-4, 1e-5)


def test_rows_of_gradients_and_gradients_of_rows(backend, rows):
    params, expected = rows
    slopes = [r["grad/input"] for r in expected]
    outputs, _ = run(ml.vmap(ml.grad(scalar(), wrt="input")), backend, {"input": X}, params)
    np.testing.assert_allclose(outputs["grad/input"], slopes, 1e-4, 1e-4)
    inputs = {"input": X, "grad/output": np.ones(4, np.float32)}
    outputs, _ = run(ml.vjp(ml.vmap(scalar()), wrt="input"), backend, inputs, params)
    np.testing.assert_allclose(outputs["grad/input"], slopes, 1e-4, 1e-4)


def test_forward_mode(backend, rows):
    params, expected = rows
    outputs, _ = run(ml.vmap(ml.jvp(scalar(), wrt="input")), backend, {"input": X, "tangent/input": T}, params)
    slopes = [r["grad/input"] @ t for r, t in zip(expected, T, strict=True)]
    np.testing.assert_allclose(outputs["tangent/output"], slopes, 1e-3, 1e-4)


def test_second_order(backend, rows):
    params, expected = rows
    hessian = np.stack([r["hessian/input"] for r in expected])
    outputs, _ = run(ml.vmap(ml.hessian(scalar(), wrt="input"), size=4), backend, {"input": X}, params)
    np.testing.assert_allclose(outputs["hessian/input"], hessian, 1e-3, 1e-4)
    outputs, _ = run(ml.vmap(ml.hvp(scalar(), wrt="input")), backend, {"input": X, "tangent/input": T}, params)
    np.testing.assert_allclose(outputs["hvp/input"], np.einsum("nij,nj->ni", hessian, T), 1e-3, 1e-4)


def test_an_ensemble_begins_with_models_of_their_own(backend):
    ensemble = ml.vmap(scalar(), in_axes={"input": None, "*.weight": 0, "*.bias": 0}, size=3)
    compiled = ml.compile(ensemble, backend, shapes={"input": [3]})
    params = compiled.randomize_params(seed=5)
    outputs = compiled.evaluate(params, {"input": X[0]})
    one = ml.compile(scalar(), "numpy", shapes={"input": [3]})
    for k in range(3):
        member = one.randomize_params(seed=5 + k)
        np.testing.assert_array_equal(np.asarray(params["linear.weight"])[k], np.asarray(member["linear.weight"]))
        np.testing.assert_allclose(outputs["output"][k], one.evaluate(member, {"input": X[0]})["output"], 1e-4, 1e-5)


def test_rows_drop_elements_of_their_own(python_backend):
    model = ml.vmap(Sequential(Dropout(0.5)))
    compiled = ml.compile(model, python_backend, shapes={"input": [8, 64]})
    x = np.ones((8, 64), np.float32)
    outputs, state = compiled.evaluate({}, {"input": x}, state=compiled.initial_state(), training=True)
    reference = ml.compile(Sequential(Dropout(0.5)), "numpy", shapes={"input": [8, 64]})  # on the whole batch
    expected, _ = reference.evaluate({}, {"input": x}, state=reference.initial_state(), training=True)
    np.testing.assert_array_equal(outputs["output"], expected["output"])
    assert len({row.tobytes() for row in np.asarray(outputs["output"])}) == 8
    assert set(state) == {"rng"}


def test_loops_of_rows_stop_at_their_bounds(backend):
    body = Multiply()(left="s", right=1.5, output="more")
    loop = While("k < rounds", body, {"s": "x", "k": 0}, {"s": "more", "k": "k + 1"}, {"y": "s"}, max_trips=6)
    model = Model()
    model |= loop(x="x", rounds="rounds", y="output")
    x = np.ones((4, 3), np.float32)
    compiled = ml.compile(ml.vmap(model), backend)
    outputs = compiled.evaluate({}, {"x": x, "rounds": np.array([0, 1, 2, 6], np.int32)})
    np.testing.assert_allclose(np.asarray(outputs["output"])[:, 0], 1.5 ** np.array([0, 1, 2, 6]), 1e-6)
    with pytest.raises(ml.InputError, match="max_trips=6"):
        compiled.evaluate({}, {"x": x, "rounds": np.array([0, 1, 2, 7], np.int32)})


def test_a_loop_in_a_branch_runs_for_the_rows_only_that_take_it(python_backend):
    """Rows of the other branch would reach the bound, which raises."""
    body = Multiply()(left="s", right=2.0, output="more")
    loop = While("s < 100", body, {"s": "x"}, {"s": "more"}, {"y": "s"}, max_trips=9)
    model = Model()
    model |= If("x > 0", loop, Negate()(input="x", output="y"))(x="x", y="output")
    compiled = ml.compile(ml.vmap(model), python_backend)
    outputs = compiled.evaluate({}, {"x": np.array([1.0, -1.0, 0.0, 3.0], np.float32)})
    np.testing.assert_allclose(outputs["output"], [128.0, 1.0, 0.0, 192.0])
    with pytest.raises(ml.InputError, match="max_trips=9"):
        compiled.evaluate({}, {"x": np.array([1.0, -1.0, 0.0, 0.001], np.float32)})


class Critic(Layer):
    """Score inputs, and measure how far the slope of the score is from 1."""

    outputs = ("output", "penalty")

    def __init__(self) -> None:
        super().__init__()
        self.critic = Sequential(Linear(8), Tanh(), Linear(1))

    def build(self, input):
        slope = ml.vmap(ml.grad(lambda row: ops.sum(self.critic(row))))(input)
        return self.critic(input), ops.mean(ops.square(ops.sqrt(ops.sum(ops.square(slope), axis=-1)) - 1.0))


def test_training_with_a_gradient_penalty(python_backend):
    def loss(output, penalty, target):
        return ops.mean(ops.square(output - target)) + 10.0 * penalty

    def losses(backend):
        model = Model()
        model |= Critic()(input="input", output="output", penalty="penalty")
        model.set_outputs("output", "penalty")
        loader = ml.DataLoader({"input": X, "target": X[:, :1]}, batch_size=4)
        trainer = ml.Trainer(model, ml.Adam(0.01), loss=loss, backend=backend, progress=False)
        trainer.fit(loader, epochs=3)
        return trainer.history["loss"]

    expected = losses("numpy")
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(losses(python_backend), expected, 1e-3)


def test_training_of_a_transformed_model():
    """Train a model that is written for one row on batches."""
    model = ml.vmap(scalar())
    loader = ml.DataLoader({"input": X, "target": X[:, 0]}, batch_size=4)
    trainer = ml.Trainer(model, ml.Adam(0.05), loss="mse_loss", backend="numpy", progress=False)
    trainer.fit(loader, epochs=20)
    assert trainer.history["loss"][-1] < 0.5 * trainer.history["loss"][0]
