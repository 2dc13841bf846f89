"""If and While: static and dynamic choices, loops with invariants, states, expressions."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from mithril.graph.errors import ModelError
from mithril.models import Add, Dropout, Identity, If, IOKey, Layer, Model, Multiply, Negate, Tanh, While
from mithril.models.language.expressions import Expression

spec = importlib.util.spec_from_file_location("model_test_helpers", Path(__file__).with_name("helpers.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
run, graph_of, f32 = helpers.run, helpers.graph_of, helpers.f32


class Counter(Layer):
    """Adds a parameter and counts its calls in a state."""

    def build(self, x):
        self.update_state("count", self.state("count", ()) + 1.0)
        return x + self.param("weight", (x.shape[-1],), "ones")


def choice():
    model = Model()
    model |= Tanh()(input="input", output="h")
    model += If(
        condition="is_training",
        then_branch=Negate()(input="h", output="kept"),
        else_branch=Identity()(input="h", output="kept"),
    )
    model += Multiply()(left="kept", right=2.0, output="output")
    return model


@pytest.mark.parametrize("training", [True, False])
def test_a_choice_at_run_time(training):
    out, _ = run(choice(), {"input": f32(3), "is_training": np.asarray(training)})
    np.testing.assert_allclose(out["output"], np.tanh(f32(3)) * (-2 if training else 2), rtol=1e-6)


def test_inference_leaves_no_choice():
    graph = graph_of(choice(), {"input": f32(3)}, inference=True)
    assert [n.op.name for n in graph.nodes] == ["tanh", "constant", "mul"]
    assert [i.name for i in graph.inputs] == ["input"]


def test_a_constant_decides():
    graph = graph_of(choice(), {"input": f32(3)}, constants={"is_training": True})
    assert [n.op.name for n in graph.nodes] == ["tanh", "neg", "constant", "mul"]


def test_the_training_side_of_a_choice_is_in_training():
    model = Model()
    model += If("is_training", Dropout(0.5), Identity())
    x = np.ones(1000, np.float32)
    for training in (True, False):
        out, _ = run(model, {"input": x, "is_training": np.asarray(training)})
        assert (out["output"] == 0).any() == training


def test_inference_and_training_contradict():
    with pytest.raises(ModelError, match="is_training=True conflicts with inference=True"):
        graph_of(choice(), {"input": f32(3)}, inference=True, constants={"is_training": True})


def test_uncalled_branches_chain_and_hold_parameters():
    model = Model()
    model |= Tanh()
    model += If("n > 2 and not off", Counter(), Identity(), name="choice")
    arguments = {"input": f32(3), "off": np.asarray(False)}
    for n in (1, 5):
        inputs = arguments | {"n": np.int32(n)}
        graph = graph_of(model, inputs)
        assert [i.name for i in graph.with_role("param")] == ["choice.then.counter.weight"]
        out, _ = run(model, inputs)
        np.testing.assert_allclose(out["output"], np.tanh(f32(3)) + (n > 2), rtol=1e-6)
        assert out["state/choice.then.counter.count"] == (n > 2)


def test_a_connection_as_condition():
    x = IOKey("x")
    y = If(x.sum() > 0, Negate()(input="x", output="y"), Identity()(input="x", output="y"))(x=x)
    model = Model.create(outputs={"y": y})
    for sign in (1, -1):
        out, _ = run(model, {"x": np.full(3, sign, np.float32)})
        np.testing.assert_array_equal(out["y"], -np.ones(3))


def test_branches_must_agree():
    with pytest.raises(ModelError) as error:
        If("c", Tanh()(input="x", output="a"), Tanh()(input="x", output="b"))
    assert error.value.what == "If: both branches must have the same outputs"
    assert error.value.facts[:2] == ("then_branch has a", "else_branch has b")


def loop():
    body = Model()
    body |= Multiply()(left="state", right="factor", output="new_state")
    body += Add()(left="new_state", right="input", output="output")
    model = Model()
    model |= Tanh()(input="input", output="initial_state")
    model += While(
        condition="step < max_steps",
        body=body,
        initial_state={"state": "initial_state", "step": 0},
        loop_vars={"state": "new_state", "step": "step + 1"},
        output_vars={"final_state": "state"},
    )(output="final_state")
    model += Negate()(input="final_state", output="output")
    return model


@pytest.mark.parametrize("steps", [0, 3])
def test_a_loop(steps):
    model = loop()
    assert set(model.inputs) == {"input", "max_steps", "factor"}
    out, _ = run(model, {"input": f32(3), "max_steps": np.int32(steps), "factor": np.float32(2)})
    np.testing.assert_allclose(out["output"], -np.tanh(f32(3)) * 2**steps, rtol=1e-6)


def test_a_loop_with_parameters_and_state():
    model = Model()
    model += While(
        "k < 4", Counter()(input="x", output="y"), {"x": "input", "k": 0}, {"x": "y", "k": "k + 1"}, name="w"
    )
    out, params = run(model, {"input": f32(2, 3)})
    assert out["state/w.body.counter.count"] == 4
    np.testing.assert_allclose(out["output"], f32(2, 3) + 4, rtol=1e-6)
    assert "w.body.counter.weight" in params


def test_unknown_loop_variable():
    with pytest.raises(ModelError) as error:
        While("k < 4", Identity(), {"state": "x", "k": 0}, {"stat": "output"})
    assert error.value.what == "While: 'stat' in loop_vars is not a loop variable"
    assert error.value.hint == "did you mean 'state'?"


@pytest.mark.parametrize(
    "text, names, value",
    [
        ("a < b", {"a": 1, "b": 2}, True),
        ("a < b <= 3", {"a": 1, "b": 4}, False),
        ("not (a and b) or c", {"a": True, "b": True, "c": False}, False),
        ("-a // 2 + 7 % 4", {"a": 3}, 1),
        ("a / 2", {"a": 3}, 1.5),
    ],
)
def test_expressions(text, names, value):
    assert Expression(text).value(names) == value
    assert set(Expression(text).names) == set(names)


@pytest.mark.parametrize(
    "text", ["f(x)", "x.y", "x[0]", "x ** 2", "lambda: 1", "a if b else c", "'s'", "x :=", "", "1" * 3000]
)
def test_expressions_outside_of_the_grammar(text):
    with pytest.raises(ModelError) as error:
        Expression(text)
    assert "accepted: names, numbers, + - * / // %, comparisons, and, or, not, parentheses" in error.value.facts


def test_division_by_zero_is_a_model_error():
    with pytest.raises(ModelError, match="divides by zero"):
        Expression("1 // a").value({"a": 0})
