"""``compiled.to_function()``: JAX's own transformations of compiled models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import GradientError, InputError
from mithril.models import Add, BatchNorm1d, Dropout, LayerNorm, Linear, Max, Model, Tanh, While


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


def loop(bound, inner):
    """Return a loop that ends before its bound, with a maximum and a loop in each step."""
    body = Model()
    body |= Linear(5, name="linear")(input="state", output="h")
    twice = Tanh()(input="t", output="u")
    body |= While("k < 2", twice, {"t": "h", "k": 0}, {"t": "u", "k": "k + 1"}, {"s": "t"}, inner)(output="s")
    body |= Max(axis=-1, keepdims=True)(input="s", output="top")
    body |= Add()(left="s", right="top", output="next")
    m = Model()
    states = {"state": "x", "n": 0}
    m |= While("n < 3", body, states, {"state": "next", "n": "n + 1"}, {"y": "state"}, bound)(output="y")
    return m


def test_jax_differentiates_bounded_loops():
    x, slope = rows(), jnp.asarray(np.linspace(-1, 1, 20), jnp.float32).reshape(4, 5)
    compiled = [ml.compile(loop(7, 4), "jax", shapes={"x": [4, 5]}, autodiff=kind) for kind in ("graph", "native")]
    params = compiled[0].randomize_params(0)
    expected, native = (c.evaluate(params, {"x": x}, slope)[1] for c in compiled)
    function = compiled[0].to_function()
    derived = jax.grad(lambda p: (function(p, {"x": x})["y"] * slope).sum())(params)
    for name, g in expected.items():
        np.testing.assert_allclose(native[name], g, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(derived[name], g, rtol=1e-6, atol=1e-6)


def test_a_loop_without_bound_has_no_gradient_by_jax():
    compiled = ml.compile(loop(7, None), "jax", shapes={"x": [4, 5]}, autodiff="native")
    params, x = compiled.randomize_params(0), jnp.asarray(rows())
    function = compiled.to_function()

    def total(p):
        return function(p, {"x": x})["y"].sum()

    for differentiate in (
        lambda: compiled.evaluate(params, {"x": x}, jnp.ones((4, 5))),
        lambda: jax.grad(total)(params),
        lambda: jax.grad(jax.jit(total))(params),
    ):
        with pytest.raises(GradientError) as raised:
            differentiate()
        assert str(raised.value) == (
            "JAX has no gradient of a 'while' without max_trips\n"
            "hint: pass a bound: While(..., max_trips=...), while_loop(..., max_trips=...)"
        )
    bounded = ml.compile(loop(7, 4), "jax", shapes={"x": [4, 5]}).to_function()
    expected = jax.jvp(lambda p: bounded(p, {"x": x})["y"].sum(), (params,), (params,))
    np.testing.assert_allclose(jax.jvp(total, (params,), (params,)), expected, rtol=1e-5)
    swapped = jax.vmap(lambda row: function(params, {"x": row})["y"])(jnp.stack([x, -x]))
    np.testing.assert_allclose(swapped[0], function(params, {"x": x})["y"], rtol=1e-5)
