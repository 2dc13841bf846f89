"""Mistakes that other frameworks of this kind have made; each must be impossible here, on every backend."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.graph.errors import InputError, PluginError
from mithril.models import Clip, Conv2d, Gelu, LayerNorm, Linear, Maximum, Minimum, Model, Relu


def evaluate(model, backend, inputs, params=None, **options):
    compiled = ml.compile(model, backend, **options)
    arguments = compiled.randomize_params(0, inputs) if params is None else params
    return {n: compiled.backend.to_numpy(v) for n, v in compiled.evaluate(arguments, inputs).items()}


def conv_reference(x, w, stride=(1, 1), dilation=(1, 1), groups=1):
    """Compute a convolution by its definition."""
    n, _, height, width = x.shape
    out, per_group, kh, kw = w.shape
    rows = (height - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    columns = (width - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((n, out, rows, columns), np.float64)
    for o in range(out):
        first = o // (out // groups) * per_group
        for i in range(rows):
            for j in range(columns):
                top, left = i * stride[0], j * stride[1]
                patch = x[:, first : first + per_group, top : top + dilation[0] * kh : dilation[0]]
                patch = patch[..., left : left + dilation[1] * kw : dilation[1]]
                y[:, o, i, j] = (patch * w[o]).sum((1, 2, 3))
    return y


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_layers_of_one_kind_on_different_inputs_are_not_merged(backend):
    model = Model()
    model |= Relu()(input="a", output="x")
    model |= Relu()(input="b", output="y")
    model.set_outputs("x", "y")
    a, b = random(3, seed=1), random(3, seed=2)
    actual = evaluate(model, backend, {"a": a, "b": b})
    np.testing.assert_allclose(actual["x"], np.maximum(a, 0))
    np.testing.assert_allclose(actual["y"], np.maximum(b, 0))


def test_equal_layers_with_parameters_of_their_own_are_not_merged(backend):
    model = Model()
    model |= Linear(4)(input="x", output="a")
    model |= Linear(4)(input="x", output="b")
    model.set_outputs("a", "b")
    actual = evaluate(model, backend, {"x": random(2, 3)})
    assert np.abs(actual["a"] - actual["b"]).max() > 1e-3


@pytest.mark.parametrize(
    "settings",
    [{"dilation": 2}, {"stride": (1, 2)}, {"stride": (2, 1), "dilation": (1, 2)}, {"groups": 2}],
    ids=["dilation", "stride", "both", "groups"],
)
def test_convolution_applies_every_setting(backend, settings):
    model = Model()
    model |= Conv2d(4, kernel_size=3, bias=False, **settings)(input="x", output="y")
    x = random(2, 4, 9, 10)
    compiled = ml.compile(model, backend, shapes={"x": list(x.shape)})
    params = compiled.randomize_params(0)
    (weight,) = (compiled.backend.to_numpy(p) for p in params.values())
    actual = compiled.backend.to_numpy(compiled.evaluate(params, {"x": x})["y"])
    pairs = {k: v if isinstance(v, tuple) or k == "groups" else (v, v) for k, v in settings.items()}
    np.testing.assert_allclose(actual, conv_reference(x, weight, **pairs), rtol=1e-4, atol=1e-4)


def test_float32_stays_float32(backend):
    model = Model()
    model |= Linear(8)(input="x", output="h")
    model += Gelu()(input="h", output="g")
    model += LayerNorm()(input="g", output="y")
    model.set_outputs("h", "g", "y")
    actual = evaluate(model, backend, {"x": random(2, 4)})
    assert {v.dtype for v in actual.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Maximum(), ([0.0, 1.0, 0.5], [1.0, 0.0, 0.5])),
        (Minimum(), ([1.0, 0.0, 0.5], [0.0, 1.0, 0.5])),
    ],
    ids=["maximum", "minimum"],
)
def test_gradients_of_maximum_and_minimum(backend, layer, expected):
    model = Model()
    model |= layer(left="a", right="b", output="y")
    compiled = ml.compile(model, backend, trainable=["a", "b"])
    a, b = np.array([1.0, 3.0, 2.0], np.float32), np.array([2.0, 1.0, 2.0], np.float32)
    _, gradients = compiled.evaluate({}, {"a": a, "b": b}, np.ones(3, np.float32))
    for name, expected_dtype in zip("ab", expected):
        np.testing.assert_array_equal(compiled.backend.to_numpy(gradients[name]), expected_dtype)


def test_gradient_of_clamp(backend):
    model = Model()
    model |= Clip(low=-1.0, high=1.0)(input="x", output="y")
    compiled = ml.compile(model, backend, trainable=["x"])
    x = np.array([-2.0, 0.5, 2.0], np.float32)
    _, gradients = compiled.evaluate({}, {"x": x}, np.ones(3, np.float32))
    np.testing.assert_array_equal(compiled.backend.to_numpy(gradients["x"]), [0.0, 1.0, 0.0])


def test_a_wrong_input_shape_is_refused_before_anything_runs(backend):
    model = Model()
    model |= Linear(4)(input="x", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [2, 3]})
    params = compiled.randomize_params(0)
    with pytest.raises(InputError) as caught:
        compiled.evaluate(params, {"x": random(2, 1)})
    assert "'x'" in str(caught.value)
    assert "[2, 3]" in str(caught.value)


def test_a_missing_parameter_is_named(backend):
    model = Model()
    model |= Linear(4)(input="x", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [2, 3]})
    params = compiled.randomize_params(0)
    missing = sorted(params)[0]
    with pytest.raises(InputError, match="parameter") as caught:
        compiled.evaluate({n: p for n, p in params.items() if n != missing}, {"x": random(2, 3)})
    assert missing in str(caught.value)


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4), (2, 3, 5, 4)])
def test_layer_norm_takes_every_rank(backend, shape):
    model = Model()
    model |= LayerNorm()(input="x", output="y")
    x = random(*shape)
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    np.testing.assert_allclose(
        evaluate(model, backend, {"x": x})["y"], (x - mean) / np.sqrt(var + 1e-5), rtol=1e-4, atol=1e-5
    )


def test_a_backend_whose_framework_is_broken_says_so(monkeypatch):
    """Its name does not vanish from the list; asking for it tells the cause."""
    from mithril import plugins

    assert {"numpy", "jax"} <= set(plugins.backends())
    with pytest.raises(PluginError, match="jaxx"):
        ml.compile(Linear(2), "jaxx")
