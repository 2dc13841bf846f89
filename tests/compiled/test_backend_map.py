"""``backend_map``: parts of a model on another backend, forward and gradients, as if it were one."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops, plugins
from mithril.models import Dropout, Layer, Linear, Model, Relu, Tanh

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
ONES = {"output": np.ones((4, 3), np.float32)}


def net(where="other"):
    model = Model()
    model |= Linear(8, name="first")(input="x", output="hidden1")
    model += Relu(name="act1")(input="hidden1", output="hidden1_act")
    middle = Linear(8, name="middle")
    if where:
        middle.set_attribute("backend", where)
    model += middle(input="hidden1_act", output="hidden2")
    model += Relu(name="act2")(input="hidden2", output="hidden2_act")
    model += Linear(3, name="last")(input="hidden2_act", output="output")
    return model


def backend_of(name):
    return plugins.backend_class(name)()


@pytest.mark.parametrize("other", ["numpy", "torch", "jax", "mlx"])
def test_results_and_gradients_are_those_of_one_backend(backend, other):
    if other not in plugins.backends():
        pytest.skip("not installed")
    plain = ml.compile(net(None), backend, shapes={"x": ["B", 6]})
    mixed = ml.compile(net(), backend, shapes={"x": ["B", 6]}, backend_map={"other": backend_of(other)})
    params = plain.randomize_params(0)
    expected, slopes = plain.evaluate(params, {"x": X}, ONES)
    outputs, gradients = mixed.evaluate(params, {"x": X}, ONES)
    to_numpy = plain.backend.to_numpy
    assert mixed.backend.is_array(outputs["output"])
    np.testing.assert_allclose(to_numpy(outputs["output"]), to_numpy(expected["output"]), rtol=1e-4, atol=1e-5)
    for name in slopes:
        assert mixed.backend.is_array(gradients[name])
        np.testing.assert_allclose(
            to_numpy(gradients[name]), to_numpy(slopes[name]), rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("other", ["numpy", "torch", "jax"])
def test_training_equals_that_of_one_backend(backend, other):
    """Steps overwrite parameters in place, which the other backend and the evaluation have to read again."""
    if other not in plugins.backends():
        pytest.skip("not installed")
    y, results = np.cos(np.arange(12.0, dtype=np.float32)).reshape(4, 3), []
    for options in ({}, {"backend_map": {"other": backend_of(other)}}):
        model = net("other" if options else None)
        trainer = ml.Trainer(model, ml.SGD(0.5), loss="mse", backend=backend, progress=False, **options)
        trainer.fit(X, y, epochs=3, batch_size=2, shuffle=False)
        results.append(
            [trainer.evaluate((X, y))["loss"], *(trainer.params[f"{n}.weight"] for n in ("first", "middle"))]
        )
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(*map(ml.NumpyBackend().to_numpy, (actual, expected)), rtol=1e-4, atol=1e-5)


def test_the_graph_is_cut_as_seldom_as_possible():
    mixed = ml.compile(net(), "numpy", shapes={"x": [4, 6]}, backend_map={"other": ml.NumpyBackend()})
    executable = mixed.programs[0].executable
    assert len(executable._pieces) == 3
    assert executable.source.count("def forward(params, inputs):") == 3


def test_fusion_stays_on_its_side_of_the_border():
    """The activation after the layer that is elsewhere is not drawn there with it."""
    mixed = ml.compile(net(), "numpy", shapes={"x": [4, 6]}, backend_map={"other": ml.NumpyBackend()})
    kinds = {n.origin.path: n.attributes.get("activation") for n in mixed.graph.nodes if n.op.name == "linear"}
    assert kinds["first"] == "relu" and kinds["middle"] == "none"


def test_state_and_randomness_cross_the_border():
    def model(where):
        m = Model()
        m |= Linear(8, name="first")(input="x", output="h")
        drop = Dropout(0.5, name="drop")
        if where:
            drop.set_attribute("backend", where)
        m |= drop(input="h", output="output")
        return m

    plain = ml.compile(model(None), "numpy", shapes={"x": [4, 6]})
    mixed = ml.compile(model("o"), "numpy", shapes={"x": [4, 6]}, backend_map={"o": ml.NumpyBackend()})
    params = plain.randomize_params(0)
    state = plain.initial_state()
    for _ in range(2):
        a, sa = plain.evaluate(params, {"x": X}, state=state, training=True)
        b, sb = mixed.evaluate(params, {"x": X}, state=state, training=True)
        np.testing.assert_array_equal(a["output"], b["output"])
        for name in sa:
            np.testing.assert_array_equal(sa[name], sb[name])
        state = sa


class Positions(Layer):
    """Numbers of the rows, from their count alone."""

    def build(self, x):
        return ops.iota(shape=(x.shape[0], 1), dtype=ml.float32)


def test_parts_know_sizes_of_values_that_they_do_not_read(backend):
    positions = Positions().set_attribute("backend", "other")
    x = ml.IOKey("x")
    model = Model.create(inputs=x, output=positions(x) + Tanh()(x))
    mixed = ml.compile(model, backend, shapes={"x": ["B", 6]}, backend_map={"other": ml.NumpyBackend()})
    output = mixed.backend.to_numpy(mixed.evaluate({}, {"x": X})["output"])
    np.testing.assert_allclose(output, np.arange(4.0)[:, None] + np.tanh(X), rtol=1e-6)


def test_mistakes():
    with pytest.raises(ml.OptionError, match="unknown backend 'othr' in backend_map") as error:
        ml.compile(net("othr"), "numpy", shapes={"x": [4, 6]}, backend_map={"other": ml.NumpyBackend()})
    assert "layer 'middle'" in str(error.value) and "did you mean 'other'?" in str(error.value)
    with pytest.raises(ml.OptionError) as error:
        compiled = ml.compile(
            net(), "numpy", shapes={"x": [4, 6]}, backend_map={"other": ml.NumpyBackend()}, autodiff="native"
        )
        compiled.evaluate(compiled.randomize_params(0), {"x": X}, ONES)
    assert str(error.value) == (
        "autodiff='native' requires a single backend, but backend_map names others\n"
        "hint: omit backend_map, or omit autodiff"
    )
