"""Mistakes in wiring: each message whole, naming the layer and the user's line."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from mithril import ops
from mithril.graph.errors import DTypeError, MithrilError, ModelError, OperationError, ShapeError
from mithril.models import (
    LSTM,
    Add,
    BatchNorm2d,
    Conv2d,
    Dropout,
    IOKey,
    Layer,
    Linear,
    Model,
    Negate,
    Relu,
    Sequential,
    Tanh,
)
from mithril.models.language.flatten import flatten

spec = importlib.util.spec_from_file_location("model_test_helpers", Path(__file__).with_name("helpers.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
graph_of, f32, line_of = helpers.graph_of, helpers.f32, helpers.line_of


def message(error, test):
    """Replace this file by FILE and make line numbers relative to the test."""
    import re

    first = line_of(test, "def ")
    text = str(error.value).replace(__file__, "FILE")
    return re.sub(r"FILE:(\d+)", lambda m: f"FILE+{int(m[1]) - first}", text)


APART = "create the expression once for each, as in a function: it belongs to the first model that uses it"


def test_unknown_terminal():
    with pytest.raises(ModelError) as error:
        Tanh()(inptu="x")
    assert message(error, test_unknown_terminal) == (
        "Tanh() has no terminal 'inptu'\n  at FILE+2\n  terminals: input, output\nhint: did you mean 'input'?"
    )


def test_two_producers():
    model = Model()
    model |= Tanh()(input="x", output="h")
    with pytest.raises(ModelError) as error:
        model |= Negate()(input="x", output="h")
    assert message(error, test_two_producers) == (
        "'h' has two producers\n"
        "  layer 'tanh' at FILE+2\n"
        "  layer 'negate' at FILE+4\n"
        "hint: give the second output another name"
    )


def test_reading_and_writing_without_in_place():
    model = Model()
    with pytest.raises(ModelError) as error:
        model |= Negate()(input="x", output="x")
    assert message(error, test_reading_and_writing_without_in_place) == (
        "layer 'negate' reads and writes 'x'\n  at FILE+3\nhint: give the output another name, or set in_place=True"
    )


def test_cycle():
    model = Model()
    model |= Tanh(name="a")(input="q", output="p")
    model |= Negate(name="b")(input="p", output="q")
    with pytest.raises(ModelError) as error:
        flatten(model)
    assert message(error, test_cycle) == (
        "cyclic dependency between layers: 'b' -> 'a' -> 'b'\n"
        "  layer 'b' at FILE+3\n"
        "  layer 'a' at FILE+2\n"
        "hint: rename one of the outputs, or use While for a loop"
    )


def test_two_layers_of_one_name():
    model = Model()
    model |= Tanh(name="a")
    with pytest.raises(ModelError) as error:
        model += Negate(name="a")
    assert message(error, test_two_layers_of_one_name) == (
        "two layers are named 'a'\n  Tanh() at FILE+2\n  Negate() at FILE+4"
    )


def test_unknown_output():
    model = Model()
    model |= Tanh()(input="x", output="hidden")
    with pytest.raises(ModelError) as error:
        flatten(model, outputs=["hiden"])
    assert message(error, test_unknown_output) == (
        "the model has no terminal 'hiden'\n  at FILE+4\n  terminals: x, hidden\nhint: did you mean 'hidden'?"
    )


def test_declared_inputs_are_all_there_are():
    model = Model.create(inputs=IOKey("x"), outputs=Tanh()(IOKey("x")))
    with pytest.raises(ModelError) as error:
        model |= Negate()(input="y")
    assert (
        message(error, test_declared_inputs_are_all_there_are) == "there is no terminal 'y'\n  at FILE+3\n  inputs: x"
    )


def test_wrong_constructor_argument():
    with pytest.raises(ModelError) as error:
        Linear(dimention=64)
    assert message(error, test_wrong_constructor_argument) == (
        "Linear has no argument 'dimention'\n"
        "  at FILE+2\n"
        "  accepted: features, dimension, bias, init, name\n"
        "hint: did you mean 'dimension'?"
    )


def test_dimension_and_position_disagree():
    with pytest.raises(ModelError) as error:
        Linear(128, 10, dimension=64)
    assert message(error, test_dimension_and_position_disagree) == (
        "Linear: dimension=64 conflicts with the positional features\n"
        "  got 128, 10: the last one is the output size\n"
        "  in Linear at FILE+2\n"
        "hint: pass the output size only once"
    )
    assert Linear(128, 10, dimension=10).out_features == 10


def test_wrong_rank():
    model = Model()
    model |= Conv2d(3, 4, kernel_size=3)
    with pytest.raises(ShapeError) as error:
        graph_of(model, {"input": f32(8, 8)})
    assert message(error, test_wrong_rank) == (
        "the input has rank 2, expected 3 or 4\n  input f32[8, 8]\n"
        "  expected [N, C, H, W] or [C, H, W]\n  layer 'conv2d' at FILE+2"
    )


def test_wrong_in_size():
    model = Model()
    model += BatchNorm2d(64)
    with pytest.raises(ShapeError) as error:
        graph_of(model, {"input": f32(1, 3, 8, 8)})
    assert message(error, test_wrong_in_size) == (
        "the input has 3 channels, but the layer was created for 64\n"
        "  input f32[1, 3, 8, 8]\n  layer 'batch_norm2d' at FILE+2"
    )
    with pytest.raises(ShapeError, match=r"hint: channels are axis 1 here, .* np.moveaxis\(x, -1, 1\)"):
        graph_of(model, {"input": f32(1, 8, 8, 64)})


def test_declared_shape_and_dtype_are_checked():
    model = Model()
    model |= Tanh()(input=IOKey("x", shape=["B", 4], dtype="float32"), output=IOKey("y", shape=["B", 3]))
    with pytest.raises(ShapeError) as error:
        graph_of(model, {"x": f32(2, 4)})
    assert message(error, test_declared_shape_and_dtype_are_checked) == (
        "'y' has the shape [2, 4], declared as [B, 3]\n  declared at FILE+2\n"
        "hint: declare a size that differs between calls as None or a name; importers have dynamic_shapes= for it"
    )
    with pytest.raises(DTypeError, match="Type mismatch: expected float32, got float64"):
        graph_of(model, {"x": np.zeros((2, 3))})


def test_missing_type():
    model = Model()
    model |= Tanh()(input="hidden_1")
    with pytest.raises(ShapeError) as error:
        graph_of(model, {})
    assert message(error, test_missing_type) == (
        "Cannot infer shape for tensor 'hidden_1'\n"
        "  read by layer 'tanh' at FILE+2\n"
        "hint: pass shapes={'hidden_1': [...]}"
    )


def test_a_connection_of_another_model():
    first, second = Model(), Model()
    first |= Tanh()(input="x", output="h")
    with pytest.raises(ModelError) as error:
        second |= Add()(left=first["h"], right="y")
    assert message(error, test_a_connection_of_another_model) == (
        "layer 'add' already belongs to another model\n"
        "  created at FILE+4\n"
        "  it reads 'h' of that model, created at FILE+2\n"
        f"hint: {APART}"
    )


def test_an_expression_of_two_models():
    expression = IOKey("x").exp()
    first, second = Model(), Model()
    first |= Tanh()(input=expression, output="h")
    with pytest.raises(ModelError) as error:
        second |= Tanh()(input=expression, output="h")
    assert message(error, test_an_expression_of_two_models) == (
        "'h' has two producers\n"
        "  layer 'tanh' at FILE+3\n"
        "  layer 'tanh_1' at FILE+5\n"
        "  it reads 'exp.output' of that model, created at FILE+1\n"
        f"hint: give the second output another name; for two models, {APART}"
    )


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: Linear(0), "Linear: features must be a positive int, got 0"),
        (lambda: Linear(), "Linear needs its number of features"),
        (lambda: Conv2d(3, 4), "Conv2d needs kernel_size"),
        (lambda: Conv2d(3, 4, kernel_size=3, groups=2), "Conv2d: groups=2 does not divide the 3 in-channels"),
        (lambda: Dropout(1.5), "Dropout: p must be at least 0 and less than 1, got 1.5"),
        (lambda: IOKey("x", shape=[2.5]), "'x' cannot have the size 2.5"),
        (lambda: Tanh()(3j), "input 'input' of Tanh() cannot be a complex"),
        (lambda: Tanh()("a", "b"), "Tanh() takes 1 input, got 2"),
        (lambda: Tanh()("a", input="b"), "Tanh() got its input 'input' twice"),
        (lambda: Tanh().set_attribute("a b", 1), "'a b' cannot name an attribute"),
        (lambda: Model() + 1, None),
    ],
)
def test_arguments(make, text):
    with pytest.raises((MithrilError, TypeError)) as error:
        make()
    if text is not None:
        assert isinstance(error.value, MithrilError)
        assert error.value.what == text


def test_a_model_cannot_contain_itself():
    inner, outer = Model(), Model()
    inner |= Tanh()
    outer |= inner
    inner |= outer
    with pytest.raises(ModelError, match="contains itself"):
        flatten(outer)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "a NoneType cannot be compiled\n  accepted: a model, or a single layer"),
        (
            lambda x: x,
            (
                "a function cannot be compiled\n  accepted: a model, or a single layer\n"
                "hint: call it in the build method of a layer: class Network(Layer): def build(self, x): ..."
            ),
        ),
        (int, "the class int cannot be compiled\n  accepted: a model, or a single layer"),
        (
            Tanh,
            (
                "the class Tanh cannot be compiled\n"
                "  accepted: a model, or a single layer\nhint: create an instance: Tanh(...)"
            ),
        ),
    ],
)
def test_non_models_are_rejected(value, text):
    with pytest.raises(ModelError) as error:
        flatten(value)
    assert str(error.value) == text


def layer_of(body):
    class Mistaken(Layer):
        def build(self, x):
            return body(x)

    return Mistaken()


def _assigned(x):
    x[0] = 1.0
    return x


MANY = "hint: a layer such as LSTM returns several values: output, *states = layer(x)"
BUILDS = {
    "several values for one input": (
        lambda x: Dropout(0.1)(LSTM(4)(x)),
        f"Dropout(0.1) takes 1 input, got 3\n  inputs: input\n{MANY}",
    ),
    "too few inputs": (lambda x: Add()(x), "Add() lacks its input 'right'\n  inputs: left, right"),
    "no inputs": (
        lambda x: Linear(2)(),
        (
            "Mistaken() returned a connection without a value, <Connection 'linear.output' from linear>\n"
            "hint: within build, call layers on values: Linear(2)(x)"
        ),
    ),
    "no result": (lambda x: None, "Mistaken() returned None instead of a value\nhint: end build with return"),
}


@pytest.mark.parametrize(("body", "text"), BUILDS.values(), ids=BUILDS)
def test_mistakes_in_build(body, text):
    with pytest.raises(ModelError) as caught:
        graph_of(layer_of(body), {"input": f32(4, 5, 3)})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (np.tanh, "use mithril.ops, such as ops.tanh(x)"),
        (float, "use mithril.ops, such as ops.tanh(x)"),
        (lambda x: LSTM(4)(x)[:, -1], "output, *states = layer(x)"),
        (lambda x: LSTM(4)(x).shape, "output, *states = layer(x)"),
        (_assigned, "use x = scatter(x, rows, updates), dynamic_update_slice() or where()"),
    ],
)
def test_values_are_symbolic(body, text):
    with pytest.raises((TypeError, AttributeError)) as caught:
        graph_of(layer_of(body), {"input": f32(4, 5, 3)})
    assert text in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda x: ops.normal(shape=x.shape), "missing: key"),
        (lambda x: ops.normal(x.shape), "needs the attribute 'shape' (Shape)\n  arguments: key, shape, dtype"),
        (lambda x: ops.normal(x.shape, x.shape), "a random key"),
        (lambda x: ops.dropout(x, p=0.5), "missing: key"),
    ],
)
def test_random_operations_without_a_key(body, text):
    with pytest.raises(OperationError) as caught:
        graph_of(layer_of(body), {"input": f32(4, 5, 3)})
    assert text in str(caught.value)
    assert "hint: a random key is self.key() in a layer, step.key() in train_step" in str(caught.value)


def test_layers_of_a_sequence_have_their_names():
    head = Linear(2, name="head")
    net = Sequential(Linear(4), Relu(), head, Relu(), head)
    assert {name for name, _ in net.walk()} == {"0", "1", "head", "3"}
    assert net.find("head") == {"head": head}
    with pytest.raises(ModelError, match="two layers are named 'head'"):
        Sequential(head, Linear(3, name="head"))


def test_a_class_of_models_has_no_build():
    with pytest.raises(ModelError) as caught:

        class Network(Model):
            def forward(self, x):
                return x

    assert str(caught.value) == (
        "class Network has a method 'forward', which models do not call: they are made of layers\n"
        "hint: class Network(Layer) with build(self, x) computes with operations and layers"
    )


@pytest.mark.parametrize(
    ("name", "hint"), [("forward", "rename its method 'forward' to build"), ("compute", "define build(self, ...)")]
)
def test_a_layer_without_build(name, hint):
    layer = type("Network", (Layer,), {name: lambda self, x: x})()
    with pytest.raises(ModelError) as caught:
        layer(np.ones(3, np.float32))
    assert f"Network has no build method\nhint: {hint}" in str(caught.value)


@pytest.mark.parametrize(("result", "shown"), [("text", "str"), ({"output": b"x"}, "bytes"), ((1.0, {2.0}), "set")])
def test_results_of_other_types(result, shown):
    class Wrong(Layer):
        outputs = ("output",) if not isinstance(result, tuple) else ("one", "two")

        def build(self, x):
            return result

    with pytest.raises(ModelError, match=f"returned a {shown} instead of a value"):
        graph_of(Model(Wrong()), {"input": f32(2)})
