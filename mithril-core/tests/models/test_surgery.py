"""Model surgery: walking, finding, replacing and wrapping layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.graph import evaluate
from mithril.models import Gelu, Layer, Linear, Model, Relu, Reparametrization, Residual, Sequential, Wrapper, hook
from mithril.models.frontend import LayerSource


class Doubled(Wrapper):
    def build(self, *inputs: Any) -> Any:
        return self.inner(*inputs) * 2.0


class Adapter(Wrapper):
    """Adds a product of low rank."""

    def __init__(self, inner: Layer, rank: int = 2) -> None:
        super().__init__(inner)
        self.rank = rank

    def build(self, x: Any) -> Any:
        y = self.inner(x)
        down = self.param("down", (self.rank, x.shape[-1]), "normal(std=0.1)")
        up = self.param("up", (y.shape[-1], self.rank), "zeros")
        return y + ml.ops.linear(ml.ops.linear(x, down), up)


def model() -> Model:
    block = Model(Linear(4), Relu())
    block.name = "block"
    return Model(block, Sequential(Linear(4), Relu()), Residual(Linear(4)), Linear(2))


def graph(m: Layer) -> Any:
    source = LayerSource(m)
    types = {"input": ml.TensorType(ml.float32, (3, 4))}
    from mithril.compiler import TraceRequest

    return source.graph(types, TraceRequest()), source


def params(m: Layer) -> list[str]:
    return [i.name for i in graph(m)[0].with_role("param")]


def run(m: Layer) -> np.ndarray[Any, Any]:
    traced, source = graph(m)
    values = source.initial(traced.with_role("param"), 0)
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    return np.asarray(evaluate(traced, {**values, "input": x})["output"])


PATHS = (
    "block",
    "block.linear",
    "block.relu",
    "sequential",
    "sequential.0",
    "sequential.1",
    "residual",
    "residual.block",
    "linear",
)


def test_walk_yields_the_paths_of_parameters() -> None:
    m = model()
    assert tuple(path for path, _ in m.walk()) == PATHS
    layers = {path for path, layer in m.walk() if isinstance(layer, Linear)}
    assert {name.rpartition(".")[0] for name in params(m)} == layers


def test_find_by_pattern_and_class() -> None:
    m = model()
    assert list(m.find("block.*")) == ["block.linear", "block.relu"]
    assert list(m.find(Relu)) == ["block.relu", "sequential.1"]
    assert m.find("nothing") == {}


def test_replace_everywhere() -> None:
    m = model()
    before = params(m)
    assert m.replace(Relu, Gelu()) is m
    kinds = {path: type(layer) for path, layer in m.walk()}
    assert kinds["block.relu"] is Gelu and kinds["sequential.1"] is Gelu
    assert m.find("block.relu")["block.relu"] is not m.find("sequential.1")["sequential.1"]  # a copy each
    assert params(m) == before


def test_wrapped_layers_keep_the_names_of_their_parameters() -> None:
    m, expected = model(), run(model())
    m.replace("linear", Doubled)
    assert params(m) == params(model())
    np.testing.assert_allclose(run(m), 2 * expected, rtol=1e-6)
    assert isinstance(m.find("linear")["linear"], Doubled)


def test_adapters_add_parameters_next_to_the_old_ones() -> None:
    m = model()
    m.replace(Linear, lambda old: Adapter(old, rank=1))
    assert set(params(model())) < set(params(m))
    assert {n for n in params(m) if n.endswith(("down", "up"))} == {
        f"{path}.{n}" for path in ("block.linear", "sequential.0", "residual.block", "linear") for n in ("down", "up")
    }
    np.testing.assert_array_equal(run(m), run(model()))  # the product begins at zero


def test_a_shared_layer_stays_shared() -> None:
    shared = Linear(4)
    m = Model(shared, Relu(), shared)
    m.replace(Linear, Doubled)
    first, second = (layer for _, layer in m.walk() if isinstance(layer, Doubled))
    assert first is second and params(m) == ["linear.weight", "linear.bias"]


def test_errors_name_the_nearest_path_and_the_terminals() -> None:
    with pytest.raises(ml.ModelError, match=r"no layer matches 'block.liner'(.|\n)*did you mean 'block.linear'"):
        model().replace("block.liner", Gelu())
    with pytest.raises(ml.ModelError, match="the replacement of 'linear' is a int, expected a layer"):
        model().replace("linear", lambda old: 3)
    m = Model()
    m |= Linear(3)(input="x", output="y")
    with pytest.raises(ml.ModelError, match=r"cannot replace 'linear'(.|\n)*it has no terminal 'input'"):
        m.replace("linear", ml.models.Add())


class Twice(Layer):
    """One layer under two names, of which the last assigned one names its parameters."""

    inputs = ("x",)
    outputs = ("y",)

    def __init__(self) -> None:
        super().__init__()
        inner = Linear(4)
        self.left = inner
        self.right = inner
        self.left = inner

    def build(self, x: Any) -> Any:
        return self.right(self.left(x))


def test_a_layer_with_two_names_keeps_the_name_of_its_parameters():
    m = Model(Twice())
    (path,) = {path for path, layer in m.walk() if isinstance(layer, Linear)}
    m.replace(path, Linear(4))
    assert {path for path, layer in m.walk() if isinstance(layer, Linear)} == {path}


def test_a_named_value_denotes_the_layer_that_produces_it():
    block = Model()
    block |= Linear(4)(input="input", output="hidden")
    block |= Relu()(input="hidden", output="output")
    outer = Model()
    outer |= block(input="input", output="h")
    outer |= Linear(2, name="head")(input="h", output="scores")
    assert list(outer.find("model.hidden")) == ["model.linear"] and list(outer.find("scores")) == ["head"]
    shapes = []
    outer.replace("model.hidden", hook(lambda y: (shapes.append(y.shape), ml.ops.mul(y, 0.0))[1]))
    x = np.ones((3, 5), np.float32)
    np.testing.assert_array_equal(outer(x), outer(2 * x))
    assert shapes == [(3, 4)] * 2
    with pytest.raises(ml.ModelError, match="no layer matches 'model.hiden'"):
        outer.replace("model.hiden", Relu())


def arrays(model: Layer, seed: int = 1) -> dict[str, Any]:
    traced, source = graph(model)
    return source.initial(traced.with_role("param"), seed)  # type: ignore[no-any-return]


def loaded() -> tuple[Model, dict[str, Any]]:
    model = Model(Sequential(Linear(4), Linear(3)))
    params = arrays(model, 0)
    model.pretrained = params
    return model, params


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("new", [Linear(2), Doubled(Linear(2)), Sequential(Linear(6), Linear(2))])
def test_a_new_layer_of_other_sizes_is_not_pretrained(new: Layer, around: bool) -> None:
    model, params = loaded()
    model.replace("sequential.1", new)
    outer = Model(model) if around else model
    drawn = arrays(outer)
    root = "model." if around else ""
    for name in ("sequential.0.weight", "sequential.0.bias"):
        np.testing.assert_array_equal(drawn[root + name], params[name])
    assert evaluate(graph(outer)[0], {**drawn, "input": np.ones((3, 4), np.float32)})["output"].shape == (3, 2)


@pytest.mark.parametrize("new", [Linear(3), lambda old: old, Doubled, Adapter])
def test_a_new_layer_of_the_same_sizes_has_the_arrays(new: Any) -> None:
    model, params = loaded()
    drawn = arrays(model.replace("sequential.1", new))
    for name, array in params.items():
        np.testing.assert_array_equal(drawn[name], array)


def test_an_array_that_does_not_fit_its_layer_is_an_error() -> None:
    model, params = loaded()
    model.pretrained = {**params, "sequential.1.bias": np.zeros(2, np.float32)}
    for changed in (model, model.replace("sequential.1", Doubled)):
        with pytest.raises(ml.ShapeError, match="'sequential.1.bias' has shape"):
            arrays(changed)


def test_a_replaced_layer_is_saved() -> None:
    model = Model(Linear(4), Relu(), Linear(3))
    model.replace("linear", Linear(8)).replace("relu", Gelu())
    again = Model.from_json(model.to_json())
    assert again.to_json() == model.to_json()
    assert params(again) == params(model)


def test_a_layer_that_contains_itself_is_an_error():
    outer = Sequential(Linear(3))
    outer.layers[0].parent = outer
    with pytest.raises(
        ml.ModelError, match=r"layer '0.parent' contains itself\n  attribute 'parent' of Linear is a layer"
    ):
        list(outer.walk())


def tied() -> Model:
    """Return a model of two layers with one table."""
    table = ml.IOKey("table", shape=(7, 4), trainable=True)
    tied = Model()
    tied |= Linear(4, bias=False)(input="input", output="h")
    tied |= Linear(7, bias=False, name="head")(input="h", weight=table, output="output")
    tied |= Linear(7, bias=False, name="other")(input="h", weight="table", output="more")
    return tied.set_outputs("output", "more")


@pytest.mark.parametrize("around", [Doubled, lambda old: Doubled(Wrapper(old)), hook(lambda y: y * 2.0)])
def test_a_connected_weight_stays_connected_in_a_wrapper(around: Any) -> None:
    expected, changed = run(tied()), tied().replace("head", around)
    assert params(changed) == params(tied())
    np.testing.assert_allclose(run(changed), 2.0 * expected, rtol=1e-6)


def test_a_reparametrization_changes_the_weight_of_its_layer_only() -> None:
    class Tripled(Reparametrization):
        def parameter(self, stored: Any) -> Any:
            return stored * 3.0

    traced, source = graph(tied().replace("head", Tripled))
    values = source.initial(traced.with_role("param"), 0)
    results = evaluate(traced, {**values, "input": np.ones((3, 4), np.float32)})
    np.testing.assert_allclose(results["output"], 3.0 * np.asarray(results["more"]), rtol=1e-6)
