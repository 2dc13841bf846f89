"""Decomposition of composites: kept nodes, shared bodies, rejected graphs."""

from __future__ import annotations

import numpy as np
import pytest

import mithril.ops as ops
from mithril.graph import Builder, Origin, iterate, registry, structurally_equal, verify
from mithril.graph.declare import composite
from mithril.graph.decomposition import decompose
from mithril.graph.dims import Dim
from mithril.graph.errors import UnsupportedError
from mithril.graph.evaluation import evaluate

X = np.linspace(0.5, 2.0, 6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def own_op():
    """Declares composites that are gone after the test."""
    before = dict(registry._operations)
    yield composite
    registry._operations.clear()
    registry._operations.update(before)


def primitives(node):
    return not node.op.composite


def everything(node):
    return True


def graph_of(function, shape=(2, 3), dtype="float32"):
    with Builder() as b:
        result = function(b.input("x", shape, dtype))
    return b.build(result if isinstance(result, dict) else {"y": result})


def test_the_same_graph_where_nothing_changes():
    graph = graph_of(lambda x: ops.square(ops.exp(x)))
    assert decompose(graph, everything) is graph
    only_primitives = graph_of(lambda x: ops.exp(x) + 1.0)
    assert decompose(only_primitives, primitives) is only_primitives
    looped = graph_of(lambda x: ops.scan(lambda c, row: (c + row, None), np.zeros(3, np.float32), x)[0])
    assert decompose(looped, primitives) is looped


def test_bodies_replace_composites():
    graph = graph_of(lambda x: {"a": ops.log2(ops.square(x)), "b": ops.rsqrt(x)})
    result = verify(decompose(graph, primitives))
    assert not any(n.op.composite for n in result.nodes)
    assert result.output_names == ("a", "b")
    assert result.outputs == graph.outputs  # the very values, so names too
    before, after = evaluate(graph, {"x": X}), evaluate(result, {"x": X})
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_only_what_is_not_lowered():
    graph = graph_of(lambda x: ops.rsqrt(ops.square(x)))
    result = decompose(graph, lambda n: n.op.name != "rsqrt")
    assert [n.op.name for n in result.nodes] == ["square", "sqrt", "constant", "div"]
    assert result.nodes[0] is graph.nodes[0]


def test_bodies_of_bodies(own_op):
    @own_op(name="test.outer")
    def outer(x):
        """Composites of composites."""
        return ops.square(ops.rsqrt(x)) + ops.square(x)

    graph = graph_of(lambda x: outer(outer(x)))
    result = verify(decompose(graph, primitives))
    assert not any(n.op.composite for n in result.nodes)
    np.testing.assert_array_equal(evaluate(graph, {"x": X})["y"], evaluate(result, {"x": X})["y"])


def test_names_are_not_taken_twice():
    graph = graph_of(lambda x: ops.square(ops.square(x)) * ops.square(x) * 2.0)
    result = decompose(graph, primitives)
    names = [v.name for n in result.nodes for v in n.results]
    assert len(set(names)) == len(names)


def test_origins_and_tags_go_to_the_body():
    origin = Origin("net.norm", "model.py", 7)
    with Builder() as b:
        x = b.input("x", (2, 3))
        with b.at(origin, {"keep": "float32"}):
            y = ops.log2(x)
    result = decompose(b.build({"y": y}), primitives)
    assert [(n.origin, dict(n.tags)) for n in result.nodes] == [(origin, {"keep": "float32"})] * len(result.nodes)


@pytest.mark.parametrize("place", ["middle", "output", "chain"])
def test_a_body_that_hands_its_operand_through(place):
    build = {
        "middle": lambda x: ops.exp(ops.stop_gradient(x)),
        "output": lambda x: ops.stop_gradient(ops.exp(x)),
        "chain": lambda x: ops.stop_gradient(ops.stop_gradient(ops.stop_gradient(ops.exp(x)))) + ops.stop_gradient(x),
    }[place]
    graph = graph_of(build)
    result = verify(decompose(graph, primitives))
    assert "stop_gradient" not in [n.op.name for n in result.nodes]
    assert result.output_names == ("y",)
    np.testing.assert_array_equal(evaluate(graph, {"x": X})["y"], evaluate(result, {"x": X})["y"])


def test_a_body_that_gives_one_value_twice(own_op):
    @own_op(name="test.twice", results=("a", "b"))
    def twice(x):
        """Return one value as two results."""
        y = ops.exp(x)
        return y, y

    def build(x):
        a, b = twice(x)
        return {"a": a, "b": b, "sum": a + b}

    result = verify(decompose(graph_of(build), primitives))
    actual = evaluate(result, {"x": X})
    np.testing.assert_array_equal(actual["a"], np.exp(X))
    np.testing.assert_array_equal(actual["sum"], 2 * np.exp(X))
    assert [n.op.name for n in result.nodes] == ["exp", "add"]


def test_arrays_of_a_body_become_constants(own_op):
    @own_op(name="test.table")
    def table(x):
        """Holds an array."""
        return x + np.arange(3, dtype=np.float32)

    graph = graph_of(lambda x: ops.scan(lambda c, row: (table(c) * row, None), np.ones(3, np.float32), x)[0])
    result = verify(decompose(graph, primitives))
    np.testing.assert_array_equal(evaluate(result, {"x": X})["y"], evaluate(graph, {"x": X})["y"])
    body = next(n for n in result.nodes if n.op.name == "scan").regions[0]
    assert [i.role for i in body.inputs].count("constant") == 1


def test_regions_at_any_depth():
    def build(x):
        def body(c, row):
            return ops.cond(ops.greater(ops.sum(c), 3.0), lambda v: ops.square(v), lambda v: v + 1.0, c) + row, None

        return ops.scan(body, np.zeros(3, np.float32), x)[0]

    graph = graph_of(build)
    result = verify(decompose(graph, primitives))
    assert not any(n.op.composite for n, _ in iterate(result))
    np.testing.assert_array_equal(evaluate(result, {"x": X})["y"], evaluate(graph, {"x": X})["y"])


def test_guards_of_a_body_are_kept():
    with Builder() as b:
        y = ops.square(b.input("x", (Dim("N"),)) + b.input("z", (Dim("M"),)))
    graph = b.build({"y": y})
    assert graph.guards and decompose(graph, primitives).guards == graph.guards


def test_all_missing_operations_in_one_error():
    with Builder() as b:
        x = b.input("x", (2, 3))
        with b.at(Origin("net.act", "model.py", 3)):
            y = ops.tan(x)
        y = ops.cond(ops.greater(ops.sum(y), 0.0), lambda v: ops.erf(v), lambda v: ops.cos(v), y)
    graph = b.build({"y": y})
    with pytest.raises(UnsupportedError) as caught:
        decompose(graph, lambda n: n.op.name not in ("sin", "erf", "tan", "cos"))
    assert str(caught.value) == (
        "the backend does not support 3 operations: cos, erf, sin\n"
        "  'cos', 2 times, first in layer 'net.act' at model.py:3\n"
        "  'erf', 1 time\n"
        "  'sin', 1 time, first in layer 'net.act' at model.py:3\n"
        "hint: choose another backend, or register lowerings for them with the hook mithril_lowerings"
    )


def test_decomposition_is_idempotent():
    graph = graph_of(lambda x: ops.log2(ops.square(x)))
    once = decompose(graph, primitives)
    assert decompose(once, primitives) is once
    assert not structurally_equal(once, graph)


def test_an_absent_operand_in_the_middle():
    graph = graph_of(lambda x: ops.layer_norm(x, None, np.arange(3, dtype=np.float32)))
    lowered = decompose(graph, primitives)
    verify(lowered)
    centered = X - X.mean(-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) + np.arange(3)
    np.testing.assert_allclose(evaluate(lowered, {"x": X})["y"], expected, rtol=1e-5)
