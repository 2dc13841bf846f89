"""``compiled.to_function()``: MLX's own transformations of compiled models."""

from __future__ import annotations

import numpy as np

import mithril as ml
from mithril.models import LayerNorm, Linear, Model, Tanh
from mithril_mlx.mlx_loader import mx


def test_grad_and_vmap():
    m = Model()
    m += Linear(6, name="first")(input="x")
    m += Tanh()
    m += LayerNorm(name="norm")
    m += Linear(2, name="second")(output="y")
    compiled = ml.compile(m, "mlx", shapes={"x": ["B", 5]})
    function, params = compiled.to_function(), compiled.randomize_params(0)
    x = mx.array(np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32))
    expected, gradients = compiled.evaluate(params, {"x": x}, {"y": mx.ones((4, 2))})
    derived = mx.grad(lambda p: function(p, x)["y"].sum())(params)
    for name, g in gradients.items():
        np.testing.assert_allclose(np.array(derived[name]), np.array(g), rtol=1e-4, atol=1e-6)
    per_row = mx.vmap(lambda row: function(params, row[None])["y"][0])(x)
    np.testing.assert_allclose(np.array(per_row), np.array(expected["y"]), rtol=1e-5, atol=1e-6)


def test_parameters_of_numpy_are_converted():
    """``bind`` keeps the arrays that it is given, also those of NumPy."""
    compiled = ml.compile(Model(Linear(2, name="first")), "mlx", shapes={"input": [3, 5]}, mixed_precision=True)
    x = np.ones((3, 5), np.float32)
    params = {name: np.array(p) for name, p in compiled.randomize_params(0).items()}
    compiled.bind(params)
    function = compiled.to_function(training=True)
    result = function(compiled.params, mx.array(x))["output"]
    expected = x @ params["first.weight"].T + params["first.bias"]
    np.testing.assert_allclose(np.array(result.astype(mx.float32)), expected, atol=2e-2)


def test_derivatives_of_empty_arrays_read_no_memory_of_others():
    """MLX sums transposed arrays without elements to whatever was in memory."""
    channels_last = ml.ops.transpose(ml.IOKey("x", shape=[None, 3, 4, 4]), perm=(0, 2, 3, 1))
    total = channels_last + ml.IOKey("b", shape=[3], trainable=True)
    compiled = ml.compile(Model.create(outputs={"y": ml.ops.transpose(total, perm=(0, 3, 1, 2))}), "mlx")
    function, b, x = compiled.to_function(training=True), {"b": mx.ones(3)}, mx.zeros((0, 3, 4, 4))
    assert function(b, x)["y"].shape == x.shape
    for _ in range(8):
        mx.eval([mx.full((n,), 7.0) for n in (1, 2, 3, 4, 8, 16) for _ in range(50)])
        derived = mx.grad(lambda b: (function(b, x)["y"] * x).sum())(b)
        assert not np.array(derived["b"]).any()
