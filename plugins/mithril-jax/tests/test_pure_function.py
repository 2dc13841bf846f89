"""``compiled.to_function()``: JAX's own transformations of compiled models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import GradientError, InputError
from mithril.models import BatchNorm1d, Dropout, LayerNorm, Linear, Model, Tanh


def model():
    m = Model()
    m += Linear(6, name="first")(input="x")
    m += Tanh()
    m += LayerNorm(name="norm")
    m += Linear(2, name="second")(output="y")
    return m


def rows(n=4):
    return jnp.asarray(np.random.default_rng(0).standard_normal((n, 5)), jnp.float32)


def test_grad_jit_vmap_and_hessian():
    compiled = ml.compile(model(), "jax", shapes={"x": ["B", 5]})
    function, params, x = compiled.to_function(), compiled.randomize_params(0), rows()
    expected, gradients = compiled.evaluate(params, {"x": x}, {"y": jnp.ones((4, 2))})
    np.testing.assert_allclose(function(params, x)["y"], expected["y"], rtol=1e-6)
    derived = jax.jit(jax.grad(lambda p: function(p, {"x": x})["y"].sum()))(params)
    for name, g in gradients.items():
        np.testing.assert_allclose(derived[name], g, rtol=1e-4, atol=1e-6)
    per_row = jax.vmap(lambda row: function(params, row[None])["y"][0])(x)
    np.testing.assert_allclose(per_row, expected["y"], rtol=1e-5, atol=1e-6)
    hessian = jax.hessian(lambda row: function(params, row[None])["y"].sum())(x[0])
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-4, atol=1e-5)
    assert np.abs(hessian).max() > 1e-3


def test_training_returns_the_new_state():
    m = Model()
    m += BatchNorm1d(name="bn")(input="x")
    m += Dropout(0.5)(output="y")
    compiled = ml.compile(m, "jax", shapes={"x": ["B", 5]})
    function, params, state = (
        compiled.to_function(training=True),
        compiled.randomize_params(0),
        compiled.initial_state(),
    )
    outputs, new = jax.jit(function)(params, rows(), state)
    expected, expected_state = compiled.evaluate(params, {"x": rows()}, training=True, state=state)
    np.testing.assert_allclose(outputs["y"], expected["y"], rtol=1e-5)
    for name, value in expected_state.items():
        np.testing.assert_allclose(new[name], value, rtol=1e-6)


def test_zeros_and_embedded_parameters_are_refused():
    class Rounded(ml.models.Layer):
        def build(self, x):
            return x @ ops.round(self.param("w", (5, 2), "normal"))

    with pytest.raises(GradientError, match="zeros as the gradient of 'w'"):
        ml.compile(Rounded(), "jax").to_function()({"w": jnp.ones((5, 2))}, rows())
    static = ml.compile(model(), "jax", shapes={"x": [4, 5]}, static_inference=True)
    with pytest.raises(InputError, match="embeds the parameters"):
        static.to_function()(static.randomize_params(0), rows())
    with pytest.raises(InputError, match="no training mode"):
        ml.compile(model(), "jax", inference=True).to_function(training=True)


def test_arguments_are_not_converted():
    compiled = ml.compile(model(), "jax", shapes={"x": ["B", 5]}, types={"x": "float32"})
    function, params = compiled.to_function(), compiled.randomize_params(0)
    with pytest.raises(InputError, match="expected float32, got int32"):
        function(params, jnp.ones((4, 5), jnp.int32))
    with pytest.raises(InputError, match="axis 1 of input 'x' is 6"):
        function(params, jnp.ones((4, 6)))


def test_the_precision_of_products_holds_in_the_function():
    compiled = ml.compile(Model(Linear(3)), "jax", shapes={"input": [2, 4]}, jax_options={"precision": "highest"})
    function, params = compiled.to_function(), compiled.randomize_params(seed=0)
    program = str(jax.make_jaxpr(lambda p, x: function(p, {"input": x}))(params, jax.numpy.ones((2, 4))))
    assert "HIGHEST" in program
