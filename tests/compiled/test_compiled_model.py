"""The compiled model: calls, gradients, state, inspection, weights."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import mithril as ml
from mithril.graph.errors import InputError, UnsupportedError
from mithril.models import (
    GRU,
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    CrossEntropy,
    Dropout,
    Embedding,
    InstanceNorm2d,
    LayerNorm,
    Linear,
    Model,
    MSELoss,
    MultiHeadAttention,
    Relu,
    Sequential,
)


def mlp(hidden=8):
    model = Model()
    model |= Linear(hidden, name="first")(input="x", output="h")
    model += Relu()(input="h", output="r")
    model += Linear(2, name="second")(input="r", output="y")
    return model


def with_loss():
    model = mlp()
    model |= MSELoss()(predictions="y", targets="t", output="loss")
    model.set_outputs("y", "loss")
    return model


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def numbers(compiled, arrays):
    return {n: compiled.backend.to_numpy(v) for n, v in arrays.items()}


# -- calling ------------------------------------------------------------------------------------------------------
def test_three_forms_of_evaluate(backend):
    compiled = ml.compile(mlp(), backend, shapes={"x": [4, 3]})
    params = compiled.randomize_params(0)
    x = random(4, 3)
    first = numbers(compiled, compiled.evaluate(params, {"x": x}))
    outputs, gradients = compiled.evaluate(params, {"x": x}, output_gradients={"y": np.ones((4, 2), np.float32)})
    assert sorted(gradients) == sorted(params)
    compiled.bind(params)
    third = numbers(compiled, compiled.evaluate({"x": x}))
    fourth = numbers(compiled, compiled({"x": x}))
    by_name = numbers(compiled, compiled.evaluate(inputs={"x": x}))
    for alternative in (numbers(compiled, outputs), third, fourth, by_name):
        np.testing.assert_allclose(alternative["y"], first["y"], rtol=1e-5, atol=1e-6)


def test_gradients_are_right(backend):
    compiled = ml.compile(mlp(), backend, shapes={"x": [4, 3]})
    params = numbers(compiled, compiled.randomize_params(0))
    x, g = random(4, 3), random(4, 2, seed=1)
    _, gradients = compiled.evaluate(params, {"x": x}, g)
    h = x @ params["first.weight"].T + params["first.bias"]
    r = np.maximum(h, 0)
    expected = {"second.weight": g.T @ r, "second.bias": g.sum(0)}
    gh = (g @ params["second.weight"]) * (h > 0)
    expected |= {"first.weight": gh.T @ x, "first.bias": gh.sum(0)}
    for name, gradient in numbers(compiled, gradients).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_gradients_of_a_named_loss(backend):
    compiled = ml.compile(with_loss(), backend, shapes={"x": [4, 3], "t": [4, 2]})
    params = compiled.randomize_params(0)
    inputs = {"x": random(4, 3), "t": random(4, 2, seed=1)}
    outputs, by_name = compiled.evaluate(params, inputs, output_gradients="loss")
    assert set(outputs) == {"y", "loss"}
    _, twice = compiled.evaluate(params, inputs, output_gradients={"loss": 2.0})
    _, one = compiled.evaluate(params, inputs, output_gradients="loss", wrt=["second.bias"])
    a, b = numbers(compiled, by_name), numbers(compiled, twice)
    for name in a:
        np.testing.assert_allclose(2 * a[name], b[name], rtol=1e-5, atol=1e-6)
    assert list(one) == ["second.bias"]
    with pytest.raises(InputError, match="'y' is not a scalar"):
        compiled.evaluate(params, inputs, output_gradients="y")
    with pytest.raises(InputError, match="'los'"):
        compiled.evaluate(params, inputs, output_gradients="los")
    with pytest.raises(InputError, match="requires the name of the output"):
        compiled.evaluate(params, inputs, output_gradients=np.ones((4, 2), np.float32))


def test_inputs_may_be_lists_numpy_or_native(backend):
    compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]})
    params = compiled.randomize_params(0)
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    results = [
        numbers(compiled, compiled.evaluate(params, {"x": variant}))["y"]
        for variant in (x, x.tolist(), compiled.backend.array(x), x.astype(np.float64).tolist())
    ]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_arrays_of_another_framework_are_taken(backend):
    torch = pytest.importorskip("torch")
    compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]})
    params = compiled.randomize_params(0)
    x = random(2, 3)
    a = numbers(compiled, compiled.evaluate(params, {"x": x}))["y"]
    b = numbers(compiled, compiled.evaluate(params, {"x": torch.from_numpy(x)}))["y"]
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"z": np.ones((2, 3), np.float32)}, "similar: 'z'|unknown: 'z'"),
        ({"x": np.ones((2, 4), np.float32)}, r"expected \[2, 3\], got \[2, 4\]"),
        ({"x": np.ones((3,), np.float32)}, r"inputs\['x'\]\[None\]|\[3\]"),
        ({"x": np.ones((2, 3), np.complex64)}, "complex64"),
        ({"x": [["a", "b", "c"]] * 2}, "x"),
        ({"x": None}, "x"),
        ({}, "missing: 'x'"),
    ],
    ids=["key", "shape", "rank", "complex", "text", "none", "nothing"],
)
def test_wrong_inputs_are_refused(backend, inputs, message):
    compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]})
    params = compiled.randomize_params(0)
    with pytest.raises(InputError, match=message):
        compiled.evaluate(params, inputs)


def test_wrong_parameters_are_refused(backend):
    compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]})
    params = dict(compiled.randomize_params(0))
    x = {"x": random(2, 3)}
    with pytest.raises(InputError, match=r"'first.weight' has shape \[3, 8\], expected \[8, 3\]"):
        compiled.evaluate({**params, "first.weight": random(3, 8)}, x)
    with pytest.raises(InputError, match="unknown: 'third.weight'"):
        compiled.evaluate({**params, "third.weight": random(3, 8)}, x)
    with pytest.raises(InputError, match="expected float32, got int64"):
        compiled.evaluate({**params, "first.bias": np.zeros(8, np.int64)}, x)
    with pytest.raises(InputError, match="bind"):
        compiled.evaluate(x)


def test_names_of_a_part_or_of_the_whole_say_how_to_rename(backend):
    part = ml.compile(Sequential(Linear(2), Linear(3)), backend, shapes={"input": [1, 3]})
    around = ml.compile(Sequential(Sequential(Linear(2), Linear(3), name="body")), backend, shapes={"input": [1, 3]})
    for source, target in [(part, around), (around, part)]:
        params = dict(source.randomize_params(0))
        with pytest.raises(InputError, match="inside 'body'") as error:
            target.evaluate(params, {"input": random(1, 3)})
        renamed = eval(error.value.hint.partition(": ")[2], {"params": params})
        assert target.evaluate(renamed, {"input": random(1, 3)})["output"].shape == (1, 3)
    with pytest.raises(InputError, match="randomize_params"):
        part.evaluate({"body.0.weight": random(2, 3)}, {"input": random(1, 3)})


def test_a_changed_parameter_is_seen_by_the_fast_path(backend):
    """The short cut for repeated calls must notice whatever may change between two calls."""
    compiled = ml.compile(mlp(), backend, shapes={"x": [None, 3]})
    params = dict(compiled.randomize_params(0))
    x = compiled.backend.array(random(2, 3))
    first = numbers(compiled, compiled.evaluate(params, {"x": x}))["y"]
    params["second.bias"] = compiled.backend.array(np.float32([5, 5]))
    second = numbers(compiled, compiled.evaluate(params, {"x": x}))["y"]
    old = numbers(compiled, compiled.randomize_params(0))["second.bias"]
    np.testing.assert_allclose(second - first, np.broadcast_to(5 - old, (2, 2)), rtol=1e-4)
    params["second.bias"] = compiled.backend.array(np.ones(3, np.float32))
    with pytest.raises(InputError):
        compiled.evaluate(params, {"x": x})
    del params["second.bias"]
    with pytest.raises(InputError):
        compiled.evaluate(params, {"x": x})


def test_whatever_changes_is_seen_by_the_fast_path_of_gradients(backend, monkeypatch):
    """Parameters are others at every call of a training; their kinds, and those of all else, are compared."""
    compiled = ml.compile(mlp(), backend, shapes={"x": [None, 3]})
    params = dict(compiled.randomize_params(0))
    array = compiled.backend.array
    x, slope = {"x": array(random(2, 3))}, {"y": array(np.ones((2, 2), np.float32))}
    compiled.evaluate(params, x, slope)
    twice = {**params, "second.bias": array(np.float32([5, 5]))}
    with monkeypatch.context() as m:
        m.setattr(compiled._evaluation, "evaluate", None)  # the way of calls that are checked
        values, slopes = compiled.evaluate(twice, x, slope)
    expected, gradients = compiled.evaluate(twice, {"x": random(2, 3)}, slope)  # NumPy's arrays have to be converted
    assert list(values) == list(expected) and list(slopes) == list(gradients)
    for left, right in ((values, expected), (slopes, gradients)):
        for name, a in numbers(compiled, left).items():
            np.testing.assert_allclose(a, numbers(compiled, right)[name], rtol=1e-5, atol=1e-6)
    for name, wrong in (("second.bias", np.ones(3, np.float32)), ("third", np.ones(2, np.float32))):
        with pytest.raises(InputError):
            compiled.evaluate({**params, name: array(wrong)}, x, slope)
    with pytest.raises(InputError):
        compiled.evaluate(params, x, {"y": array(np.ones((3, 2), np.float32))})
    assert set(compiled.evaluate(params, x, slope, wrt=("x",))[1]) == {"x"}
    assert set(compiled.evaluate(params, x, slope)[1]) == set(params)
    more = {"x": array(random(5, 3))}, {"y": array(np.ones((5, 2), np.float32))}
    assert tuple(compiled.evaluate(params, *more)[0]["y"].shape) == (5, 2)


@pytest.mark.parametrize("static", [False, True])
def test_calls_with_bound_parameters_are_checked_twice(static, monkeypatch, backend):
    compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]}, static_inference=static)
    compiled.bind(compiled.randomize_params(0))
    x = compiled.backend.array(random(2, 3))
    expected = numbers(compiled, compiled({"x": x}))["y"].copy()
    compiled({"x": x})
    monkeypatch.setattr(compiled._evaluation, "evaluate", None)  # the way of calls that are checked
    np.testing.assert_array_equal(numbers(compiled, compiled({"x": x}))["y"], expected)


def test_parameters_are_bound_before_shapes_are_known(backend):
    static = ml.compile(mlp(), backend, shapes={"x": [2, 3]})
    params, x = static.randomize_params(0), {"x": random(2, 3)}
    expected = numbers(static, static.evaluate(params, x))["y"]
    compiled = ml.compile(mlp(), backend).bind(params)
    for _ in range(3):
        np.testing.assert_allclose(numbers(compiled, compiled(x))["y"], expected, rtol=1e-6)
    with pytest.raises(InputError, match="first.wieght"):  # the weights determine the sizes, hence all names
        ml.compile(mlp(), backend).bind({"first.wieght": params["first.weight"], **params})


def test_one_input_may_be_given_without_its_name(backend):
    compiled = ml.compile(mlp(), backend, shapes={"x": [2, 3]})
    compiled.bind(compiled.randomize_params(0))
    x = random(2, 3)
    expected = numbers(compiled, compiled({"x": x}))["y"].copy()
    np.testing.assert_array_equal(numbers(compiled, compiled(x))["y"], expected)


def test_models_without_parameters_are_checked_twice(monkeypatch, backend):
    model = Model()
    model |= Relu()(input="x", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [2, 3]})
    x = compiled.backend.array(random(2, 3))
    expected = numbers(compiled, compiled({"x": x}))["y"].copy()
    compiled({"x": x})
    monkeypatch.setattr(compiled._evaluation, "evaluate", None)  # the way of calls that are checked
    np.testing.assert_array_equal(numbers(compiled, compiled({"x": x}))["y"], expected)


# -- parameters ---------------------------------------------------------------------------------------------------
def test_one_seed_gives_the_same_parameters_on_every_backend(backend):
    on_backend = ml.compile(mlp(), backend, shapes={"x": [2, 3]})
    on_numpy = ml.compile(mlp(), "numpy", shapes={"x": [2, 3]})
    a, b = numbers(on_backend, on_backend.randomize_params(5)), on_numpy.randomize_params(5)
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
    other = numbers(on_backend, on_backend.randomize_params(6))
    assert not np.array_equal(a["first.weight"], other["first.weight"])


# -- state --------------------------------------------------------------------------------------------------------
def test_dropout_draws_from_the_state(backend):
    model = Model()
    model |= Dropout(0.5)(input="x", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [4, 100]})
    x, state = np.ones((4, 100), np.float32), compiled.initial_state()
    built = []
    for _ in range(2):
        outputs, state = compiled.evaluate({}, {"x": x}, state=state, training=True)
        built.append(numbers(compiled, outputs)["y"])
    assert not np.array_equal(*built)
    assert all(set(np.unique(m)) == {0.0, 2.0} for m in built)
    again, _ = compiled.evaluate({}, {"x": x}, state=compiled.initial_state(), training=True)
    np.testing.assert_array_equal(numbers(compiled, again)["y"], built[0])
    quiet = compiled.evaluate({}, {"x": x})
    np.testing.assert_array_equal(numbers(compiled, quiet)["y"], x)


def test_batch_norm_keeps_running_statistics(backend):
    model = Model()
    model |= BatchNorm1d(name="bn")(input="x", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [None, 3]})
    params, state = compiled.randomize_params(0), compiled.initial_state()
    x = random(64, 3) * 2 + 5
    out, new = compiled.evaluate(params, {"x": x}, state=state, training=True)
    np.testing.assert_allclose(numbers(compiled, out)["y"].mean(0), 0, atol=1e-4)
    before, after = numbers(compiled, state), numbers(compiled, new)
    mean = next(n for n in after if "mean" in n)
    np.testing.assert_allclose(after[mean], 0.9 * before[mean] + 0.1 * x.mean(0), rtol=1e-4)
    resting = numbers(compiled, compiled.evaluate(params, {"x": x}))["y"]
    np.testing.assert_allclose(resting, x, rtol=1e-3, atol=1e-3)  # fresh statistics: mean 0, variance 1


def test_gradients_with_state_come_in_order(backend):
    model = Model()
    model |= Linear(4, name="l")(input="x", output="h")
    model += Dropout(0.5)(input="h", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [4, 3]})
    params, state = compiled.randomize_params(0), compiled.initial_state()
    outputs, gradients, new = compiled.evaluate(params, {"x": random(4, 3)}, np.ones((4, 4), np.float32), state=state)
    assert list(outputs) == ["y"]
    assert sorted(gradients) == ["l.bias", "l.weight"]
    assert set(new) == set(state)


def test_a_state_that_does_not_fit(backend):
    model = Model()
    model |= Dropout(0.5)(input="x", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [4, 3]})
    with pytest.raises(InputError, match="the state does not match"):
        compiled.evaluate({}, {"x": random(4, 3)}, state={}, training=True)


# -- what it knows ------------------------------------------------------------------------------------------------
def test_shapes_types_and_summary(backend):
    compiled = ml.compile(mlp(), backend, shapes={"x": ["B", 3]})
    shapes, types = compiled.get_shapes(), compiled.get_types()
    assert shapes["first.weight"] == [8, 3]
    assert str(shapes["x"][0]) == "B"
    assert str(shapes["y"][0]) == "B"
    assert shapes["y"][1] == 2
    assert types["h"] is ml.float32
    text = compiled.summary()
    for word in ("first", "second", "50 parameters"):
        assert word in text
    assert "x" in compiled.explain() or compiled.explain()
    assert backend in repr(compiled)


def test_summaries_of_model_and_program_agree():
    """Rows show the result of a layer outside of training, not its statistics or random keys."""
    model = Model()
    for layer in (Conv2d(4, kernel_size=3, name="conv"), BatchNorm2d(name="norm"), Dropout(0.5, name="drop")):
        model += layer
    shapes = {"input": [2, 3, 8, 8]}
    compiled = ml.compile(model, "numpy", shapes=shapes).summary()
    rows = {line.split()[0]: line.split()[-1] for line in compiled.splitlines()[2:-2]}
    expected = {line.split()[0]: line.split()[-2] for line in model.summary(shapes).splitlines()[3:-1]}
    assert expected.pop("drop") == "0"  # dropout does nothing outside of training
    assert rows == expected and rows.keys() == {"conv", "norm"}
    assert compiled.count("f32[2, 4, 6, 6]") == 2
    assert "120 parameters (480B), 17k" in compiled and "120 parameters (480B), 17k" in model.summary(shapes)


# -- weights ------------------------------------------------------------------------------------------------------
def test_saved_weights_are_restored(backend, tmp_path):
    model = Model()
    model |= Conv2d(4, kernel_size=3, name="conv")(input="x", output="h")
    model += BatchNorm2d(name="bn")(input="h", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [2, 3, 6, 6]})
    params = compiled.randomize_params(1)
    compiled.save(tmp_path / "w.safetensors", params, compiled.initial_state())
    other = ml.compile(model, "numpy", shapes={"x": [2, 3, 6, 6]}).load(tmp_path / "w.safetensors")
    x = random(2, 3, 6, 6)
    np.testing.assert_allclose(
        other({"x": x})["y"], numbers(compiled, compiled.evaluate(params, {"x": x}))["y"], rtol=1e-3, atol=1e-4
    )
    with pytest.raises(InputError, match="does not match this model"):
        ml.compile(mlp(), "numpy", shapes={"x": [2, 3]}).load(tmp_path / "w.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(ml.MithrilError):
        other.load(tmp_path / "bad.safetensors")
    with pytest.raises(ml.MithrilError):
        other.load(tmp_path / "none.safetensors")


def test_torch_state_dictionaries_load_by_name():
    torch = pytest.importorskip("torch")
    theirs = torch.nn.Sequential()
    theirs.add_module("conv", torch.nn.Conv2d(3, 4, 3))
    theirs.add_module("bn", torch.nn.BatchNorm2d(4))
    model = Model()
    model |= Conv2d(4, kernel_size=3, name="conv")(input="x", output="h")
    model += BatchNorm2d(name="bn")(input="h", output="y")
    compiled = ml.compile(model, "numpy", shapes={"x": [2, 3, 6, 6]})
    report = compiled.load_state_dict(theirs.state_dict())
    assert report.complete, str(report)
    x = random(2, 3, 6, 6)
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(compiled({"x": x})["y"], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["embedding", "layer_norm", "gru"])
def test_names_match_torch_for_the_common_layers(kind):
    torch = pytest.importorskip("torch")
    theirs, layer, shape = {
        "embedding": (torch.nn.Embedding(7, 4), Embedding(7, 4, name="m"), [2]),
        "layer_norm": (torch.nn.LayerNorm(4), LayerNorm(name="m"), [2, 4]),
        "gru": (torch.nn.GRU(3, 4, batch_first=True), GRU(4, name="m"), [2, 5, 3]),
    }[kind]
    model = Model()
    model |= layer(input="x", output="y")
    types = {"x": "int32"} if kind == "embedding" else {}
    compiled = ml.compile(model, "numpy", shapes={"x": shape}, types=types)
    report = compiled.load_state_dict({f"m.{n}": p for n, p in theirs.state_dict().items()})
    assert report.complete, str(report)
    x = np.array([1, 6], np.int32) if kind == "embedding" else random(*shape)
    with torch.no_grad():
        expected_output = theirs(torch.from_numpy(x))
        expected_output = expected_output[0] if isinstance(expected_output, tuple) else expected_output
    np.testing.assert_allclose(compiled({"x": x})["y"], expected_output.numpy(), rtol=1e-4, atol=1e-5)


def test_a_report_says_what_did_not_fit():
    compiled = ml.compile(mlp(), "numpy", shapes={"x": [2, 3]})
    weights = {"first.weight": random(8, 3), "second.weight": random(9, 9), "other": random(1)}
    with pytest.raises(InputError) as caught:
        compiled.load_state_dict(weights)
    for word in ("second.weight", "first.bias", "other"):
        assert word in str(caught.value)
    report = compiled.load_state_dict(weights, strict=False)
    assert not report.complete
    np.testing.assert_array_equal(compiled.params["first.weight"], weights["first.weight"])


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_tensors_without_a_place_are_rejected(kind, tmp_path):
    """Reject a bias for a layer that has none, and scales for a norm without them."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.numpy")
    theirs, layer, shape = {
        "linear": (torch.nn.Linear(3, 4), Linear(4, bias=False, name="m"), [2, 3]),
        "norm": (torch.nn.InstanceNorm2d(3, affine=True), InstanceNorm2d(name="m"), [2, 3, 4, 4]),
    }[kind]
    model = Model()
    model |= layer(input="x", output="y")
    compiled = ml.compile(model, "numpy", shapes={"x": shape})
    tensors = {f"m.{n}": p.detach().numpy() for n, p in theirs.state_dict().items()}
    safetensors.save_file(tensors, tmp_path / "theirs.safetensors")
    for load in (lambda: compiled.load_state_dict(tensors), lambda: compiled.load(tmp_path / "theirs.safetensors")):
        with pytest.raises(InputError, match=r"(?s)unexpected: .*m\.bias.*strict=False") as caught:
            load()
        assert "does not match this model" in str(caught.value)
    report = compiled.load_state_dict(tensors, strict=False)
    assert "m.bias" in report.unexpected and not report.complete


def test_running_statistics_must_not_be_left_out(tmp_path):
    """They would be zeros and ones, and the results wrong without a word."""
    safetensors = pytest.importorskip("safetensors.numpy")
    model = Model()
    model |= Linear(4, name="l")(input="x", output="h")
    model |= BatchNorm1d(name="bn")(input="h", output="g")
    model |= Dropout(0.5, name="d")(input="g", output="y")
    compiled = ml.compile(model, "numpy", shapes={"x": [2, 3]})
    tensors = {n: np.asarray(x) for n, x in compiled.randomize_params(0).items()}
    safetensors.save_file(tensors, tmp_path / "theirs.safetensors")
    for load in (lambda: compiled.load_state_dict(tensors), lambda: compiled.load(tmp_path / "theirs.safetensors")):
        with pytest.raises(InputError, match=r"(?s)missing: bn.running_mean; bn.running_var.*strict=False"):
            load()
    report = compiled.load_state_dict(tensors, strict=False)
    assert report.missing == ["bn.running_mean", "bn.running_var"]
    compiled.save(tmp_path / "ours.safetensors", tensors)
    compiled.load(tmp_path / "ours.safetensors")  # its author had the state at hand
    cached = Model()
    cached |= MultiHeadAttention(4, 2, causal=True, cache=8, name="a")(query="x", output="y")
    compiled = ml.compile(cached, "numpy", shapes={"x": [1, 2, 4]})
    assert compiled.load_state_dict(compiled.randomize_params(0)).complete  # every call writes the cache


def test_state_of_training_may_be_left_out(tmp_path):
    model = Model()
    model += Linear(4, name="l")(input="x")
    model += ml.models.Dropout(0.5, name="d")
    trained = ml.compile(model, "numpy", shapes={"x": [2, 3]})
    trained.bind(trained.randomize_params(0), {**trained.initial_state(), "d.key": np.zeros(2, np.uint32)})
    trained.save(tmp_path / "w.safetensors")
    ml.compile(model, "numpy", shapes={"x": [2, 3]}, inference=True).load(tmp_path / "w.safetensors")


# -- whole -------------------------------------------------------------------------------------------------------
def test_attention_with_a_loss_trains(backend):
    model = Model()
    model |= Embedding(11, 8)(input="tokens", output="e")
    model += MultiHeadAttention(8, heads=2, causal=True)(query="e", output="a")
    model += Linear(11)(input="a", output="logits")
    model |= CrossEntropy()(logits="logits", labels="t", output="loss")
    model.set_outputs("loss")
    compiled = ml.compile(
        model, backend, shapes={"tokens": [2, 5], "t": [2, 5]}, types={"tokens": "int32", "t": "int32"}
    )
    params = numbers(compiled, compiled.randomize_params(0))
    rng = np.random.default_rng(0)
    inputs = {"tokens": rng.integers(0, 11, (2, 5), np.int32), "t": rng.integers(0, 11, (2, 5), np.int32)}
    losses = []
    for _ in range(20):
        outputs, gradients = compiled.evaluate(params, inputs, output_gradients="loss")
        losses.append(float(numbers(compiled, outputs)["loss"]))
        params = {n: p - 0.5 * numbers(compiled, gradients)[n] for n, p in params.items()}
    assert losses[-1] < 0.7 * losses[0]


def test_neither_pickled_nor_copied():
    compiled = ml.compile(Linear(2, 3), "numpy", shapes={"input": [1, 2]})
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UnsupportedError, match="cache=True"):
            way(compiled)


@pytest.mark.parametrize("shape", [[None, 3], [0, 3]])
def test_the_mean_of_an_empty_batch_is_nan_and_silent(backend, shape, recwarn):
    model = Model()
    model += ml.models.Mean(axis=(0, 1))(input="x", output="y")
    compiled = ml.compile(model, backend, shapes={"x": shape})
    output = compiled.evaluate({}, {"x": np.zeros((0, 3), np.float32)})["y"]
    assert np.isnan(compiled.backend.to_numpy(output))
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_programs_say_what_they_are_for():
    compiled = ml.compile(Linear(2, 3), "numpy", shapes={"input": ["B", 2]})
    compiled.evaluate(compiled.randomize_params(0), {"input": np.ones((1, 2), np.float32)}, np.ones((1, 3), np.float32))
    assert [repr(p) for p in compiled.programs] == [
        "Program(input: f32[B, 2])",
        "Program(input: f32[B, 2]; training, gradients)",
    ]


def test_arrays_of_the_other_byte_order(backend):
    """Files of other platforms contain such arrays; no backend can read them directly."""
    compiled = ml.compile(Linear(4, 3), backend, shapes={"input": [2, 4]})
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    params = {n: compiled.backend.to_numpy(p) for n, p in compiled.randomize_params(0).items()}
    expected = compiled.backend.to_numpy(compiled.evaluate(params, {"input": x})["output"])
    swapped = {n: p.astype(p.dtype.newbyteorder()) for n, p in params.items()}
    for variant, arrays in ((x.astype(x.dtype.newbyteorder()), params), (x, swapped)):
        for _ in range(3):
            actual = compiled.backend.to_numpy(compiled.evaluate(arrays, {"input": variant})["output"])
            np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_parameters_are_counted_by_pattern():
    model = Model(Linear(16), Linear(3))
    compiled = ml.compile(model, "numpy", shapes={"input": ["B", 8]})
    assert (
        compiled.count_params()
        == sum(p.size for p in compiled.randomize_params(0).values())
        == 8 * 16 + 16 + 16 * 3 + 3
    )
    assert compiled.count_params("*.bias") == 19
    with pytest.raises(ml.OptionError, match="matches no parameter"):
        compiled.count_params("encoder.*")
    open_sizes = ml.compile(model, "numpy")
    with pytest.raises(ml.MithrilError, match="unknown|call"):
        open_sizes.count_params()
    open_sizes.randomize_params(0, {"input": np.ones((2, 8), np.float32)})
    assert open_sizes.count_params() == compiled.count_params()


def test_every_layer_has_a_summary():
    text = Sequential(Linear(16), Linear(3)).summary(shapes={"input": [2, 8]})
    assert "195 parameters" in text
    assert Linear(3).summary(shapes={"input": [2, 8]}).count("27") >= 1
