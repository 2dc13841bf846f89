"""Programs in the predecessor's API: names of parameters, values, gradients, states."""

import re

import numpy as np
import pytest

import mithril as today
import mithril_compat as ml
from mithril_compat import IOKey
from mithril_compat.models import (
    L2,
    MLP,
    Add,
    Buffer,
    LeakyRelu,
    Linear,
    Max,
    Mean,
    Model,
    Multiply,
    Relu,
    SquaredError,
    Sum,
    Tanh,
    Tensor,
    TrainModel,
    functional,
)

pytestmark = pytest.mark.filterwarnings("ignore::mithril_compat.PredecessorWarning")


@pytest.fixture
def backend():
    return ml.NumpyBackend()


def drawn(compiled, seed=0):
    """Return parameters by a generator of the test, so that their order does not matter."""
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=x.shape).astype("f4") for n, x in sorted(compiled.randomize_params().items())}


def numbers(*shape):
    return np.random.default_rng(7).normal(size=shape).astype("f4")


def test_sequence_by_canonical_terminals(backend):
    model = Model()
    model |= Linear(dimension=8)
    model += Relu()
    model += Linear(dimension=3).connect(output="output")
    compiled = ml.compile(model, backend, shapes={"input": [2, 5]})
    params = drawn(compiled)
    assert {n: p.shape for n, p in params.items()} == {
        "bias_0": (8,), "bias_1": (3,), "weight_0": (8, 5), "weight_1": (3, 8)
    }  # fmt: skip
    x = numbers(2, 5)
    hidden = np.maximum(x @ params["weight_0"].T + params["bias_0"], 0)
    expected = hidden @ params["weight_1"].T + params["bias_1"]
    np.testing.assert_allclose(compiled.evaluate(params, {"input": x})["output"], expected, rtol=1e-4, atol=1e-5)


def test_unconnected_inputs_stay_separate(backend):
    model = Model()
    model |= Linear(3).connect(input="a", output="x")
    model |= Linear(3).connect(input="b", output="y")
    model |= Add().connect(left="x", right="y", output="z")
    assert model.input_keys == ["a", "b"]
    model.merge_connections("a", "b", name="image")
    model.rename_key(model.z, "total")
    model.expose_keys("total")
    compiled = ml.compile(model, backend, data_keys={"image"}, shapes={"image": [2, 4]})
    params, x = drawn(compiled), numbers(2, 4)
    weights = params["weight_0"] + params["weight_1"]
    expected = x @ weights.T + params["bias_0"] + params["bias_1"]
    np.testing.assert_allclose(compiled.evaluate(params, {"image": x})["total"], expected, rtol=1e-4, atol=1e-5)


def test_inner_connections_are_reached_from_outside(backend):
    inner = Model()
    inner += Linear(4)
    inner += Tanh()
    outer = Model()
    outer |= inner.connect(input=IOKey("input")) if "input" in inner.edges else inner
    outer |= Multiply().connect(left=inner.cout, right=Tensor(2.0), output="output")
    compiled = ml.compile(outer, backend, shapes={"input": [3, 2]})
    params, x = drawn(compiled), numbers(3, 2)
    expected = 2 * np.tanh(x @ params["weight"].T + params["bias"])
    np.testing.assert_allclose(compiled.evaluate(params, {"input": x})["output"], expected, rtol=1e-4, atol=1e-5)


def test_operators_make_layers(backend):
    x = IOKey("x")
    y = (x * 2.0 + 1.0) / 3.0 - x**2.0
    rows = y.transpose().reshape((x.shape[1], -1)).sum(axis=1, keepdim=True)
    model = Model()
    model |= Buffer().connect(input=rows[1:, :], output="output")
    compiled = ml.compile(model, backend, data_keys={"x"}, shapes={"x": [3, 4]})
    a = numbers(3, 4)
    expected = ((a * 2 + 1) / 3 - a**2).T.sum(1, keepdims=True)[1:]
    np.testing.assert_allclose(compiled.evaluate({}, {"x": a})["output"], expected, rtol=1e-4, atol=1e-5)


def test_calls_with_connections_and_functional(backend):
    @functional
    def gated(left, right):
        return Tanh()(input=left) * right

    image = IOKey("input")
    output = gated(Linear(3)(input=image), Linear(3)(input=image))
    model = Model.create(output=output)
    compiled = ml.compile(model, backend, shapes={"input": [2, 4]}, data_keys={"input"})
    params, x = drawn(compiled), numbers(2, 4)
    left, right = (x @ params[f"weight_{k}"].T + params[f"bias_{k}"] for k in (0, 1))
    np.testing.assert_allclose(
        compiled.evaluate(params, {"input": x})["output"], np.tanh(left) * right, rtol=1e-4, atol=1e-5
    )


def test_keys_of_compile(backend):
    model = Model()
    model |= Multiply().connect(left="left", right="right", output="product")
    model |= Relu().connect(input="product", output="positive")
    model.expose_keys("product", "positive")
    compiled = ml.compile(
        model,
        backend,
        constant_keys={"left": numbers(2, 3)},
        trainable_keys={"right"},
        discard_keys={"product"},
        shapes={"right": [3]},
    )
    params = drawn(compiled)
    outputs, gradients = compiled.evaluate(params, output_gradients={"positive": np.ones((2, 3), "f4")})
    product = numbers(2, 3) * params["right"]
    assert list(outputs) == ["positive"]
    np.testing.assert_allclose(outputs["positive"], np.maximum(product, 0), rtol=1e-5)
    np.testing.assert_allclose(gradients["right"], (numbers(2, 3) * (product > 0)).sum(0), rtol=1e-4, atol=1e-6)


def test_differentiability_and_types(backend):
    model = Model()
    model |= Linear(2).connect(input="input", weight="weight", bias="bias", output="output")
    model.set_differentiability(bias=False, input=True)
    model.set_types({"bias": Tensor[float]})
    model.set_shapes(input=[2, 3], bias=[2])
    model.expose_keys("output")
    compiled = ml.compile(model, backend)
    params = drawn(compiled)
    assert set(params) == {"input", "weight"}
    bias = numbers(2)
    outputs, gradients = compiled.evaluate(params, {"bias": bias}, output_gradients={"output": np.ones((2, 2), "f4")})
    np.testing.assert_allclose(outputs["output"], params["input"] @ params["weight"].T + bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients["input"], np.tile(params["weight"].sum(0), (2, 1)), rtol=1e-4, atol=1e-5)


def test_states(backend):
    model = Model()
    model |= Add().connect(left="x", right="before", output="after")
    model.bind_state_keys("before", "after", Tensor([0.0, 0.0]))
    model |= Multiply().connect(left="after", right=Tensor(2.0), output="output")
    model.expose_keys("output")
    model.set_shapes(x=[2])
    compiled = ml.compile(model, backend, data_keys={"x"})
    state, x = compiled.initial_state_dict, np.array([1, 2], "f4")
    for step in (1, 2):
        outputs, state = compiled.evaluate(data={"x": x}, state=state)
        np.testing.assert_allclose(outputs["output"], 2 * step * x)
    with pytest.raises(today.InputError, match="the model has states"):
        compiled.evaluate(data={"x": x})


def test_train_model_adds_up_losses_and_penalties(backend):
    model = Model()
    model |= Linear(4, use_bias=False).connect(input="input", weight="w1")
    model += LeakyRelu()
    model += Linear(1, use_bias=False).connect(weight="w2", output="output")
    model.expose_keys("output")
    training = TrainModel(model)
    training.add_loss(SquaredError(), [Mean(axis=0), Sum()], input="output", target="target", key_name="squares")
    training.add_loss(SquaredError(), [Max()], coef=0.5, input="output", target="target")
    training.add_regularization(L2(), 0.1, input=re.compile("w[12]"))
    training.set_shapes(input=[6, 3])
    compiled = ml.compile(training, backend, data_keys={"input", "target"})
    params, x, y = drawn(compiled), numbers(6, 3), numbers(6, 1)
    outputs, gradients = compiled.evaluate(params, {"input": x, "target": y}, output_gradients=True)
    hidden = x @ params["w1"].T
    predicted = np.where(hidden > 0, hidden, 0.01 * hidden) @ params["w2"].T
    squares = (predicted - y) ** 2
    # the first loss is a mean of 6 rows, the second a maximum of 6 elements: penalties are over their geometric mean
    penalties = 0.1 * sum((params[n] ** 2).sum() / 2 for n in ("w1", "w2")) / 6.0
    expected = squares.mean(0).sum() + 0.5 * squares.max() + penalties
    np.testing.assert_allclose(outputs["final_cost"], expected, rtol=1e-4)
    np.testing.assert_allclose(outputs["squares"], squares.mean(0).sum(), rtol=1e-4)
    assert set(gradients) == {"w1", "w2"}


def test_parameters_of_stacks_have_the_names_of_their_layers(backend):
    compiled = ml.compile(MLP([Relu(), Buffer()], [4, 1]), backend, shapes={"input": [2, 3]})
    assert sorted(compiled.randomize_params()) == ["bias0", "bias1", "weight0", "weight1"]


def test_long_names_contain_those_of_models(backend):
    block = Model(name="block")
    block |= Linear(3, name="first").connect(input="x")
    model = Model()
    model |= block.connect(x="input")
    model += Linear(2)
    compiled = ml.compile(model, backend, shapes={"input": [2, 4]}, use_short_namings=False)
    assert sorted(compiled.randomize_params()) == [
        "block_first_bias", "block_first_weight", "linear_bias", "linear_weight"
    ]  # fmt: skip


def test_a_layer_compiles_twice(backend):
    layer = Linear(2)
    shapes = [{"input": [2, 3]}, {"input": [4, 5]}]
    widths = [ml.compile(layer, backend, shapes=s).randomize_params()["weight"].shape for s in shapes]
    assert widths == [(2, 3), (2, 5)]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Linear(dimensoin=3), "Linear has no argument 'dimensoin'"),
        (lambda: Linear(3).connect(inptu="x"), "Linear has no terminal 'inptu'"),
        (lambda: Model().cout, "Model has not exactly one cout: none"),
        (lambda: ml.compile(Linear(3), ml.NumpyBackend(), data_keys={"inptu"}), "the model has no key 'inptu'"),
        (lambda: Model().add_constraint(len, ["x"]), "add_constraint is not offered"),
        (lambda: TrainModel(Linear(3)).finalize(), "a TrainModel needs a loss"),
        (lambda: Model().expose_keys("x"), "Model has no terminal 'x'"),
        (lambda: ml.compile(Linear(), ml.NumpyBackend(), shapes={"input": [2, 3]}), "the output size of Linear is unk"),
    ],
)
def test_errors_name_the_mistake(act, message):
    with pytest.raises(today.MithrilError, match=re.escape(message)):
        act()


def test_frozen_models_refuse_changes():
    model = Model()
    model += Linear(3)
    model.freeze()
    with pytest.raises(today.ModelError, match="the model is frozen"):
        model += Relu()
