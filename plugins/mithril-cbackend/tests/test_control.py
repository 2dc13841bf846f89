"""Branches and loops of the graph are branches and loops of the driver, which no earlier call may influence."""

import numpy as np
import pytest

from mithril import ops
from mithril.derivatives import gradients
from mithril.graph import Builder
from mithril.graph.decomposition import decompose
from mithril.graph.evaluation import evaluate
from mithril_cbackend.backend import CBackend

X = np.linspace(0.1, 1.2, 12, dtype=np.float32).reshape(3, 4)


def graph_of(function, *others):
    with Builder() as b:
        x = b.input("x", X.shape)
        result = function(x, *(b.input(n, (), dtype) for n, dtype in others))
    return b.build({"y": result})


def same(graph, *calls):
    """Build one executable and call it with these inputs in sequence."""
    executable = CBackend().build(decompose(graph, CBackend().lowers))
    for inputs in calls:
        expected = evaluate(graph, inputs)
        actual = executable({}, inputs)
        for name, reference in expected.items():
            np.testing.assert_allclose(actual[name], reference, rtol=1e-5, atol=1e-6, err_msg=str(inputs))


def flags(*values):
    return [{"x": X, "flag": np.array(v)} for v in values]


def test_each_call_takes_its_own_branch():
    graph = graph_of(lambda x, flag: ops.cond(flag, lambda v: v * 2, lambda v: v + 1, x), ("flag", "bool"))
    same(graph, *flags(True, False, False, True, True, False))


def test_a_branch_in_a_branch():
    def inner(v):
        return ops.cond(ops.sum(v) > 5.0, ops.exp, ops.tanh, v)

    graph = graph_of(lambda x, flag: ops.cond(flag, inner, lambda v: inner(v * 3), x), ("flag", "bool"))
    same(graph, *flags(True, False), {"x": X * 0.1, "flag": np.array(False)}, *flags(True))


@pytest.mark.parametrize("trips", [None, 3, 50])
def test_a_loop_whose_length_depends_on_the_data(trips):
    graph = graph_of(
        lambda x: ops.while_loop(lambda v: ops.sum(v) < 100.0, lambda v: v * 1.5 + 0.1, x, max_trips=trips)
    )
    same(graph, *({"x": X * k} for k in (1, 0.01, 50, 2)))


def test_a_loop_in_a_loop_with_a_branch_inside():
    def step(v):
        grown = ops.while_loop(lambda u: ops.sum(u) < 20.0, lambda u: u * 2, v)
        return ops.cond(ops.max(grown) > 3.0, lambda u: u - 2.0, lambda u: u * 0.5, grown)

    def body(state):
        n, v = state
        return n + 1, step(v)

    graph = graph_of(lambda x: ops.while_loop(lambda s: s[0] < 4, body, (0, x))[1])
    same(graph, *({"x": X * k} for k in (1, 0.3, 4)))


def test_a_scan_with_a_branch_inside():
    def body(carry, row):
        result = ops.cond(ops.sum(row) > 2.0, lambda u: u * 2, lambda u: u - 1.0, carry + row)
        return result, ops.sum(result)

    graph = graph_of(lambda x: ops.scan(body, ops.full(shape=(4,), value=0.0, dtype="float32"), x)[1])
    same(graph, *({"x": X * k} for k in (1, 0.2, 4)))


def test_gradients_through_a_loop():
    def total(x):
        return ops.sum(ops.while_loop(lambda v: ops.sum(v) < 60.0, lambda v: v * v + 0.5, x, max_trips=8))

    backward = gradients(graph_of(total), ["y"], ["x"])
    same(backward, *({"x": X * k, "grad/y": np.float32(1)} for k in (1, 0.3, 3)))


LOOPS = {
    "scan": lambda x, step: ops.scan(lambda h, _: (step(h), h), x, length=3)[0],
    "while": lambda x, step: ops.while_loop(lambda h: ops.sum(ops.abs(h)) < 50.0, step, x, max_trips=5),
    "branch": lambda x, step: ops.cond(ops.sum(x) > 0.0, step, lambda h: step(h * 2.0), x),
    "loop in a loop": lambda x, step: ops.scan(lambda h, _: (LOOPS["while"](h, step), h), x, length=2)[0],
}


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("role", ["constant", "param"])
@pytest.mark.parametrize("kind", LOOPS)
def test_regions_read_packed_weights(kind, role, is_read):
    """Pack the weights that regions capture; the weights are in the program as well only if they are read so."""
    weights = np.random.default_rng(0).standard_normal((24, 24)).astype("f4") / 8
    x = np.linspace(-1, 1.5, 24, dtype="f4").reshape(1, 24)
    with Builder() as b:
        data = {"data": weights} if role == "constant" else {"tags": {"bound": True}}
        w = b.input("w", weights.shape, role=role, **data)
        step = lambda h: ops.tanh(h @ ops.transpose(w)) + (w[0] if is_read else 0.5)  # noqa: E731
        y = LOOPS[kind](b.input("x", x.shape), step)
    graph = b.build({"y": y})
    executable = CBackend().build(decompose(graph, CBackend().lowers))
    program = executable.program
    params = {"w": weights} if role == "param" else {}
    stored = [c.shape == weights.shape for c in program.constants.values() if c.size >= weights.size]
    assert (True in stored) == (is_read and role == "constant")
    assert (False in stored) == (role == "constant")
    assert (len(program.packed), program.unread == {"w"}) == (len(params), role == "param" and not is_read)
    actual = executable(executable.layout.bound(params, {}), {"x": x})
    np.testing.assert_allclose(actual["y"], evaluate(graph, {**params, "x": x})["y"], rtol=1e-5, atol=1e-6)
