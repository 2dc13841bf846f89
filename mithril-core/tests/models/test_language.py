"""Wiring: names, connections, blocks, outputs, sharing; compared with NumPy."""

import importlib.util
import pickle
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mithril import ops
from mithril.graph import ModelError, OperationError, Value, float32
from mithril.models import (
    Add,
    Cast,
    Concat,
    Connection,
    IOKey,
    Layer,
    Linear,
    Model,
    Multiply,
    Negate,
    Relu,
    Sequential,
    Sum,
    Tanh,
)
from mithril.models.language.flatten import flatten

spec = importlib.util.spec_from_file_location("model_test_helpers", Path(__file__).with_name("helpers.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
run, graph_of, f32, line_of = helpers.run, helpers.graph_of, helpers.f32, helpers.line_of


class Scale(Layer):
    """x * weight, one weight per feature."""

    weights = ("weight",)

    def build(self, x):
        return x * self.param("weight", (x.shape[-1],), "uniform(low=1.0, high=2.0)")


def test_explicit_and_implicit_wiring_give_the_same_graph():
    explicit = Model()
    explicit |= Scale()(input="input", output="h")
    explicit |= Tanh()(input="h", output="output")
    implicit = Model()
    implicit |= Scale()
    implicit += Tanh()
    x = f32(2, 3)
    a, params = run(explicit, {"input": x})
    b, _ = run(implicit, {"input": x})
    np.testing.assert_array_equal(a["output"], b["output"])
    np.testing.assert_allclose(a["output"], np.tanh(x * params["scale.weight"]), rtol=1e-6)


def test_pipe_equals_does_not_chain():
    model = Model()
    model |= Negate()(output="a")
    model |= Tanh()(output="output_b")
    assert model.inputs == ("input",)
    out, _ = run(model, {"input": f32(3)})
    np.testing.assert_allclose(out["output_b"], np.tanh(f32(3)), rtol=1e-6)


def test_plus_equals_connects_the_first_free_input_only():
    model = Model()
    model |= Tanh()(input="x")
    model += Add()(right="y", output="output")
    out, _ = run(model, {"x": f32(3), "y": f32(3, seed=1)})
    np.testing.assert_allclose(out["output"], np.tanh(f32(3)) + f32(3, seed=1), rtol=1e-6)


def test_names_may_be_read_before_they_are_produced():
    model = Model()
    model |= Negate()(input="h", output="output")
    model |= Tanh()(input="x", output="h")
    assert model.inputs == ("x",)
    out, _ = run(model, {"x": f32(3)})
    np.testing.assert_allclose(out["output"], -np.tanh(f32(3)), rtol=1e-6)


def test_in_place_makes_a_new_value_for_later_readers():
    model = Model()
    model |= Negate()(input="x", output="h")
    model |= Tanh()(input="h", output="before")
    model |= Sum(in_place=True)(input="h", output="h")
    model |= Negate()(input="h", output="output")
    model.set_outputs("before", "output")
    out, _ = run(model, {"x": f32(4)})
    np.testing.assert_allclose(out["before"], np.tanh(-f32(4)), rtol=1e-6)
    np.testing.assert_allclose(out["output"], f32(4).sum(), rtol=1e-5)


def test_in_place_on_an_input():
    model = Model()
    model |= Negate(in_place=True)(input="input", output="input")
    model += Tanh()
    out, _ = run(model, {"input": f32(4)})
    np.testing.assert_allclose(out["output"], np.tanh(-f32(4)), rtol=1e-6)


def test_functional_style_and_operators():
    a, b = IOKey("a", shape=["B", 4]), IOKey("b")
    h = (a + b * 2 - 1) / 2
    h = -(h.reshape(h.shape[0] * 2, -1)[:, 0] ** 2)
    model = Model.create(inputs=[a, b], outputs={"h": h, "smaller": a < b, "same": a == b})
    x, y = f32(3, 4), f32(3, 4, seed=1)
    out, _ = run(model, {"a": x, "b": y})
    expected = -(((x + y * 2 - 1) / 2).reshape(6, 2)[:, 0] ** 2)
    np.testing.assert_allclose(out["h"], expected, rtol=1e-5)
    np.testing.assert_array_equal(out["smaller"], x < y)
    np.testing.assert_array_equal(out["same"], x == y)


def test_methods_of_connections():
    x = IOKey("x")
    model = Model.create(
        outputs={
            "mean": x.mean(axis=1, keepdims=True),
            "sum": x.sum(),
            "t": x.transpose(1, 0),
            "T": x.T,
            "any": x.tanh(),
            "half": x.astype("float16"),
            "scaled": x / x.shape[1] ** 0.5,
            "kept": x.reshape(x.shape[:1] + (3, 2)),
        }
    )
    a = f32(2, 6)
    out, _ = run(model, {"x": a})
    np.testing.assert_allclose(out["mean"], a.mean(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(out["sum"], a.sum(), rtol=1e-5)
    np.testing.assert_array_equal(out["t"], a.T)
    np.testing.assert_array_equal(out["T"], a.T)
    np.testing.assert_allclose(out["any"], np.tanh(a), rtol=1e-6)
    assert out["half"].dtype == np.float16
    np.testing.assert_allclose(out["scaled"], a / np.sqrt(np.float32(6)), rtol=1e-6)
    assert out["kept"].shape == (2, 3, 2)


def test_scalars_and_arrays_as_inputs_of_layers():
    model = Model()
    model |= Add()(left="x", right=2.5, output="h")
    model |= Multiply()(left="h", right=np.array([1, 2], np.float32), output="output")
    x = np.array([1, 2], np.float16)
    out, _ = run(model, {"x": x})
    np.testing.assert_array_equal(out["output"], (x + np.float16(2.5)).astype(np.float32) * [1, 2])
    assert out["output"].dtype == np.float32


def test_a_list_is_several_arguments():
    x = np.array([[1.0, -2.0]], np.float32)
    for build, expected in (
        (lambda a, b: Add()([a, b]), 11 * x),
        (lambda a, b: Add()((a, b)), 11 * x),
        (lambda a, b: Concat(axis=1)([a, b]), [[1, -2, 10, -20]]),
        (lambda a, b: ops.concat([a, b], axis=1), [[1, -2, 10, -20]]),
        (lambda a, b: ops.stack((a, b)), [x, 10 * x]),
        (lambda a, b: ops.concat([a, b], 1), [[1, -2, 10, -20]]),
        (lambda a, b: ops.einsum("ij,ij->ij", a, b).sum(-1), [50]),
        (lambda a, b: (a - b).reshape(-1).sum(0, True), [9]),
    ):
        outputs, _ = run(Model.create(outputs={"y": build(IOKey("a"), IOKey("b"))}), {"a": x, "b": 10 * x})
        np.testing.assert_array_equal(outputs["y"], expected)
    np.testing.assert_array_equal(ops.concat([x[0], x[0]]), [1, -2, 1, -2])
    for wrong in (lambda: Relu()([IOKey("a"), IOKey("b")]), lambda: Relu()([x, x]), lambda: Relu()(x, x)):
        with pytest.raises(ModelError, match=r"takes 1 input, got 2"):
            wrong()
    with pytest.raises(OperationError, match="operand 'b' cannot be a (?s:.)*ops.concat join values"):
        run(Model.create(outputs={"y": ops.add(IOKey("a"), [IOKey("b"), 1.0])}), {"a": x, "b": x})


class Blend(Layer):
    """Two inputs and an optional one, named by ``build``; results by name."""

    outputs = ("low", "high")

    def build(self, left, right, bias=None):
        return {"high": left + right if bias is None else left + right + bias, "low": left - right}


def test_the_parameters_of_build_are_the_inputs_of_a_layer():
    x = np.array([3.0], np.float32)
    assert (Blend.inputs, Blend.optional) == (("left", "right"), ("bias",))
    assert (Scale.inputs, Scale.optional) == (("input",), ())
    model = Model()
    model |= Blend()(left="a", right="b", low="low", high="high")
    model |= Blend()("a", "b", bias="a", high="more")
    outputs, _ = run(model.set_outputs("low", "high", "more"), {"a": x, "b": 2 * x})
    assert [float(outputs[n][0]) for n in ("low", "high", "more")] == [-3.0, 9.0, 12.0]
    assert {name: float(y[0]) for name, y in Blend()(x, 2 * x).items()} == {"low": -3.0, "high": 9.0}


def test_the_errors_of_terminals_tell_how_to_declare_them():
    class Pair(Layer):
        def build(self, x):
            return x, x

    class ByName(Layer):
        def build(self, x):
            return {"low": x, "high": x}

    with pytest.raises(ModelError, match=r"'x' of build is the input 'input'; inputs = \('x',\) in the class"):
        Pair()(x="a")
    with pytest.raises(ModelError, match=r"outputs = \('output_0', 'output_1'\)"):
        Pair()(np.ones(2))
    with pytest.raises(ModelError, match=r"outputs = \('low', 'high'\)"):
        ByName()(np.ones(2))


@pytest.mark.parametrize("wrong", ["text", [[1, 2], [3]], object(), ["a"]])
def test_operands_are_numbers(wrong):
    with pytest.raises(OperationError, match="operation 'relu': operand 'x' cannot be a"):
        ops.relu(wrong)


def test_connections_of_a_model_extend_it():
    model = Model()
    model |= Tanh()(input="x", output="h")
    h = model["h"]
    assert isinstance(h, Connection)
    model.set_outputs(y=h * 2 + model["x"])
    out, _ = run(model, {"x": f32(3)})
    np.testing.assert_allclose(out["y"], np.tanh(f32(3)) * 2 + f32(3), rtol=1e-6)


def test_blocks_at_any_depth_and_their_paths():
    block = Model(name="inner")
    block |= Scale(name="first")(input="x", output="h")
    block |= Tanh()(input="h", output="out")
    middle = Model(name="middle")
    middle |= block(x="a", out="b")
    model = Model()
    model |= middle(a="input", b="output")
    graph = graph_of(model, {"input": f32(2, 3)})
    assert [i.name for i in graph.with_role("param")] == ["middle.inner.first.weight"]
    assert [n.origin.path for n in graph.nodes] == ["middle.inner.first", "middle.inner.tanh"]


def test_any_named_terminal_of_a_block_can_be_bound():
    block = Model()
    block |= Tanh()(input="x", output="hidden")
    block |= Negate()(input="hidden", output="output")
    model = Model()
    model |= block(x="input", hidden="h")
    model |= Sum()(input="h", output="output")
    out, _ = run(model, {"input": f32(3)})
    np.testing.assert_allclose(out["output"], np.tanh(f32(3)).sum(), rtol=1e-5)


def test_the_same_layer_twice_shares_its_parameters():
    shared = Scale()
    model = Model()
    model |= shared(input="input", output="h")
    model |= shared(input="h", output="output")
    graph = graph_of(model, {"input": f32(2, 3)})
    assert [i.name for i in graph.with_role("param")] == ["scale.weight"]
    out, params = run(model, {"input": f32(2, 3)})
    np.testing.assert_allclose(out["output"], f32(2, 3) * params["scale.weight"] ** 2, rtol=1e-5)


def test_one_connection_as_weight_of_two_layers():
    model = Model()
    model |= Scale()(input="input", weight=IOKey("w", trainable=True, init="ones"), output="h")
    model |= Scale()(input="h", weight="w", output="output")
    graph = graph_of(model, {"input": f32(2, 3)})
    assert [(i.name, i.tags["init"]) for i in graph.with_role("param")] == [("w", "ones")]
    assert flatten(model).inputs[0].name == "input"


def test_inputs_have_the_dtype_that_a_model_inside_declares():
    inner = Model()
    inner |= Tanh()(input=IOKey("x", dtype="float32"), output="y")
    model = Model()
    model |= inner(x="input", y="output")
    assert flatten(model).inputs[0].dtype is float32


def test_a_shared_block_keeps_its_own_trainable_input():
    block = Model()
    block |= Multiply()(left="x", right=IOKey("w", trainable=True, shape=[3]), output="output")
    model = Model()
    model |= block(x="input", output="h")
    model |= block(x="h", output="output")
    graph = graph_of(model, {"input": f32(2, 3)})
    assert [i.name for i in graph.with_role("param")] == ["model.w"]


@pytest.mark.parametrize(
    "names, expected",
    [
        (("output", "unused"), ["output"]),
        (("output1", "output2"), ["output1", "output2"]),
        (("a", "b"), ["a", "b"]),
    ],
)
def test_outputs_by_name(names, expected):
    model = Model()
    for name in names:
        model |= Tanh()(input="input", output=name)
    assert list(model.outputs) == expected


def test_outputs_exposed_set_and_requested():
    model = Model()
    model |= Tanh()(input="input", output=IOKey("h", expose=True))
    model |= Negate()(input="h", output="output")
    assert model.outputs == ("h",)
    model.set_outputs("output", again="h")
    assert model.outputs == ("output", "again")
    assert [name for name, _ in flatten(model, outputs=["h", "output"]).outputs] == ["h", "output"]


def test_the_last_layer_gives_the_output_where_nothing_is_named():
    model = Model()
    model |= Tanh()
    model += Negate()
    assert model.outputs == ("output",)


def test_defaults_and_declared_inputs():
    model = Model()
    model |= Add()(left="x", right=IOKey("bias", default=3.0), output="output")
    out, _ = run(model, {"x": f32(2)})
    np.testing.assert_allclose(out["output"], f32(2) + 3, rtol=1e-6)
    flat = flatten(model)
    assert [(d.name, d.required) for d in flat.inputs] == [("x", True), ("bias", False)]


def test_attributes_are_inherited_and_kept_in_the_graph():
    inner = Model()
    inner |= Tanh()
    inner.set_attribute("backend", "torch")
    model = Model()
    model |= inner(input="input", output="h")
    model |= Negate()(input="h", output="output")
    model.set_attribute("team", "a")
    graph = graph_of(model, {"input": f32(2)})
    assert [dict(n.tags) for n in graph.nodes] == [{"team": "a", "backend": "torch"}, {"team": "a"}]


def test_nodes_know_the_users_line():
    model = Model()
    model |= Tanh()
    model += Negate()  # here
    graph = graph_of(model, {"input": f32(2)})
    assert graph.nodes[1].origin.file == __file__
    assert graph.nodes[1].origin.line == line_of(test_nodes_know_the_users_line, "# here")


def test_layers_inside_layers_are_named_by_attribute():
    class Two(Layer):
        def __init__(self):
            self.first = Scale()
            self.rest = [Scale(), Scale()]

        def build(self, x: Value):
            x = self.first(x)
            for layer in self.rest:
                x = layer(x)
            return x

    model = Model()
    model |= Two(name="two")
    graph = graph_of(model, {"input": f32(2, 3)})
    names = [i.name for i in graph.with_role("param")]
    assert names == ["two.first.weight", "two.rest.0.weight", "two.rest.1.weight"]
    assert graph.nodes[1].origin.path == "two.rest.0"


def test_depth_is_not_limited():
    model = Model()
    for _ in range(3000):
        model += Tanh()
    assert len(graph_of(model, {"input": f32(2)}).nodes) == 3000
    x = h = IOKey("x")
    for _ in range(3000):
        h = Tanh()(h)
    assert len(graph_of(Model.create(inputs=x, outputs=h), {"x": f32(2)}).nodes) == 3000


def test_layers_alone_are_models_too():
    graph = graph_of(Scale(), {"input": f32(2, 3)})
    assert [i.name for i in graph.inputs] == ["input", "weight"]
    assert graph.output_names == ("output",)


def test_trainable_chooses_parameters_and_inputs():
    model = Model()
    model |= Scale(name="a")
    model += Scale(name="b")
    graph = graph_of(model, {"input": f32(2, 3)}, trainable=["b.*", "input"])
    roles = {i.name: (i.role, i.tags.get("trainable", True)) for i in graph.inputs}
    assert roles == {"input": ("input", True), "a.weight": ("param", False), "b.weight": ("param", True)}


def test_constants_are_fixed():
    model = Model()
    model |= Add()(left="x", right="c", output="output")
    graph = graph_of(model, {"x": f32(3)}, constants={"c": np.arange(3, dtype=np.float32)})
    assert [(i.name, i.role) for i in graph.inputs] == [("x", "input"), ("c", "constant")]


def test_dtypes_of_parameters_follow_the_input():
    for kind in ("float16", "float32", "float64"):
        graph = graph_of(Scale(), {"input": f32(2, 3).astype(kind)})
        assert {str(i.type.dtype) for i in graph.inputs} == {kind}


def test_repr_and_notebook():
    model = Model()
    model |= Cast("float16")(input="x", output="y")
    assert repr(model) == "<Model: 1 layers, inputs x, outputs y>"
    assert repr(Cast("float16")) == "Cast('float16')"
    assert "cast: Cast(" in model._repr_html_()


def test_copies_have_parameters_of_their_own():
    class Two(Layer):
        def __init__(self):
            self.parts = [Scale(), Scale()]

        def build(self, x):
            return self.parts[1](self.parts[0](x))

    first = Two()
    model = Model(first, deepcopy(first))
    names = [i.name for i in graph_of(model, {"input": f32(2, 3)}).with_role("param")]
    assert names == ["two.parts.0.weight", "two.parts.1.weight", "two_1.parts.0.weight", "two_1.parts.1.weight"]
    block = Model(Scale())
    names = [i.name for i in graph_of(Model(block, deepcopy(block)), {"input": f32(2, 3)}).with_role("param")]
    assert names == ["model.scale.weight", "model_1.scale.weight"]


def test_a_model_inside_a_layer():
    block = Model()
    block |= Scale(name="s")(input="x", output="h")
    block |= Multiply()(left="h", right=IOKey("w", trainable=True, shape=[3]), output="y")

    class Twice(Layer):
        def __init__(self):
            self.block = block

        def build(self, x):
            return self.block(self.block(x))

    graph = graph_of(Model(Twice(name="t")), {"input": f32(2, 3)})
    assert [i.name for i in graph.with_role("param")] == ["t.block.s.weight", "t.block.w"]
    assert len(graph.nodes) == 4


class Inline(Layer):
    def build(self, x):
        x = Sequential(Linear(3), Relu())(x)
        return Linear(3)(Linear(3)(x)) + Linear(3, name="skip")(x)


def test_layers_that_build_creates_have_parameters_of_their_own():
    # each is freed before the next one is created, which gets its address
    names = ["linear.bias", "linear.weight", "linear_1.bias", "linear_1.weight"]
    names += ["sequential.0.bias", "sequential.0.weight", "skip.bias", "skip.weight"]
    assert sorted(run(Inline(), {"input": f32(2, 3)})[1]) == names


def test_layers_that_build_creates_are_shared_by_the_calls_of_their_layer():
    inner = Inline()
    model = Model()
    model |= inner
    model += inner
    out, params = run(model, {"input": f32(2, 3)})
    assert len(params) == 8 and all(name.startswith("inline.") for name in params)
    inner_params = {name.removeprefix("inline."): x for name, x in params.items()}
    once, _ = run(Inline(), {"input": f32(2, 3)}, inner_params)
    twice, _ = run(Inline(), {"input": once["output"]}, inner_params)
    np.testing.assert_allclose(out["output"], twice["output"], rtol=1e-6)


def test_two_layers_that_a_loop_creates_are_an_error():
    class Looped(Layer):
        def build(self, x):
            return ops.scan(lambda state, _: (Linear(3)(Linear(3)(state)), state), x, ops.arange(2))[0]

    with pytest.raises(ModelError, match=r"two parameters are named 'linear.weight'"):
        run(Looped(), {"input": f32(2, 3)})


def test_two_layers_of_one_name_in_a_build_method_are_an_error():
    class Twice(Layer):
        def build(self, x):
            return Linear(3, name="a")(Linear(3, name="a")(x))

    with pytest.raises(ModelError, match=r"two parameters are named 'a.weight'(?s:.)*or create it in __init__"):
        run(Twice(), {"input": f32(2, 3)})


class Named(Layer):
    def __init__(self):
        self.first, self.rest = Linear(2), [Linear(2), Linear(3)]

    def build(self, x):
        return self.rest[1](self.rest[0](self.first(x)))


@pytest.mark.parametrize("copied", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_copies_name_their_layers_as_the_original(copied, monkeypatch):
    monkeypatch.setattr(f"{__name__}.Named", Named, raising=False)
    names = sorted(run(Named(), {"input": f32(2, 3)})[1])
    assert sorted(run(copied(Named()), {"input": f32(2, 3)})[1]) == names


@dataclass
class Held(Layer):
    """Compares by value, so it has no hash."""

    head: Layer

    def __post_init__(self):
        self.appended, self.grid = [], [[Linear(3)], [Linear(3)]]
        self.appended.append(Linear(3))
        self.by_key = {"a": Linear(3), "b": (Linear(3),)}

    def build(self, x):
        for layer in (*self.appended, *self.grid[0], *self.grid[1], self.by_key["a"], *self.by_key["b"]):
            x = layer(x)
        return self.head(x)


HELD = ["appended.0", "by_key.a", "by_key.b.0", "grid.0.0", "grid.1.0", "head"]


def test_layers_are_named_after_attributes_lists_and_keys():
    model = Held(Linear(3))
    assert sorted({n.rpartition(".")[0] for n in run(model, {"input": f32(2, 3)})[1]}) == HELD
    assert sorted(path for path, _ in model.walk()) == HELD


@pytest.mark.parametrize("path", HELD)
def test_layers_in_containers_are_replaced_at_their_paths(path):
    model = Held(Linear(3))
    copy = deepcopy(model)
    copy.replace(path, Relu())
    assert path not in {n.rpartition(".")[0] for n in run(copy, {"input": f32(2, 3)})[1]}
    assert isinstance(copy.find(path)[path], Relu) and not model.find(Relu)


def test_other_things_in_a_sequence_are_an_error_with_the_way():
    for wrong in ([Relu()], ops.relu, {"a": Relu()}):
        with pytest.raises(
            ModelError, match=r"expected Layer, got(?s:.)*hint: write Sequential\(\*layers\) for a list"
        ):
            Sequential(wrong)


def test_layers_in_containers_are_saved():
    model = Held(Linear(3))
    model.replace("by_key.b.0", Linear(4))
    saved = Layer.from_json(model.to_json(), layers=[Held])
    assert {path: repr(layer) for path, layer in saved.walk()} == {path: repr(layer) for path, layer in model.walk()}


def test_models_of_the_same_connections_share_layers():
    x = IOKey("x")
    features = Relu()(Linear(4, name="first")(x))
    full = Model.create(inputs=x, y=Linear(2, name="head")(features))
    inner = Model.create(inputs=x, features=features)
    other = Model.create(inputs=x, y=ops.transpose(x) * 2.0)
    data = f32(2, 3)
    values, params = run(full, {"x": data})
    shared = {name: array for name, array in params.items() if name.startswith("first.")}
    extracted, start = run(inner, {"x": data}, shared)
    assert (
        sorted(params) == ["first.bias", "first.weight", "head.bias", "head.weight"] and start.keys() == shared.keys()
    )
    head = extracted["features"] @ params["head.weight"].T + params["head.bias"]
    np.testing.assert_allclose(values["y"], head, rtol=1e-5)
    np.testing.assert_array_equal(run(other, {"x": data})[0]["y"], data.T * 2)


def test_one_key_declares_inputs_of_several_models():
    x = IOKey("x", shape=("B", 2, 3))

    def make(size):
        model = Model()
        model |= Linear(size)(input=x.reshape(x.shape[0], -1) * 2, output="y")
        return model

    first, second = make(4), make(5)
    first |= Relu()(input=x, output="z")
    created = [Model.create(inputs=x, outputs=Linear(size)(x)) for size in (6, 7)]
    outputs = [run(m, {"x": f32(3, 2, 3)})[0] for m in (first, second, *created)]
    assert [{n: y.shape for n, y in o.items()} for o in outputs] == [
        {"y": (3, 4), "z": (3, 2, 3)},
        {"y": (3, 5)},
        {"output": (3, 2, 6)},
        {"output": (3, 2, 7)},
    ]
    assert [s.name for s in second.steps] == ["reshape", "mul", "linear"]
