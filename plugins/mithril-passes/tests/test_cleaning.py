"""Dead code, constant folding, common subexpressions: on the kit's graphs, with their limits."""

from __future__ import annotations

import numpy as np
import pytest

from mithril.graph import Builder, Origin, verify
from mithril.graph.evaluation import evaluate
from mithril.ops import cond, exp, iota, neg, relu, scan, uniform, while_loop
from mithril_passes.cleaning.cleanup import FOLD_LIMIT, common_subexpression, constant_folding, dead_code_elimination
from mithril_testing import PassConformance


class TestDeadCode(PassConformance):
    pass_ = "dead-code"


class TestConstantFolding(PassConformance):
    pass_ = "constant-folding"


class TestCommonSubexpression(PassConformance):
    pass_ = "common-subexpression"


def names(graph):
    return [node.op.name for node in graph.nodes]


def built(write, *shapes):
    with Builder() as b:
        outputs = write(b, *[b.input(f"x{k}", shape) for k, shape in enumerate(shapes)])
    return b.build(outputs if isinstance(outputs, dict) else {"y": outputs})


def test_unused_nodes_are_removed():
    def write(b, x):
        exp(neg(x))
        b.constant(np.ones(3, np.float32))
        return relu(x)

    result = dead_code_elimination(built(write, (3,)))
    assert names(result) == ["relu"]
    assert [i.name for i in result.inputs] == ["x0"]


def test_inputs_stay_even_unread():
    assert len(dead_code_elimination(built(lambda b, x, y: neg(x), (3,), (3,))).inputs) == 2


def test_a_clean_graph_is_the_same_object():
    graph = built(lambda b, x: neg(x), (3,))
    for one in (dead_code_elimination, constant_folding, common_subexpression):
        assert one(graph) is graph


def test_control_flow_has_no_unread_results():
    def branch(b, x, w):
        test = b.input("test", (), "bool")
        return cond(test, lambda x, w: (neg(x), exp(w)), lambda x, w: (x, w), x, w)[0]

    def loop(b, x, w):
        counted = while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, exp(s[1]), x + w), (0, w, x))
        return counted[2]  # whose new value does not depend on the old one

    def steps(b, x, w):
        _, (rows, _) = scan(
            lambda c, e: ((c[0] + e[0], c[1] * e[1], c[0] + c[2]), (c[2], exp(e[1]))), (x[0], w[0], x[1]), (x, w)
        )
        return rows

    for write, results, operands in (
        (branch, 1, ["test", "x0"]),
        (loop, 2, ["constant", "x0", "x0", "x1"]),
        (steps, 3, None),
    ):
        graph = built(write, (2, 3), (2, 3))
        cleaned = dead_code_elimination(graph)
        verify(cleaned)
        (before,), (after,) = [[n for n in g.nodes if n.regions] for g in (graph, cleaned)]
        assert len(before.results) > len(after.results) == results
        assert not any("exp" in names(region) for region in after.regions)
        if operands is not None:
            assert [v.name for v in after.operands] == operands
        else:
            assert after.attributes["carries"] == 2 and after.attributes["sequences"] == 1
        assert dead_code_elimination(cleaned) is cleaned
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        inputs = {"x0": x, "x1": x + 1.0} | ({"test": np.array(False)} if write is branch else {})
        np.testing.assert_array_equal(evaluate(cleaned, inputs)["y"], evaluate(graph, inputs)["y"])


def test_equal_expressions_are_computed_once():
    result = common_subexpression(built(lambda b, x: exp(x + 1.0) * exp(x + 1.0), (3,)))
    assert names(result).count("exp") == 1
    verify(result)


def test_commuted_operands_are_equal():
    assert names(common_subexpression(built(lambda b, x, y: (x + y) * (y + x), (3,), (3,)))).count("add") == 1
    assert names(common_subexpression(built(lambda b, x, y: (x - y) * (y - x), (3,), (3,)))).count("sub") == 2


def test_signed_zeros_are_not_equal():
    graph = built(lambda b, x: {"y": x * 0.0, "z": x * -0.0}, (3,))
    assert names(common_subexpression(graph)).count("mul") == 2


def test_equal_parameters_are_not_merged():
    with Builder() as b:
        x, v, w = b.input("x", (2, 3)), b.param("v", (3, 3)), b.param("w", (3, 3))
        y = (x @ v) + (x @ w)
    assert names(common_subexpression(b.build({"y": y}))).count("matmul") == 2


def test_equal_constants_are_stored_once():
    def write(b, x):
        tables = [np.asarray(a, t) for a, t in (([0, 1], "i4"), ([0, 1], "i4"), ([0, 2], "i4"), ([0, 1], "f4"))]
        tables += [np.asarray(v, "f4") * np.ones(2, "f4") for v in (0.0, -0.0, np.nan, np.nan)]
        return {f"y{k}": x * b.constant(t) for k, t in enumerate(tables)}

    graph = dead_code_elimination(common_subexpression(built(write, (2,))))
    assert [i.role for i in graph.inputs].count("constant") == 6
    assert names(graph).count("mul") == 6
    verify(graph)


def test_draws_merge_for_one_key_only():
    with Builder() as b:
        first, second = (b.input(n, (2,), "uint32") for n in ("k1", "k2"))
        total = uniform(first, shape=(4,)) + uniform(second, shape=(4,)) + uniform(first, shape=(4,))
    assert names(common_subexpression(b.build({"y": total}))).count("uniform") == 2


def test_constants_are_computed_now():
    graph = built(lambda b, x: x + exp(b.constant(np.zeros(3, np.float32))) * 2.0, (3,))
    result = dead_code_elimination(constant_folding(graph))
    assert names(result) == ["add"]
    np.testing.assert_array_equal(evaluate(result, {"x0": np.ones(3, np.float32)})["y"], [3, 3, 3])


def test_scalars_stay_scalars():
    result = dead_code_elimination(constant_folding(built(lambda b, x: x * (b.constant(2.0) * 3.0), (3,))))
    assert names(result) == ["constant", "mul"]
    assert result.nodes[0].attributes["value"] == 6.0


def test_expressions_of_inputs_or_parameters_are_not_folded():
    with Builder() as b:
        w = b.param("w", (3,))
        y = exp(w)
    graph = b.build({"y": y})
    assert constant_folding(graph) is graph


@pytest.mark.parametrize("size", [FOLD_LIMIT, FOLD_LIMIT + 1])
def test_large_constants_are_not_made(size):
    small, large = np.zeros(1, np.float32), np.zeros(size, np.float32)
    result = constant_folding(built(lambda b, x: x + exp(b.constant(small)) + exp(b.constant(large)), (1,)))
    assert names(result).count("exp") == (size > FOLD_LIMIT)


def test_bodies_of_loops_are_left_to_run():
    def write(b, x):
        return while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2.0), (b.constant(0), x))[1]

    graph = built(write, (3,))
    result = constant_folding(graph)
    verify(result)
    np.testing.assert_array_equal(evaluate(result, {"x0": np.ones(3, np.float32)})["y"], [8, 8, 8])


def test_made_of_nothing_is_left_to_the_backend():
    """iota and full cost less to make than to keep."""
    graph = built(lambda b, x: x + iota(shape=(3,), dtype="float32"), (3,))
    assert constant_folding(graph) is graph


@pytest.mark.parametrize(
    ("tag", "nodes"), [({"device": "a"}, 2), ({"phase": "forward"}, 2), ({"phase": "backward"}, 1)]
)
def test_nodes_with_other_tags_are_not_merged(tag, nodes):
    """Tags say where and how a node runs; only a gradient may use results of the forward part."""
    with Builder() as b:
        x = b.input("x", (3,))
        first = exp(x)
        with b.at(Origin(), tag):
            second = exp(x)
        graph = b.build({"y": first, "z": second})
    assert names(common_subexpression(graph)).count("exp") == nodes
