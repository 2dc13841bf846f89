"""Models as dictionaries and JSON: the same programs return, bad files raise errors, and no text of a file runs."""

from __future__ import annotations

import json
import random
import re
import sys
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest

import mithril as ml
from mithril import MithrilError, ModelError, ops
from mithril.graph.dtypes import ALL
from mithril.models import (
    MLP,
    Cast,
    Concat,
    Conv2d,
    CrossEntropy,
    Dropout,
    Embedding,
    Flatten,
    If,
    IOKey,
    Layer,
    Linear,
    Model,
    MultiHeadAttention,
    Relu,
    Residual,
    Sequential,
    TransformerEncoder,
    WeightNorm,
    While,
    Wrapper,
    flatten,
    hook,
)
from mithril.models.language.trace import trace_model


class Scaled(Layer):
    """A layer of the user."""

    def __init__(self, factor, kernel=(1, 2)):
        self.factor = factor
        self.kernel = kernel

    def build(self, x):
        return x * self.factor


def program(model, shapes):
    """Return the traced program as text."""
    flat = flatten(model)
    kinds = {d.name: d.dtype or ml.float32 for d in flat.inputs}
    types = {name: ml.TensorType(kinds[name], tuple(shape)) for name, shape in shapes.items()}
    return re.sub(r" @ \S+", "", str(trace_model(flat, types)))


def restored(model, layers=(), **shapes):
    """Return the model read from its JSON, after the check that writing and tracing it again give the same texts."""
    text = model.to_json()
    again = type(model).from_json(text, layers)
    assert again.to_json() == text
    assert json.loads(json.dumps(model.to_dict())) == json.loads(text)
    assert program(again, shapes) == program(model, shapes)
    assert [path for path, _ in again.walk()] == [path for path, _ in model.walk()]
    return again


def chain():
    model = Model(name="chain")
    model |= Conv2d(3, 4, kernel_size=3, padding="same", name="conv")(input="image")
    model += Relu()
    model += Flatten()
    model += Linear(10, bias=False)(output=IOKey("logits", expose=True, shape=["N", 10]))
    return model


def test_arguments_names_and_connections_return():
    again = restored(chain(), image=[2, 3, 4, 4])
    assert again.name == "chain"
    assert again.inputs == ("image",)
    assert again.outputs == ("logits",)
    assert repr(again.find("conv")["conv"]) == repr(chain().find("conv")["conv"])
    again |= Linear(3)(input="logits", output="more")
    assert [step.name for step in again.steps][-1] == "linear_1"


def test_operations_indices_and_sizes_return():
    x, table = IOKey("x", shape=["B", 4, 6]), IOKey("t", trainable=True, shape=[4, 6], init="normal(std=0.5)")
    y = (x + table)[:, 1:3, None, ::-1].reshape(x.shape[0] * 2, *x.shape[2:3]) @ np.ones((6, 2), np.float32)
    z = ops.where(y > 0.0, y, -1.0e30) / y.shape[-1] ** 2
    model = Model.create(inputs=x, outputs={"z": ops.cast(z, dtype="float64"), "y": y})
    array = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)
    again = restored(model, x=[3, 4, 6])
    for name, value in model(array).items():
        np.testing.assert_array_equal(again(array)[name], value)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_arrays_of_every_dtype_return(dtype):
    constant = np.array([[1, 0], [0, 1]]).astype(dtype.numpy)
    model = Model.create(outputs={"y": ops.equal(IOKey("x"), constant)})
    assert restored(model, x=[2, 2])(constant).all()


def test_declared_shapes_dims_and_defaults_return():
    key = IOKey("x", shape=[ml.Dim("B", 1, 8), None], dtype="int32")
    model = Model.create(
        inputs=[key, IOKey("scale", default=float("inf"))], outputs=Embedding(9, 4)(key) * IOKey("scale")
    )
    again = restored(model, x=[5, 2])
    assert str(again.connections["x"].key.shape_declared) == str(key.shape_declared)
    assert again.optional == ("scale",)


def test_shared_layers_stay_shared():
    encoder, shared = MLP([4, 3]), Linear(5)
    model = Model.create(left=encoder(IOKey("a")), right=encoder(IOKey("b")), third=Residual(shared)(IOKey("c")))
    model |= shared(input="d", output="fourth")
    model.set_outputs("left", "right", "third", "fourth")
    again = restored(model, a=[2, 3], b=[2, 3], c=[2, 5], d=[2, 5])
    layers = [step.layer for step in again.steps]
    assert layers[0] is layers[1]
    assert layers[2].block is layers[3]


def test_layer_inside_another_layer_stays_shared():
    inner = MLP([4, 3])
    model = Model()
    model |= inner(input="a", output="x")
    model |= inner.layers[0](input="b", output="y")
    again = restored(model, a=[2, 3], b=[2, 3])
    assert again.steps[0].layer.layers[0] is again.steps[1].layer

    encoder = TransformerEncoder(3, 8, heads=2)
    encoder.layers = [encoder.layers[0]] * 3  # as in ALBERT
    again = restored(encoder, input=[2, 5, 8])
    assert again.layers[0] is again.layers[2]


def test_separated_layers_stay_separate():
    class Tied(Layer):
        def __init__(self):
            self.first = self.second = Linear(3)

        def build(self, x):
            return self.second(self.first(x))

    layer = Tied()
    layer.second = Linear(3)
    again = Tied.from_json(layer.to_json(), [Tied])
    assert again.first is not again.second


def test_tags_and_frozen_parameters_return():
    layer = MLP([3, 2])
    layer.layers[1].set_attribute("stage", 1)
    layer.freeze("layers.0.*", "*.bias")
    again = restored(layer, input=[2, 3])
    assert (again.layers[1].tags, again.frozen) == ({"stage": 1}, ("layers.0.*", "*.bias"))


def test_connections_are_checked():
    data = chain().to_dict()
    steps = data["layers"][-1]["steps"]
    with pytest.raises(ModelError, match="has two producers"):
        Model.from_dict(damaged(data, ["steps", 1, "results", "output"], steps[0]["results"]["output"]))
    with pytest.raises(ModelError, match="two layers are named 'conv'"):
        Model.from_dict(damaged(data, ["steps", 1, "name"], "conv"))
    with pytest.raises(ModelError, match=r"unknown terminal 'inputs'(.|\n)*did you mean 'input'"):
        Model.from_dict(damaged(data, ["steps", 1, "bindings"], {"inputs": 0}))
    with pytest.raises(ModelError, match="terminal 'input' of Relu.* is not connected"):
        Model.from_dict(damaged(data, ["steps", 1, "bindings"], {}))
    with pytest.raises(ModelError, match="no layer and no input provides 'image'"):
        Model.from_dict(damaged(data, ["inputs"], {}))


def damaged(data, path, value):
    """Return a copy of the data with another value at this path of the last entry."""
    data = deepcopy(data)
    target = data["layers"][-1]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return data


def test_replaced_layers_return():
    model = Model()
    model |= TransformerEncoder(2, 8, heads=2)(input="x", output="y")
    model.replace("*.0.self_attn", lambda old: Wrapper(WeightNorm(Linear(8))) if old is None else Wrapper(old))
    model.replace("*.linear2", lambda old: WeightNorm(old))
    again = restored(model, x=[2, 5, 8])
    assert {type(layer).__name__ for layer in again.find("*.linear2").values()} == {"WeightNorm"}


def test_branches_and_loops_return():
    model = Model()
    model |= Linear(4)(input="x", output="h")
    model |= If("is_training", Dropout(0.5)(input="h", output="d"), Sequential(Relu())(input="h", output="d"))
    model |= While("i < n", Scaled(0.5)(input="v", output="w"), {"i": 0, "v": "d"}, {"i": "i + 1", "v": "w"},
                   {"out": "v"}, max_trips=5)(out="out")  # fmt: skip
    model.set_outputs("out")
    again = restored(model, [Scaled], x=[2, 3], is_training=[], n=[])
    assert again.inputs == model.inputs
    assert again.outputs == ("out",)


def test_condition_that_is_a_connection_returns():
    x = IOKey("x", shape=[3])
    model = Model()
    model |= If(ops.sum(x) > 0.0, Relu()(input="x", output="y"), Scaled(2)(input="x", output="y"))
    restored(model, [Scaled], x=[3])


def test_names_used_before_they_are_produced_return():
    model = Model()
    model |= Linear(4)(input="h", output="out")
    model |= Linear(3)(input="x", output="h")
    assert restored(model, x=[2, 5]).inputs == ("x",)


def test_tags_weights_and_constants_return():
    model = Model()
    model |= Linear(4).set_attribute("stage", 2)(input="x", weight=IOKey("w", trainable=True), output="h")
    model |= CrossEntropy(weight=[1.0, 2.0, 3.0, 4.0])(logits="h", labels="labels", output="loss")
    model |= Concat(axis=1)(input0="h", input1=np.ones((2, 3), np.float16), output="c")
    model |= Cast("bfloat16")(input="c", output="d")
    assert restored(model, x=[2, 5], labels=[2]).find("linear")["linear"].tags == {"stage": 2}


def test_layers_of_the_user_are_passed_as_classes():
    model = Sequential(Scaled(2.5), Scaled(factor=3, kernel=(1, 1)))
    again = restored(model, [Scaled], input=[3])
    assert again.layers[1].kernel == (1, 1)
    with pytest.raises(ModelError, match=r"unknown layer 'Scaled'(.|\n)*pass layers=\[Scaled\]"):
        Sequential.from_dict(model.to_dict())
    with pytest.raises(ModelError, match="did you mean 'Linear'"):
        Layer.from_json(Linear(3).to_json().replace("Linear", "Linaer"))


def test_file_is_written_and_read(tmp_path):
    path = tmp_path / "model.json"
    chain().to_json(path)
    assert Model.from_json(path).inputs == Model.from_json(str(path)).inputs == ("image",)
    with pytest.raises(ModelError, match="cannot read"):
        Model.from_json(tmp_path / "absent.json")
    with pytest.raises(ModelError, match=r"not a Model"):
        Model.from_json(Linear(3).to_json())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sequential(hook(lambda y: None)(Linear(3))), "is a function, which a file cannot hold"),
        (lambda: Sequential(Scaled(lambda x: x)), r"factor|an argument of Scaled.* is a function"),
        (lambda: Sequential(Scaled(object())), "is a object, which a file cannot hold"),
    ],
)
def test_code_is_refused(make, message):
    with pytest.raises(ModelError, match=message):
        make().to_json()


def test_changed_layers_are_refused():
    layer = Dropout(0.5)
    layer.p = 0.1
    with pytest.raises(ModelError, match=r"changed after its construction(.|\n)*changed: p"):
        Sequential(layer).to_dict()
    mlp = MLP([3, 2])
    mlp.layers = [*mlp.layers, Linear(4)]
    with pytest.raises(ModelError, match="other layers inside"):
        mlp.to_dict()
    mlp = MLP([3, 2])
    mlp.layers[0].init = "ones"
    with pytest.raises(ModelError, match="changed: init"):
        mlp.to_dict()


def test_the_package_of_a_layer_is_written(monkeypatch):
    monkeypatch.setattr(Scaled, "__module__", "acme.layers")
    assert Scaled(2.0).to_dict()["layers"][0]["class"] == "Scaled"
    monkeypatch.setitem(sys.modules, "acme", SimpleNamespace(Scaled=Scaled))
    assert Scaled(2.0).to_dict()["layers"][0]["class"] == "acme:Scaled"


def test_a_layer_in_its_own_arguments_is_refused():
    kernel = []
    layer = Scaled(2.0, kernel)
    kernel.append(layer)
    with pytest.raises(ModelError, match="contains itself"):
        layer.to_dict()


def test_no_class_outside_of_the_library_is_reached():
    names = ("os:system", "mithril_tools.cli:main", "subprocess:Popen", "builtins:eval", "Trainer", "mithril:Trainer")
    for name in names:
        with pytest.raises(ModelError, match="unknown"):
            Layer.from_dict(entry({"class": name, "arguments": ["true"]}))
    with pytest.raises(ModelError, match="not a layer"):
        Layer.from_dict(entry({"class": "IOKey", "arguments": ["x"]}))
    with pytest.raises(ModelError, match="not a layer"):
        Layer.from_dict(entry({"class": "hook", "arguments": ["x"]}))


def test_exports_have_the_name_of_the_package(monkeypatch):
    monkeypatch.setattr(ml.plugins, "exports", lambda: {"Scaled": None})
    monkeypatch.setattr(ml.plugins, "export", {"Scaled": Scaled}.__getitem__)
    assert isinstance(Layer.from_dict(entry({"class": "mithril:Scaled", "arguments": [2]})), Scaled)
    for name in ("acme:Scaled", "mithril:Other"):
        with pytest.raises(ModelError, match=f"unknown class '{name}'"):
            Layer.from_dict(entry({"class": name, "arguments": [2]}))


def test_operands_are_places_of_their_operation():
    add = {"class": "Apply", "title": "add", "function": {"operation": "add"}, "keywords": {"dict": []}}
    for template in ([{"source": 0}, {"dict": [["k", {"source": 1}]]}], [{"source": 1}]):
        with pytest.raises(ModelError, match="an operand is missing|operand 1 does not follow 0 operands"):
            Layer.from_dict(entry({**add, "template": template}))


def entry(*layers):
    return {"format": "mithril-model", "version": 1, "root": len(layers) - 1, "layers": list(layers)}


def test_version_and_format_are_checked():
    data = Linear(3).to_dict()
    with pytest.raises(ModelError, match=r"version 2 of the format(.|\n)*install a newer mithril"):
        Layer.from_dict(data | {"version": 2})
    with pytest.raises(ModelError, match="not a saved model"):
        Layer.from_dict({"layers": []})
    with pytest.raises(ModelError, match="not JSON"):
        Layer.from_json("{")
    with pytest.raises(ModelError, match="not JSON"):
        Layer.from_json("[" * 100_000)


def sequence(*numbers):
    return {"class": "Sequential", "arguments": [{"layer": n} for n in numbers]}


def test_size_and_depth_are_limited():
    doubling = [{"class": "Relu"}, *(sequence(k, k) for k in range(40))]
    with pytest.raises(ModelError, match="more than 100,000 layers"):
        Layer.from_dict(entry(*doubling))
    with pytest.raises(ModelError, match="inside each other"):
        Layer.from_dict(entry({"class": "Relu"}, *(sequence(k) for k in range(300))))
    with pytest.raises(ModelError, match="there is no layer 1 before"):
        Layer.from_dict(entry({"class": "Relu"}, sequence(1)))
    nested = []
    for _ in range(200):
        nested = [nested]
    with pytest.raises(ModelError, match="levels deep"):
        Layer.from_dict(entry({"class": "Reshape", "arguments": [nested]}))
    power = {"formula": ["pow", 9**9, 9**9]}
    with pytest.raises(ModelError, match="exponent"):
        Layer.from_dict(entry({"class": "Reshape", "arguments": [power]}))
    array = {"array": ["float32", [2**40], "AAAA"]}
    with pytest.raises(ModelError, match="does not have 3 bytes"):
        Layer.from_dict(entry({"class": "Reshape", "arguments": [array]}))


def test_constructors_are_limited(monkeypatch):
    monkeypatch.setattr("mithril.models.saving.reading.MOST_LAYERS", 500)
    with pytest.raises(ModelError, match="too many layers"):
        Layer.from_dict(entry({"class": "TransformerEncoder", "arguments": [10**9, 8], "options": {"heads": 2}}))


def positions(data, path=()):
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from positions(value, (*path, key))


VALUES = [None, True, -1, 10**30, 1e300, "", "x", "Linear", [], {}, [1], {"layer": 0}, {"tuple": 3}, {"source": 9}, 7]


def test_random_damage_raises_errors_of_the_library():
    """Read files with random changes: the result is a model or an error that names the place."""
    x = IOKey("x", shape=["B", 4])
    model = Model.create(outputs=MLP([3, 2])(x[:, 1:]) + Residual(Relu())(x).reshape(x.shape[0], -1)[:, :2])
    model |= If("flag", Relu()(input="x", output="y"), Relu()(input="x", output="y"))
    original, rng = model.to_dict(), random.Random(0)
    places = list(positions(original))
    for _ in range(1500):
        data = deepcopy(original)
        *path, last = rng.choice(places)
        target = data
        for key in path:
            target = target[key]
        if rng.random() < 0.2:
            del target[last]
        else:
            target[last] = rng.choice(VALUES)
        try:
            flatten(Layer.from_dict(data))
        except MithrilError as error:
            assert str(error)


def test_attention_without_a_size_is_unchanged_by_programs():
    model = Model()
    model |= MultiHeadAttention(heads=2)("x", "memory", output="y")
    text, paths = model.to_json(), {path for path, _ in model.walk()}
    assert {"multi_head_attention.query", "multi_head_attention.output"} <= paths
    for width in (8, 6):
        traced = program(model, {"x": (1, 3, width), "memory": (1, 5, 4)})
        assert f"%multi_head_attention.key.weight: f32[{width}, 4]" in traced
        assert model.to_json() == text
