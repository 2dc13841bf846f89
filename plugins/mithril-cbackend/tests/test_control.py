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
