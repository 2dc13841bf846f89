"""Names people write: a misspelled connection is reported as such; values have the methods of connections."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import Layer, Linear, Model

X = np.ones((5, 4), np.float32)
LABELS = np.zeros(5, np.int32)


def misspelled():
    model = Model()
    model |= Linear(4, name="first")(input="x", output="hidden")
    model |= Linear(3, name="second")(input="hiden", output="y")
    return model


def trainer():
    return ml.Trainer(misspelled(), ml.Adam(), loss="cross_entropy", backend="numpy", progress=False)


@pytest.mark.parametrize(
    "use",
    [
        lambda: ml.compile(misspelled(), "numpy", shapes={"x": [5, 4]}).randomize_params(),
        lambda: ml.compile(misspelled(), "numpy").evaluate({}, {"x": X}),
        lambda: trainer().step({"x": X, "target": LABELS}),
        lambda: trainer().step((X, LABELS)),
    ],
)
def test_misspelled_connection_is_reported(use):
    with pytest.raises(ml.MithrilError, match="no layer produces 'hiden'; did you mean 'hidden'"):
        use()


def test_inputs_of_other_names_get_the_usual_remedy():
    model = Model()
    model |= Linear(3)(input="tokens", output="y")
    model |= ml.models.Add()(left="y", right="other", output="z")
    with pytest.raises(ml.ShapeError, match=r"hint: pass it to ml.compile, shapes={'other'"):
        ml.compile(model, "numpy", shapes={"tokens": [5, 4]}).randomize_params()


def test_values_inside_of_build_have_methods(backend):
    class Methods(Layer):
        def build(self, x):
            return x.reshape(2, -1).T.astype("float32").relu().sum(axis=1) + x.mean() * x.max()

    model = Model()
    model |= Methods()(input="x", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [4, 3]})
    x = np.arange(12, dtype=np.float32).reshape(4, 3) - 5
    expected = np.maximum(x.reshape(2, -1).T, 0).sum(1) + x.mean() * x.max()
    np.testing.assert_allclose(compiled.backend.to_numpy(compiled({"x": x})["y"]), expected, rtol=1e-6)
    with (
        ml.Builder() as builder,
        pytest.raises(AttributeError, match="unknown operation 'rellu'(?s:.)*did you mean 'relu'"),
    ):
        builder.input("x", (3,)).rellu()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (X, LABELS, LABELS),
            r"compares the output with one target, but 2 columns(?s:.)*def loss\(output, target, target_1\)",
        ),
        ({"input": X, "label": LABELS, "weight": LABELS}, r"2 columns are no inputs of the model: label, weight"),
        ({"inputt": X, "target": LABELS}, "rename the column 'inputt' to 'input'"),
        ({"input": X}, "the batch has no target"),
        ({"input": X, 3: LABELS}, "columns of a batch are named by strings, got 3"),
    ],
)
def test_columns_that_do_not_fit_are_named(batch, message):
    model = Model()
    model += Linear(3)(input="input")
    trainer = ml.Trainer(model, ml.Adam(), loss="cross_entropy", backend="numpy", progress=False)
    with pytest.raises(ml.MithrilError, match=message):
        trainer.step(batch)


def test_trainable_input_among_the_parameters_is_reported():
    model = Model()
    model |= ml.models.MatMul()(left="x", right="w", output="y")
    compiled = ml.compile(model, "numpy", shapes={"x": [5, 4], "w": [4, 4]}, trainable=["w"])
    with pytest.raises(ml.InputError, match="(?s)missing: 'w'.*move it from the parameters to the inputs"):
        compiled.evaluate({"w": X[:4]}, {"x": X})
    np.testing.assert_array_equal(compiled.evaluate({}, {"x": X, "w": X[:4]})["y"], X @ X[:4])


def test_state_goes_in_and_out_of_a_call(backend):
    model = Model()
    model += ml.models.BatchNorm1d(name="norm")(input="x")
    compiled = ml.compile(model, backend, shapes={"x": [5, 4]})
    params, inputs = compiled.randomize_params(0), {"x": X}
    outputs, state = compiled.evaluate(params, inputs, state=compiled.initial_state(), training=True)
    assert list(outputs) == ["output"]
    np.testing.assert_allclose(compiled.backend.to_numpy(state["norm.running_mean"]), np.full(4, 0.1), rtol=1e-5)
