"""Models called on arrays compute at once: the numbers of the compiled model, visible inside ``build``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.graph import MithrilError
from mithril.models import BatchNorm1d, Dropout, If, Layer, Linear, Model, Relu, Sequential

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


class Shown(Layer):
    """A layer that looks at its values."""

    seen: Any = None

    def build(self, x: Any) -> Any:
        h = x * 2.0
        type(self).seen = np.asarray(h), repr(h)
        return h.shape[0] * h


def test_a_call_returns_the_numbers_of_the_compiled_model() -> None:
    model = Model(Linear(8), BatchNorm1d(), Dropout(0.5), Relu(), Linear(2))
    compiled = ml.compile(model, "numpy", shapes={"input": [3, 4]})
    expected = compiled.evaluate(compiled.randomize_params(0), {"input": X})["output"]
    np.testing.assert_allclose(model(X), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model(input=X), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", sorted(ml.plugins.backends()))
def test_a_call_computes_on_a_backend(backend: str) -> None:
    model = Model(Linear(8), BatchNorm1d(), Dropout(0.5), Shown(), Linear(2))
    compiled = ml.compile(model, backend, shapes={"input": [3, 4]})
    expected = compiled.evaluate(compiled.randomize_params(0), {"input": X})["output"]
    actual = model(X, backend=backend)
    assert type(actual) is type(expected)
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(Shown.seen[0] * 3, np.asarray(Shown()(Shown.seen[0] / 2, backend=backend)), rtol=1e-5)


def test_arguments_of_a_call_on_a_backend() -> None:
    with pytest.raises(ml.PluginError, match="did you mean 'torch'" if "torch" in ml.plugins.backends() else "unknown"):
        Linear(2)(X, backend="torhc")
    with pytest.raises(ml.OptionError, match=r"backend: expected .*, got 3 \(int\)"):
        Linear(2)(X, backend=3)
    with pytest.raises(ml.ModelError, match="has no terminal 'backend'"):
        Linear(2)("x", backend="numpy")
    model = Model()
    model |= Linear(2)(input="backend", output="y")
    assert model(backend=X).shape == (3, 2)
    flagged = Model()
    flagged |= Linear(4)(input="x", output="h")
    flagged += If("is_training", Dropout(0.5)(input="h", output="y"), Relu()(input="h", output="y"))
    assert flagged(X).min() == 0.0


def test_pretrained_values_are_used_and_values_are_visible() -> None:
    layer = Linear(2)
    layer.pretrained = {"weight": np.ones((2, 4), np.float32), "bias": np.zeros(2, np.float32)}
    np.testing.assert_allclose(layer(X), X.sum(1, keepdims=True).repeat(2, 1), rtol=1e-5)
    np.testing.assert_allclose(Shown()(X), X * 6, rtol=1e-6)
    array, text = Shown.seen
    np.testing.assert_array_equal(array, X * 2)
    assert str(array) in text


def test_several_outputs_and_errors() -> None:
    model = Model()
    model |= Relu()(input="x", output="a")
    model |= Linear(2)(input="x", output="b")
    model.set_outputs("a", "b")
    results = model(x=X)
    assert set(results) == {"a", "b"} and results["b"].shape == (3, 2)
    with pytest.raises(MithrilError):
        Linear(2)(np.array([object()]))
    connection = Relu()("x")
    assert not isinstance(connection, np.ndarray)


@pytest.mark.parametrize("call", [lambda c, params: c.bind(params), lambda c, params: c.evaluate(params, {"input": X})])
def test_states_among_parameters_are_sent_to_their_place(call: Any) -> None:
    compiled = ml.compile(Sequential(Linear(3), BatchNorm1d()), "numpy", shapes={"input": ["B", 4]})
    values = {**compiled.randomize_params(), **compiled.initial_state()}
    with pytest.raises(ml.InputError, match=r"hint: '1.running_mean' is a state, not a parameter: pass it in state="):
        call(compiled, values)


def test_parameters_in_the_place_of_inputs() -> None:
    compiled = ml.compile(Linear(3), "numpy", shapes={"input": ["B", 4]})
    with pytest.raises(ml.InputError, match=r"hint: evaluate\(params, inputs\) takes parameters"):
        compiled(compiled.randomize_params(), {"input": np.ones((2, 4))})


def test_the_only_input_of_a_layer_has_one_name() -> None:
    class Doubled(Layer):
        def build(self, x: Any) -> Any:
            return x * 2.0

    hint = r"hint: the only input of a layer is 'input'; inputs = \('x',\) in the class renames it"
    with pytest.raises(ml.OptionError, match=hint):
        ml.compile(Doubled(), "numpy", shapes={"x": [2]})
    with pytest.raises(ml.InputError, match=hint):
        ml.compile(Doubled(), "numpy", shapes={"input": [2]}).evaluate({}, {"x": np.ones(2, np.float32)})
