"""Terminals of models: renaming and merging them, inputs of unknown rank, and sizes that come from weights."""

import numpy as np
import pytest

import mithril as ml
from mithril.graph import InputError, ModelError, OptionError, ShapeError
from mithril.models import (
    MLP,
    Add,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    IOKey,
    Layer,
    Linear,
    Model,
    Multiply,
    Relu,
    Tanh,
)

BACKENDS = ["numpy", "jax", "torch"]
X = np.random.default_rng(0).normal(size=(2, 3, 6, 6)).astype(np.float32)


# -- merging and renaming --------------------------------------------------------------------------------------------
def two_branches():
    model = Model()
    model |= Linear(3)(input="a", output="h")
    model |= Linear(3)(input="b", output="k")
    model |= Add()("h", "k", output="y")
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_merged_inputs_are_one_input(backend):
    model = two_branches().merge("a", "b", name="x")
    assert (model.inputs, model.outputs) == (("x",), ("y",))
    compiled, separate = ml.compile(model, backend), ml.compile(two_branches(), backend)
    x = X[0, 0]
    params = separate.randomize_params(inputs={"a": x, "b": x})
    expected = separate.evaluate(params, {"a": x, "b": x})["y"]
    np.testing.assert_array_equal(compiled.evaluate(params, {"x": x})["y"], expected)
    again = Model.from_json(model.to_json())
    np.testing.assert_array_equal(ml.compile(again, backend).evaluate(params, {"x": x})["y"], expected)


def test_a_result_replaces_an_input_that_was_used_before():
    model = Model()
    model |= Relu()(input="z", output="y")
    model |= Linear(3)(input="a", output="h")
    model.merge("z", "h")
    assert (model.inputs, model.outputs) == (("a",), ("y",))
    shapes = ml.compile(model, "numpy", shapes={"a": [2, 4]}).get_shapes()
    assert shapes["y"] == shapes["h"] == [2, 3]
    with pytest.raises(ModelError, match="no terminal 'z'"):
        model.terminal("z")


def test_merged_declarations_hold_together():
    model = Model()
    model |= Add()(IOKey("a", shape=(None, 4)), IOKey("b", shape=(2, None)), output="y")
    assert ml.compile(model.merge("a", "b"), "numpy").get_shapes()["a"] == [2, 4]
    model = Model()
    model |= Add()(IOKey("a", shape=(3,)), IOKey("b", shape=(4,)), output="y")
    with pytest.raises(ModelError, match="declared with two shapes"):
        model.merge("a", "b")
    assert model.inputs == ("a", "b")


@pytest.mark.parametrize(
    ("terminals", "message"),
    [
        (("a", "y"), "'a' cannot become 'y', which is computed from it"),
        (("h", "k"), "two values that layers produce"),
        (("a", "a"), "two different terminals"),
        (("a", "bb"), "did you mean 'b'"),
        ((two_branches()["a"], "a"), "belongs to another model"),
    ],
)
def test_other_terminals_are_not_merged(terminals, message):
    model = two_branches()
    with pytest.raises(ModelError, match=message):
        model.merge(*terminals)
    assert (model.inputs, model.outputs) == (("a", "b"), ("y",))


@pytest.mark.parametrize("backend", BACKENDS)
def test_renamed_terminals_keep_their_values(backend):
    model = Model()
    model |= Linear(3)(input="x", weight=IOKey("w", trainable=True), output="output")
    model |= Relu()("output", output="output_aux")
    model |= Tanh()("output", output="t")
    model.pretrained = {"w": np.ones((3, 6), np.float32), "linear.bias": np.zeros(3, np.float32)}
    before = ml.compile(model, backend)(X[0, 0])
    model.rename("output", "logits").rename(model["x"], "image").rename("w", "kernel")
    assert (model.inputs, model.outputs) == (("image",), ("logits", "output_aux"))
    after = ml.compile(model, backend)(X[0, 0])
    np.testing.assert_array_equal(after["logits"], before["output"])
    block = Model()
    block |= model(image="q", logits="r", output_aux="s")
    assert (block.inputs, block.outputs) == (("q",), ("r", "s"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("a", "y", "has a terminal 'y' already"), ("aa", "b", "did you mean 'a'"), ("a", "b c", "cannot name a terminal")],
)
def test_other_names_are_refused(old, new, message):
    with pytest.raises(ModelError, match=message):
        two_branches().rename(old, new)


# -- unknown rank ----------------------------------------------------------------------------------------------------
def any_rank(shape=("B", ..., 6)):
    model = Model()
    model |= Linear(4)(input=IOKey("x", shape=shape), output=IOKey("y", shape=(..., 4)))
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_decides_on_the_rank(backend):
    compiled = ml.compile(any_rank(), backend)
    params = compiled.randomize_params(seed=1)  # ... is one axis until then
    expected = X @ np.asarray(params["linear.weight"]).T + np.asarray(params["linear.bias"])
    for k in ((), 0, (0, 1)):
        np.testing.assert_allclose(compiled.evaluate(params, {"x": X[k]})["y"], expected[k], rtol=2e-5, atol=1e-5)
    assert len(compiled.programs) == 3
    gradients = compiled.evaluate(params, {"x": X}, output_gradients={"y": np.ones((2, 3, 6, 4), np.float32)})[1]
    np.testing.assert_allclose(gradients["linear.bias"], np.full(4, 36), rtol=1e-6)


def test_an_option_decides_on_the_rank():
    shapes = ml.compile(any_rank(), "numpy", shapes={"x": [2, 3, 6]}).get_shapes()
    assert (shapes["x"], shapes["y"]) == ([2, 3, 6], [2, 3, 4])
    compiled = ml.compile(any_rank(("B", None, 6)), "numpy", shapes={"x": [2, ...]})
    assert compiled.get_shapes()["y"][0] == 2
    free = ml.compile(Relu(), "numpy", shapes={"input": [..., 6]})
    assert free(X)["output"].shape == X.shape


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ml.compile(any_rank(), "numpy")(X[0, 0, 0]), r"expected \[B, ..., 6\], got f32\[6\]"),
        (lambda: ml.compile(any_rank(), "numpy")(X[..., :4]), "axis 3 of input 'x' is 4, expected 6"),
        (lambda: ml.compile(any_rank(), "numpy", shapes={"x": [2, 3, 4]}), r"model: \[B, ..., 6\]"),
        (lambda: ml.compile(any_rank(), "numpy", shapes={"x": [6]}), r"shapes=: \[6\]"),
        (lambda: ml.compile(Relu(), "numpy", shapes={"input": [..., 6, ...]}), "more than one ..."),
        (lambda: IOKey("x", shape=(..., ...)), "more than one ..."),
        (
            lambda: ml.compile(Relu()(IOKey("x", shape=(..., 6)), output=IOKey("y", shape=(..., 7))), "numpy"),
            "compiled",
        ),
    ],
)
def test_a_shape_of_unknown_rank_is_checked(act, message):
    with pytest.raises((InputError, OptionError, ModelError), match=message):
        act()


def test_results_of_unknown_rank_are_checked():
    model = Model()
    model |= Relu()(input="x", output=IOKey("y", shape=("N", ..., 7)))
    with pytest.raises(ShapeError, match=r"declared as \[N, ..., 7\]"):
        ml.compile(model, "numpy", shapes={"x": [2, 6]})


# -- sizes from weights ----------------------------------------------------------------------------------------------
def arrays(**shapes):
    rng = np.random.default_rng(1)
    return {name.replace("__", "."): rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_take_sizes_from_a_state_dictionary(backend):
    state = arrays(conv__weight=(8, 3, 3, 3), conv__bias=(8,), head__weight=(10, 4), head__bias=(10,))
    model = Model(Conv2d(None, kernel_size=3, name="conv"), Linear(None, name="head"))
    model.pretrained = state
    compiled = ml.compile(model, backend)
    assert compiled.get_shapes()["input"][1] == 3
    assert compiled.params is not None
    explicit = Model(Conv2d(3, 8, kernel_size=3, name="conv"), Linear(4, 10, name="head"))
    expected = ml.compile(explicit, backend).evaluate(state, {"input": X})["output"]
    np.testing.assert_array_equal(compiled(X)["output"], expected)
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "state", "shapes"),
    [
        (Linear(5), {"weight": (5, 7), "bias": (5,)}, {"input": 7, "output": 5}),
        (Embedding(None, None), {"weight": (9, 4)}, {"output": 4}),
    ],
)
def test_sizes_are_known_without_inputs(layer, state, shapes):
    layer.pretrained = arrays(**state)
    inferred = ml.compile(layer, "numpy").get_shapes()
    assert {name: inferred[name][-1] for name in shapes} == shapes


def test_transposed_groups():
    layer = ConvTranspose2d(None, kernel_size=2, groups=2)
    layer.pretrained = arrays(weight=(4, 3, 2, 2), bias=(6,))
    shapes = ml.compile(layer, "numpy").get_shapes()
    assert (shapes["input"][1], shapes["output"][1]) == (4, 6)


def test_sizes_of_connected_weights_and_of_parameters():
    model = Model()
    model |= Linear(None)(input="x", weight=IOKey("w", trainable=True, shape=(7, 3)), output="h")
    model |= Multiply()("h", IOKey("scale", trainable=True), output="y")
    model.pretrained = arrays(scale=(1, 7))
    shapes = ml.compile(model, "numpy", shapes={"x": [2, 3]}).get_shapes()
    assert (shapes["linear.bias"], shapes["scale"], shapes["y"]) == ([7], [1, 7], [2, 7])


def test_layers_within_layers_take_sizes_from_the_arrays_around_them():
    mlp = MLP([None, None])
    shapes = {
        "layers__0__weight": (4, 6),
        "layers__0__bias": (4,),
        "layers__1__weight": (2, 4),
        "layers__1__bias": (2,),
    }
    mlp.pretrained = arrays(**shapes)
    assert mlp(X).shape == (2, 3, 6, 2)


def test_a_layer_without_size_and_weight_says_so():
    for act in (lambda: ml.compile(Linear(None), "numpy", shapes={"input": [2, 3]}), lambda: Linear(None)(X)):
        with pytest.raises(ModelError, match="takes its number of features from a weight, but has none"):
            act()


def test_cached_programs_depend_on_the_sizes_of_weights(tmp_path):
    def result(rows):
        model = Model(Linear(None))
        model.pretrained = arrays(linear__weight=(rows, 6), linear__bias=(rows,))
        compiled = ml.compile(model, "jax", shapes={"input": [3, 6]}, cache=True, cache_dir=str(tmp_path))
        return compiled(X[0, 0, :3])["output"].shape

    assert [result(4), result(5)] == [(3, 4), (3, 5)]


def test_a_plain_array_binds_random_parameters():
    assert ml.compile(Linear(4), "numpy")(X[0, 0])["output"].shape == (6, 4)


# -- sizes from weights that are loaded ------------------------------------------------------------------------------
LATE = arrays(conv__weight=(4, 3, 3, 3), conv__bias=(4,), head__weight=(5, 24), head__bias=(5,))


def late():
    """Return a model that is compiled before any of its sizes is known."""
    return Model(Conv2d(None, kernel_size=3, name="conv"), Relu(), Pick(), Linear(None, name="head"))


class Pick(Layer):
    def build(self, x):
        return ml.ops.reshape(x[:, :, :2, :3], shape=(x.shape[0], -1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_loaded_weights_determine_sizes(backend, tmp_path):
    reference = late()
    reference.pretrained = LATE
    expected = reference(X)
    loaded, bound, passed, read = (ml.compile(late(), backend) for _ in range(4))
    assert loaded.load_state_dict(LATE).complete
    assert loaded.get_shapes()["output"][1] == 5
    loaded.save(tmp_path / "weights.safetensors")
    read.load(tmp_path / "weights.safetensors")
    calls = [loaded(X), bound.bind(LATE)(X), passed.evaluate(LATE, {"input": X}), read(X)]
    for outputs in calls:
        np.testing.assert_allclose(loaded.backend.to_numpy(outputs["output"]), expected, rtol=2e-5, atol=1e-5)


def test_tensors_that_determine_no_size_are_named():
    compiled = ml.compile(late(), "numpy")
    with pytest.raises(ModelError, match=r"takes its number of channels from a weight(.|\n)*tensors: cov.weight, cov"):
        compiled.load_state_dict({name.replace("conv", "cov"): x for name, x in LATE.items()})
    with pytest.raises(InputError, match="missing: head.bias"):
        compiled.load_state_dict({name: x for name, x in LATE.items() if name != "head.bias"})
    tall = {**LATE, "conv.bias": np.ones(3, np.float32)}
    with pytest.raises(InputError, match=r"mismatched: conv.bias: expected \[4\], got \[3\]"):
        compiled.load_state_dict(tall)
    compiled.load_state_dict(LATE)  # no size of the refused tensors is left
    assert compiled(X)["output"].shape == (2, 5)
    compiled.load_state_dict({**LATE, "head.weight": np.ones((5, 25), np.float32)})  # depends on the size of images
    with pytest.raises(InputError, match=r"parameter 'head.weight' has shape \[5, 25\], expected \[5, 24\]"):
        compiled(X)


def test_refused_parameters_of_a_call_leave_no_sizes():
    compiled = ml.compile(Linear(None), "numpy")
    x = X[0, 0]
    with pytest.raises(InputError, match="missing: 'bias'"):
        compiled.evaluate(arrays(weight=(3, 6)), {"input": x})
    with pytest.raises(InputError, match=r"parameter 'bias' has shape \[4\], expected \[3\]"):
        compiled.evaluate(arrays(weight=(3, 6), bias=(4,)), {"input": x})
    assert not compiled.programs
    assert compiled.evaluate(arrays(weight=(5, 6), bias=(5,)), {"input": x})["output"].shape == (6, 5)


def test_cached_programs_depend_on_loaded_sizes(tmp_path):
    for features in (3, 5):
        compiled = ml.compile(Linear(None), "numpy", cache=True, cache_dir=str(tmp_path))
        compiled.load_state_dict(arrays(weight=(features, 6), bias=(features,)))
        assert compiled(X[0, 0])["output"].shape == (6, features)
