"""Derivatives of graphs and functions, of every order, combined with each other and with rows."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, evaluate, parse, structurally_equal, verify

STEP = 1e-5


def built(function, **shapes):
    """Return the verified graph of a function of float64 inputs."""
    with Builder() as b:
        returned = function(*[b.input(name, shape, "float64") for name, shape in shapes.items()])
    return verify(b.build(returned if isinstance(returned, dict) else {"y": returned}))


def drawn(graph, seed=0):
    rng = np.random.default_rng(seed)
    return {i.name: rng.normal(size=i.type.shape) for i in graph.arguments}


def slope(graph, values, name, direction, output):
    """Return the central difference of an output in a direction of an input."""
    high, low = (evaluate(graph, values | {name: values[name] + s * STEP * direction})[output] for s in (1, -1))
    return (high - low) / (2 * STEP)


def network(x, w):
    return ops.softmax(ops.tanh(x @ w)) * ops.exp(x[0])


def energy(x, w):
    return ops.sum(ops.square(network(x, w)))


LOOPS = {
    "if": lambda x, w: ops.cond(ops.sum(x) > 0, lambda: ops.exp(x @ w), lambda: ops.sin(x @ w)),
    "while": lambda x, w: ops.while_loop(
        lambda s: ops.sum(s) < 50.0, lambda s: s * s + w[0] * w[0], x[:2], max_trips=2
    ),
    "scan": lambda x, w: ops.scan(lambda c, e: (ops.tanh(c * e) + w[1], ops.exp(c)), w[0], x)[1],
}
SHAPES = {"x": (3,), "w": (3, 2)}


# -- graphs ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["network", *LOOPS])
def test_forward_mode(name):
    graph = built(LOOPS.get(name, network), **SHAPES)
    product = verify(ml.jvp(graph, wrt=["x", "w"]))
    assert structurally_equal(parse(str(product)), product)
    assert [i.name for i in product.arguments] == ["x", "w", "tangent/x", "tangent/w"]
    values = drawn(product)
    results = evaluate(product, values)
    expected = sum(slope(graph, {n: values[n] for n in SHAPES}, n, values[f"tangent/{n}"], "y") for n in SHAPES)
    np.testing.assert_allclose(results["tangent/y"], expected, 1e-6, 1e-8)


@pytest.mark.parametrize("name", ["network", *LOOPS])
def test_jacobians_by_rows_and_by_columns(name):
    graph = built(LOOPS.get(name, network), **SHAPES)
    matrices = verify(ml.jacobian(graph))
    values = drawn(matrices)
    results = evaluate(matrices, values)
    for x in SHAPES:
        jacobian = results[f"jacobian/y/{x}"]
        assert jacobian.shape == results["y"].shape + values[x].shape
        for place in np.ndindex(values[x].shape):
            unit = np.zeros(values[x].shape)
            unit[place] = 1
            expected = slope(graph, values, x, unit, "y")
            np.testing.assert_allclose(jacobian[(..., *place)], expected, 1e-6, 1e-8)


@pytest.mark.parametrize("name", ["network", *LOOPS])
def test_hessians_and_their_products(name):
    function = LOOPS.get(name, network)
    graph = built(lambda x, w: ops.sum(ops.square(function(x, w))), **SHAPES)
    matrices, products = verify(ml.hessian(graph)), verify(ml.hvp(graph, wrt=["x", "w"]))
    values = drawn(products)
    results = evaluate(matrices, {n: values[n] for n in SHAPES})
    computed = evaluate(products, values)
    first = ml.grad(graph, wrt=["x", "w"])
    plain = {n: values[n] for n in SHAPES}
    for x in SHAPES:
        blocks = [results[f"hessian/{x}" if x == w else f"hessian/{x}/{w}"] for w in SHAPES]
        expected = sum(slope(first, plain, w, values[f"tangent/{w}"], f"grad/{x}") for w in SHAPES)
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(computed[f"hvp/{x}"], expected, 1e-6, 1e-8 * scale)
        by_matrix = sum(np.tensordot(b, values[f"tangent/{w}"], values[w].ndim) for b, w in zip(blocks, SHAPES))
        np.testing.assert_allclose(by_matrix, computed[f"hvp/{x}"], 1e-8, 1e-10 * scale)


def test_forward_mode_computes_nothing_backwards():
    graph = built(lambda x: ops.exp(ops.sin(x)), x=(3,))
    product = ml.jvp(graph)
    assert [i.name for i in product.inputs] == ["x", "tangent/x"], "no cotangent is left"
    assert len(product.nodes) <= 5, str(product)


def test_wide_jacobians_go_by_columns():
    graph = built(lambda x: ops.concat(*[ops.sin(x) * k for k in range(9)]), x=(2,))
    one_hot = next(n for n in ml.jacobian(graph).nodes if n.op.name == "eye")
    assert one_hot.attributes["n"] == 2
    tall = next(n for n in ml.jacobian(built(lambda x: ops.sum(x, axis=1), x=(2, 9))).nodes if n.op.name == "eye")
    assert tall.attributes["n"] == 2


def test_parameters_are_differentiated_unless_inputs_are_named():
    with Builder() as b:
        x, w, _ = b.input("x", (3,)), b.param("w", (3,)), b.param("count", (), "int32")
        graph = b.build({"loss": ops.sum(x * w)})
    assert ml.grad(graph).output_names == ("loss", "grad/w")
    assert ml.grad(graph, wrt="x").output_names == ("loss", "grad/x")
    assert ml.hessian(graph, wrt=["x", "w"]).output_names[-2:] == ("hessian/w/x", "hessian/w")


# -- functions ------------------------------------------------------------------------------------------------------
X, V = np.array([0.3, -1.2, 0.8]), np.array([1.0, 0.5, -2.0])


def cube(x):
    return ops.sum(x * x * x)


def test_functions_of_arrays():
    np.testing.assert_allclose(ml.grad(cube)(X), 3 * X**2)
    np.testing.assert_allclose(ml.hessian(cube)(X), np.diag(6 * X))
    np.testing.assert_allclose(ml.hvp(cube)(X, tangents=V), 6 * X * V)
    np.testing.assert_allclose(ml.jacobian(ops.sin)(X), np.diag(np.cos(X)))
    for value, product in (ml.jvp(ops.sin)(X, tangents=V), ml.vjp(ops.sin)(X, cotangents=V)):
        np.testing.assert_allclose(value, np.sin(X))
        np.testing.assert_allclose(product, np.cos(X) * V)


def test_several_arguments_and_results():
    def both(a, b):
        return a * b, ops.sum(a)

    (first, total), (da, db) = ml.vjp(both, wrt=(0, "b"))(X, V, cotangents=(np.ones(3), 2.0))
    np.testing.assert_allclose([first, da, db], [X * V, V + 2, X])
    assert total == pytest.approx(X.sum())
    _, tangents = ml.jvp(both, wrt=1)(X, V, tangents=V)
    np.testing.assert_allclose(tangents[0], X * V)
    assert tangents[1] == 0
    blocks = ml.jacobian(both, wrt=(0, 1))(X, V)
    np.testing.assert_allclose(blocks[0][1], np.diag(X))
    np.testing.assert_allclose(blocks[1][0], np.ones(3))
    second = ml.hessian(lambda a, b: ops.sum(a * b * b), wrt=(0, 1))(X, V)
    np.testing.assert_allclose(second[0][1], np.diag(2 * V))


def test_derivatives_of_derivatives():
    third = ml.grad(lambda x: ml.grad(lambda y: ml.grad(lambda z: z**4.0)(y))(x))
    np.testing.assert_allclose(third(2.0), 48.0)
    by_jvp = ml.jvp(lambda x: ml.jvp(ops.sin)(x, tangents=1.0)[1])(0.7, tangents=1.0)[1]
    np.testing.assert_allclose(by_jvp, -np.sin(0.7), 1e-6)
    forward_over_reverse = ml.jvp(ml.grad(cube))(X, tangents=V)[1]
    np.testing.assert_allclose(forward_over_reverse, 6 * X * V)
    np.testing.assert_allclose(ml.jacobian(ml.grad(cube))(X), np.diag(6 * X))


def test_with_rows():
    rows = np.stack([X, V, X + V])
    np.testing.assert_allclose(ml.vmap(ml.grad(cube))(rows), 3 * rows**2)
    np.testing.assert_allclose(ml.grad(lambda r: ops.sum(ml.vmap(cube)(r)))(rows), 3 * rows**2)
    np.testing.assert_allclose(ml.vmap(ml.hessian(cube))(rows), [np.diag(6 * row) for row in rows])
    np.testing.assert_allclose(ml.vmap(lambda r: ml.hvp(cube)(r, tangents=V))(rows), 6 * rows * V)


def test_a_gradient_penalty_is_part_of_a_loss():
    def loss(x, w):
        slopes = ml.vmap(ml.grad(lambda row: ops.sum(ops.tanh(row @ w))))(x)
        return ops.mean(ops.square(slopes))

    graph = built(loss, x=(4, 3), w=(3, 2))
    step = verify(ml.grad(graph, wrt="w"))
    values = drawn(graph)
    direction = np.random.default_rng(1).normal(size=(3, 2))
    expected = slope(graph, values, "w", direction, "y")
    np.testing.assert_allclose((evaluate(step, values)["grad/w"] * direction).sum(), expected, 1e-6)


def test_a_step_of_learning_is_differentiated():
    """Differentiate the loss after a step of gradient descent by the starting point, as in meta-learning."""

    def after(w, x):
        return energy(x, w - 0.1 * ml.grad(energy, wrt=1)(x, w))

    graph = built(lambda x, w: after(w, x), **SHAPES)
    values = drawn(graph)
    direction = np.random.default_rng(1).normal(size=(3, 2))
    computed = evaluate(verify(ml.grad(graph, wrt="w")), values)["grad/w"]
    np.testing.assert_allclose((computed * direction).sum(), slope(graph, values, "w", direction, "y"), 1e-5)


# -- what is refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ml.grad(ops.sin)(X), r"returns f64\[3\], expected one scalar.*ml\.vmap"),
        (lambda: ml.grad(cube, wrt=1)(X), "no argument 1 to differentiate by.*0 to 0"),
        (lambda: ml.grad(cube, of="y"), "'of' requires a graph or model"),
        (lambda: ml.jvp(cube)(X), "needs 'tangents', got no keyword"),
        (lambda: ml.jvp(cube)(X, tangents=(X, X)), "tangents has 2 values, expected 1"),
        (lambda: ml.grad(lambda x: "a")(X), "returned a str"),
        (lambda: ml.grad(cube)("a"), "argument 0 is a str"),
        (lambda: ml.grad(3), "int cannot be transformed"),
        (lambda: ml.grad(built(cube, x=(3,)), wrt="z"), "unknown input to differentiate by 'z'"),
        (lambda: ml.jacobian(built(cube, x=(3,)), of="z"), "unknown output 'z'"),
        (lambda: ml.grad(built(cube, x=(3,)), wrt=0), "graphs and models require names"),
        (lambda: ml.hessian(built(ops.sin, x=(3,))), "no output is a scalar"),
        (lambda: ml.grad(built(cube, x=(3,)), to="y"), "ml.grad.*has no argument 'to'|no argument 'to'"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ml.MithrilError, match=f"(?s){message}"):
        call()
