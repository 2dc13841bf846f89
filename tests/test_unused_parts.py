"""A part of a model that no output depends on has no inputs, parameters and states, on every backend."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, Dim
from mithril.models import BatchNorm1d, BatchNorm2d, Conv2d, IOKey, Layer, Linear, Model, Relu

BACKENDS = sorted(ml.plugins.backends())
A = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
B = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)


def two_heads() -> Model:
    model = Model()
    model |= Linear(8)(input="a", output="keep")
    model |= Linear(8)(input="b", output="other")
    return model


def cut() -> Model:
    return two_heads().set_outputs("keep")


def messages(compiled) -> str:
    return " | ".join(d.message for d in compiled.decisions.of("choice"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_and_parameters_are_optional(backend: str) -> None:
    compiled = ml.compile(cut(), backend)
    uncut = ml.compile(two_heads(), backend, outputs=["keep", "other"], shapes={"a": [4, 6], "b": [4, 5]})
    every = uncut.randomize_params()
    assert len(every) == 4
    params = compiled.randomize_params(inputs={"a": A})
    assert list(params) == ["linear.weight", "linear.bias"]
    result = compiled.evaluate(params, {"a": A})["keep"]
    expected = compiled.backend.to_numpy(result)
    np.testing.assert_allclose(expected, uncut.evaluate(every, {"a": A, "b": B})["keep"], rtol=1e-4, atol=1e-5)
    recorded = messages(compiled)
    assert (
        "these layers, which are left out: 'linear_1'" in recorded
        and "these inputs, which are left out: 'b'" in recorded
    )
    assert "is ignored" not in recorded

    passed = compiled.evaluate(every, {"a": A, "b": B})["keep"]
    np.testing.assert_array_equal(compiled.backend.to_numpy(passed), expected)
    recorded = messages(compiled)
    assert (
        "input 'b' is ignored" in recorded
        and "ignored, because no output" in recorded
        and "'linear_1.weight'" in recorded
    )
    gradients = compiled.evaluate(params, {"a": A}, {"keep": result})[1]
    assert list(gradients) == list(params)


class Heads(Layer):
    """Two results: one of a linear layer, the other within a branch, a bounded loop and a scan."""

    outputs = ("y", "z")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.head, self.other = Linear(4), Linear(4)

    def build(self, x, extra):
        h = self.head(x)
        if self.kind == "branch":
            test = ops.sum(h) > 0.0
            return ops.cond(test, lambda a, b: (a * 2.0, self.other(b)), lambda a, b: (a, b), h, extra)
        if self.kind == "loop":
            return ops.while_loop(
                lambda s: ops.sum(s[0]) < 100.0,
                lambda s: (s[0] * s[0] + 1.0, self.other(s[1])),
                (h, extra),
                max_trips=5,
            )
        steps = ops.scan(lambda c, v: ((c[0] + v[0], self.other(c[1])), v[1]), (h[0], extra[0]), (h, extra))
        return steps[0][0], steps[1]


@pytest.mark.parametrize("kind", ["branch", "loop", "scan"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_of_control_flow(backend: str, kind: str) -> None:
    model, shapes = Heads(kind), {"x": [3, 4], "extra": [3, 4]}
    x, cotangent = A[:3, :4], np.ones((4,) if kind == "scan" else (3, 4), np.float32)
    uncut = ml.compile(model, backend, shapes=shapes)
    cut = ml.compile(model, backend, shapes=shapes, outputs=["y"])
    every, params = uncut.randomize_params(), cut.randomize_params()
    assert list(params) == ["head.weight", "head.bias"]
    passed = {"x": x, "extra": x}
    zero = {"z": np.zeros(np.shape(uncut.evaluate(every, passed)["z"]), np.float32)}
    expected, gradients = uncut.evaluate(every, passed, {"y": cotangent, **zero})
    to_numpy = uncut.backend.to_numpy
    for inputs in ({"x": x}, passed):
        result, actual = cut.evaluate(params, inputs, {"y": cotangent})
        np.testing.assert_allclose(to_numpy(result["y"]), to_numpy(expected["y"]), rtol=1e-5)
        for name in params:
            np.testing.assert_allclose(to_numpy(actual[name]), to_numpy(gradients[name]), rtol=1e-4, atol=1e-4)
    assert "these inputs are optional: no output depends on them: 'extra'" in messages(cut)


@pytest.mark.parametrize("rows", [3, "B"])
def test_inputs_that_only_unselected_results_read(rows) -> None:
    cut = ml.compile(Heads("branch"), "numpy", shapes={"x": [rows, 4], "extra": [rows, 4]}, outputs=["y"])
    params = cut.randomize_params()
    assert cut.evaluate(params, {"x": A[:3, :4]})["y"].shape == (3, 4)
    for inputs, wrong in (
        ({"extra": A[:3, :4]}, "missing: 'x'"),
        ({"x": A[:3, :4], "eztra": A[:3, :4]}, "missing: 'extra' (similar: 'eztra')"),
    ):
        with pytest.raises(ml.InputError) as caught:
            cut.evaluate(params, inputs)
        assert wrong in str(caught.value)
    of_any_rank = ml.compile(Heads("branch"), "numpy", shapes={"x": [rows, 4]}, outputs=["y"])
    with pytest.raises(ml.InputError, match="missing: 'extra'"):
        of_any_rank.evaluate(params, {"x": A[:3, :4]})


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rest_of_a_network_after_a_cut(backend: str) -> None:
    model = Model()
    model |= Conv2d(3, 4, kernel_size=3)(input="input", output="c0")
    model |= Relu()(input="c0", output="r0")
    model |= Conv2d(4, 4, kernel_size=3)(input="r0", output="c1")
    model |= BatchNorm2d(4)(input="c1", output="output")
    shapes = {"input": [1, 3, 8, 8]}
    features = ml.compile(model, backend, shapes=shapes, outputs=["r0"])
    assert {n.partition(".")[0] for n in features.randomize_params()} == {"conv2d"}
    assert not features.initial_state()
    x = np.ones((1, 3, 8, 8), np.float32)
    uncut = ml.compile(model, backend, shapes=shapes)
    features.bind(uncut.randomize_params(seed=3))
    assert set(features.params) == {"conv2d.weight", "conv2d.bias"}
    assert features({"input": x})["r0"].shape == (1, 4, 6, 6)


def test_files_and_dictionaries_of_the_whole_model(tmp_path) -> None:
    uncut = ml.compile(two_heads(), "numpy", outputs=["keep", "other"], shapes={"a": [4, 6], "b": [4, 5]})
    every = uncut.randomize_params(seed=5)
    uncut.save(tmp_path / "uncut.safetensors", every)
    compiled = ml.compile(cut(), "numpy", shapes={"a": [4, 6]})
    compiled.load(tmp_path / "uncut.safetensors")
    assert set(compiled.params) == {"linear.weight", "linear.bias"}
    np.testing.assert_array_equal(compiled.params["linear.weight"], every["linear.weight"])
    assert not compiled.load_state_dict(every, strict=True).unexpected
    compiled.save(tmp_path / "part.safetensors", every)
    uncut.load_state_dict(compiled.params, strict=False)
    with pytest.raises(ml.InputError, match="linear_2"):
        compiled.load_state_dict({**every, "linear_2.weight": A}, strict=True)
    with pytest.raises(ml.InputError, match="unknown: 'c'"):
        compiled.evaluate(every, {"a": A, "c": B})


def test_options_may_name_the_unused_part() -> None:
    options = {"types": {"b": "float32"}, "trainable": ["linear.*", "linear_1.weight"], "strict": True}
    compiled = ml.compile(cut(), "numpy", shapes={"a": [4, 6], "b": [4, 5]}, **options)
    assert list(compiled.specs) == ["a"]
    ml.compile(cut(), "numpy", constants={"b": B}, shapes={"a": [4, 6]})
    model = cut()
    model.freeze("linear_1")
    ml.compile(model, "numpy", shapes={"a": [4, 6]})
    with pytest.raises(ml.OptionError, match="'c'"):
        ml.compile(cut(), "numpy", shapes={"c": [4, 6]})


def test_a_shared_layer_keeps_the_names_of_its_first_use() -> None:
    shared, model = Linear(8), Model()
    model |= shared(input="b", output="other")
    model |= shared(input="a", output="keep")
    uncut = ml.compile(model, "numpy", outputs=["keep", "other"], shapes={"a": [4, 6], "b": [4, 6]})
    compiled = ml.compile(model, "numpy", outputs=["keep"], shapes={"a": [4, 6]})
    assert compiled.randomize_params().keys() == uncut.randomize_params().keys()


class TwoResults(Layer):
    """A layer of which each result has a parameter."""

    outputs = ("first", "second")

    def build(self, input):
        return input * self.param("one", (6,)), input * self.param("two", (6,))


def test_parameters_of_one_result_of_a_layer() -> None:
    compiled = ml.compile(TwoResults(), "numpy", shapes={"input": [4, 6]}, outputs=["first"])
    params = compiled.randomize_params()
    assert list(params) == ["one"] and "'two'" in messages(compiled)
    compiled.evaluate({**params, "two": params["one"]}, {"input": A})


class OfMode(Layer):
    """A layer that uses one parameter in training, and the other one otherwise."""

    def build(self, input):
        one, two = self.param("one", (6,)), self.param("two", (6,))
        return input * (one if self.training else two)


def test_parameters_of_one_mode_stay() -> None:
    compiled = ml.compile(OfMode(), "numpy", shapes={"input": [4, 6]})
    params = compiled.randomize_params()
    for training, name in ((True, "one"), (False, "two")):
        outputs = compiled.evaluate(params, {"input": A}, training=training)
        result = (outputs[0] if isinstance(outputs, tuple) else outputs)["output"]
        np.testing.assert_array_equal(result, A * params[name])


def test_trainable_inputs_of_the_unused_part() -> None:
    model = Model()
    model |= Linear(8)(input="a", weight=IOKey("w", shape=(8, 6), trainable=True), output="keep")
    model |= Linear(8)(input="b", weight=IOKey("v", shape=(8, 5), trainable=True), output="other")
    model |= Linear(8, bias=False)(input="a", weight="table", output="looked_up")
    uncut = ml.compile(model, "numpy", shapes={"a": [4, 6], "table": [8, 6]}, outputs=["keep", "looked_up"])
    assert list(uncut.specs) == ["a", "table"]
    compiled = ml.compile(model, "numpy", shapes={"a": [4, 6]}, outputs=["keep"])
    params = compiled.randomize_params()
    assert "w" in params and "v" not in params
    compiled.evaluate({**params, "v": np.zeros((8, 5), np.float32)}, {"a": A})


def graph():
    with Builder() as b:
        x, y = b.input("x", (Dim("N"), 6)), b.input("y", (Dim("M"), 5))
        keep = x @ b.param("w", (6, 2))
        other = ops.reshape(y, shape=(-1, 10)) @ b.param("v", (10, 2))
    return b.build({"keep": keep, "other": other})


@pytest.mark.parametrize("backend", ["numpy", "jax", "c"])
def test_graphs(backend: str) -> None:
    compiled = ml.compile(graph(), backend, outputs=["keep"])
    params = compiled.randomize_params()
    assert list(params) == ["w"] and list(compiled.specs) == ["x"]
    compiled.evaluate(params, {"x": A})
    compiled.evaluate({**params, "v": np.zeros((10, 2), np.float32)}, {"x": A, "y": B})


def trained(*outputs: str, **options) -> ml.Trainer:
    model = Model()
    model |= Linear(8)(input="a", output="keep")
    model |= Linear(8)(input="b", output="h")
    model |= BatchNorm1d(8)(input="h", output="other")
    losses = dict.fromkeys(outputs, "mse")
    return ml.Trainer(model.set_outputs(*outputs), ml.AdamW(weight_decay=0.1), loss=losses, backend="numpy", **options)


def test_training_neither_carries_nor_decays_and_resumes_from_the_whole_model(tmp_path) -> None:
    y = np.zeros((4, 8), np.float32)
    uncut = trained("keep", "other")
    uncut.fit({"a": A, "b": B}, {"keep": y, "other": y}, epochs=1, batch_size=4)
    uncut.save(tmp_path / "checkpoint")
    for values in ({}, {"params": uncut.params, "state": uncut.state}):
        part = trained("keep", **values)
        if not values:
            part.load(tmp_path / "checkpoint")
        part.fit({"a": A, "b": B} if values else {"a": A}, {"keep": y}, epochs=2, batch_size=4)
        assert set(part.params) == {"linear.weight", "linear.bias"} and not part.state
        assert not [name for name in part.engine.arrays if "linear_1" in name or "norm" in name]
        assert "'linear_1.weight'" in messages(part.compiled)
