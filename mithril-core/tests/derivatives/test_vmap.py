"""``ml.vmap``: rows through graphs, functions, control flow, random numbers and state; refused arguments."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.derivatives.placement import place_rows
from mithril.graph import (
    Builder,
    Output,
    composite,
    evaluate,
    iterate,
    like,
    op,
    registry,
    result,
    same_shape,
    sample,
    verify,
)

N = 4


def built(function, **shapes):
    """Return the verified graph of a function of inputs; a shape may be a pair of shape and dtype."""
    with Builder() as b:
        values = []
        for name, s in shapes.items():
            shape, kind = s if len(s) == 2 and isinstance(s[1], str) else (s, "float32")
            values.append(b.input(name, shape, kind))
        returned = function(*values)
    return verify(b.build(returned if isinstance(returned, dict) else {"y": returned}))


def drawn(graph, names, seed=0):
    rng = np.random.default_rng(seed)
    values = {}
    for i in graph.arguments:
        shape = (N, *i.type.shape) if i.name in names else i.type.shape
        values[i.name] = rng.normal(size=shape).astype(i.type.dtype.numpy)
    return values


def same_as_loop(graph, names, values=None, **options):
    """Compare the graph on all rows with the graph on each; return the mapped graph."""
    values = drawn(graph, names) if values is None else values
    axes = {i.name: 0 if i.name in names else None for i in graph.arguments}
    mapped = verify(ml.vmap(graph, axes, **options))
    results = evaluate(mapped, values)
    for k in range(N):
        expected = evaluate(graph, {n: v[k] if n in names else v for n, v in values.items()})
        for name, array in expected.items():
            np.testing.assert_allclose(results[name][k], array, 1e-5, 1e-5, err_msg=f"row {k} of '{name}'")
    return mapped


def names_of(graph):
    return [n.op.name for n in graph.nodes]


# -- where rows are ------------------------------------------------------------------------------------------------
def test_unbatched_values_are_not_repeated():
    graph = built(lambda x, w, b: ops.tanh(x @ ops.exp(w) + b), x=(3,), w=(3, 5), b=(5,))
    mapped = same_as_loop(graph, {"x"})
    assert names_of(mapped) == names_of(graph)
    assert [str(v.type) for v in mapped.outputs] == ["f32[rows, 5]"]


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_axes_of_inputs_and_outputs(axis):
    graph = built(lambda x: x * 2, x=(3, 5))
    x = np.random.default_rng(0).normal(size=(N, 3, 5)).astype(np.float32)
    results = evaluate(verify(ml.vmap(graph, axis, axis)), {"x": np.moveaxis(x, 0, axis)})["y"]
    np.testing.assert_array_equal(results, np.moveaxis(x * 2, 0, axis))


def test_names_patterns_and_outputs_without_rows():
    graph = built(lambda a, b, c: {"y": a + b, "z": c * 2}, a=(2,), b=(2,), c=(2,))
    mapped = ml.vmap(graph, {"b": 1, "[c]": None}, {"z": None}, "N")
    assert [str(i.type) for i in mapped.inputs] == ["f32[N, 2]", "f32[2, N]", "f32[2]"]
    assert [str(v.type) for v in mapped.outputs] == ["f32[N, 2]", "f32[2]"]


def test_outputs_that_do_not_depend_on_rows_are_given_for_each():
    graph = built(lambda a, b: {"y": a, "z": b}, a=(), b=(2,))
    assert str(ml.vmap(graph, {"b": None}, size=5).outputs[1].type) == "f32[5, 2]"


def test_nested():
    graph = built(lambda x, w: ops.softmax(x @ w), x=(3,), w=(3, 2))
    inner = ml.vmap(graph, {"w": None})
    outer = verify(ml.vmap(inner, {"x": None, "w": 0}))
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((5, 3), (N, 3, 2)))
    results = evaluate(outer, {"x": x, "w": w})["y"]
    expected = [[evaluate(graph, {"x": row, "w": m})["y"] for row in x] for m in w]
    np.testing.assert_allclose(results, expected, 1e-5)


def test_large_composites_stay_whole():
    def block(x, q, w):
        x = ops.layer_norm(x)
        a = ops.attention(q, q, q)
        return ops.conv(x, w) + ops.sum(a)

    graph = built(block, x=(1, 3, 8), q=(1, 2, 4, 3), w=(2, 3, 3))
    assert {"layer_norm", "attention", "conv"} <= set(names_of(same_as_loop(graph, {"x", "q"})))
    grouped = same_as_loop(graph, {"x", "q", "w"}, size=N)
    assert next(n for n in grouped.nodes if n.op.name == "conv").attributes["groups"] == N


# -- functions -----------------------------------------------------------------------------------------------------
def test_a_function_of_arrays_and_of_values():
    def distance(a, b):
        return ops.sum(ops.abs(a - b))

    matrix = ml.vmap(ml.vmap(distance, in_axes=(None, 0)), in_axes=(0, None))
    x, y = np.arange(6.0).reshape(3, 2), np.arange(8.0).reshape(4, 2)
    expected = np.abs(x[:, None] - y).sum(-1)
    np.testing.assert_allclose(matrix(x, y), expected)
    graph = built(lambda a, b: matrix(a, b), a=(3, 2), b=(4, 2))
    np.testing.assert_allclose(evaluate(graph, {"a": x, "b": y})["y"], expected)


def test_a_function_reads_values_from_around_it():
    graph = built(lambda x, w: ml.vmap(lambda row: (row @ w, ops.sum(row)))(x)[0], x=(N, 3), w=(3, 2))
    values = drawn(graph, ())
    np.testing.assert_allclose(evaluate(graph, values)["y"], values["x"] @ values["w"], 1e-5)


# -- with gradients ------------------------------------------------------------------------------------------------
def test_gradients_of_rows_and_rows_of_gradients():
    graph = built(lambda x, w: ops.sum(ops.tanh(x @ w)), x=(3,), w=(3, 2))
    per_row = ml.gradients(graph, wrt=["w"])
    values = drawn(per_row, {"x", "grad/y"})
    results = evaluate(verify(ml.vmap(per_row, {"w": None})), values)["grad/w"]
    total = evaluate(verify(ml.gradients(ml.vmap(graph, {"w": None}), wrt=["w"])), values)["grad/w"]
    assert results.shape == (N, 3, 2)
    np.testing.assert_allclose(results.sum(0), total, 1e-5, 1e-6)


# -- control flow --------------------------------------------------------------------------------------------------
def doubled(x):
    return ops.while_loop(lambda s: ops.sum(s * s) < 2, lambda s: s * 2 + 1, x)


FLOWS = {
    "if": lambda x, p: ops.cond(ops.sum(p) > 0, lambda v: v * 2, lambda v: ops.exp(v), x),
    "if, one branch in rows": lambda x, p: ops.cond(ops.sum(p) > 0, lambda: x, lambda: p),
    "while": lambda x, p: ops.while_loop(lambda s: ops.sum(s * s) < 50, lambda s: s * 1.5 + 0.1 * p, x),
    "while, bounded": lambda x, p: ops.while_loop(lambda s: ops.sum(s) < 9, lambda s: s + ops.exp(p), x, max_trips=3),
    "while, a counter": lambda x, p: ops.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * p), (0, x))[1],
    "scan": lambda x, p: ops.scan(lambda c, e: (c * p + e, ops.sum(c)), p, ops.stack(x, x * 2))[1],
    "scan, backwards": lambda x, p: ops.scan(lambda c, e: (c * e + x, c), p, x, reverse=True)[1],
    "nested": lambda x, p: ops.scan(lambda c, e: (ops.cond(e > 0, lambda: c + e, lambda: doubled(c)), e), p, x)[0],
}  # fmt: skip


@pytest.mark.parametrize("place", ["branch", "branch of a step", "branch of a round"])
def test_loops_run_for_the_rows_only_that_take_their_branch(place):
    """Count the rounds: a row of the other branch would run to the bound."""

    def endless(x):  # but for positive numbers
        return ops.while_loop(lambda s: s[0] < 100.0, lambda s: (s[0] * 2.0,), (x,), max_trips=64)[0]

    def branch(x):
        return ops.cond(x > 0.0, lambda: endless(x), lambda: x - 1.0)

    def function(x):
        if place == "branch of a step":
            return ops.scan(lambda c, e: (branch(c) * 0.5 + e, None), x, np.zeros(2, np.float32))[0]
        if place == "branch of a round":
            return ops.while_loop(lambda s: s[1] < 2, lambda s: (branch(s[0]) * 0.5, s[1] + 1), (x, 0))[0]
        return branch(x)

    x = np.array([1.0, -1.0, 0.0, 3.0], np.float32)
    mapped = same_as_loop(built(function, x=()), {"x"}, {"x": x})
    loops = [n for n, _ in iterate(mapped) if n.op.name == "while" and n.attributes["max_trips"] == 64]
    rounds = []
    original = loops[0].op.reference

    def counted(*operands, regions, **attributes):
        if attributes["max_trips"] == 64:
            rounds.append(operands[0].copy())
        return original(*operands, regions=regions, **attributes)

    loops[0].op.reference = counted
    try:
        evaluate(mapped, {"x": x})
    finally:
        loops[0].op.reference = original
    assert rounds
    assert not any(going[1:3].any() for going in rounds), "rows -1 and 0 take the other branch"


@pytest.mark.parametrize("mapped_names", [("x",), ("p",), ("x", "p")], ids="-".join)
@pytest.mark.parametrize("name", FLOWS)
def test_control_flow(name, mapped_names):
    same_as_loop(built(FLOWS[name], x=(3,), p=(3,)), mapped_names)


@pytest.mark.parametrize("name", ["if", "while, bounded", "scan", "scan, backwards"])
def test_gradients_through_control_flow(name):
    graph = ml.gradients(built(FLOWS[name], x=(3,), p=(3,)), wrt=["x", "p"])
    same_as_loop(graph, {"x", "grad/y"})
    mapped = ml.vmap(built(FLOWS[name], x=(3,), p=(3,)), {"p": None})
    total = verify(ml.gradients(mapped, wrt=["x"]))
    values = drawn(graph, {"x", "grad/y"})
    rows = evaluate(ml.vmap(graph, {"p": None}), values)["grad/x"]
    np.testing.assert_allclose(evaluate(total, values)["grad/x"], rows, 1e-5, 1e-6)


# -- random numbers ------------------------------------------------------------------------------------------------
def keyed(role, function):
    with Builder() as b:
        key = b.input("rng", (2,), "uint32", role, tags={"init": "key"})
        x = b.input("x", (3,))
        outputs = function(x, key)
    if role == "input":
        return b.build(outputs)
    return b.build([Output(outputs["y"], "y"), result("state", "rng", outputs["next"])])


def drawing(x, key):
    noise = ops.normal(ops.fold_in(key, 1), shape=(3,))
    return {"y": ops.dropout(x + noise, ops.fold_in(key, 2), p=0.5), "next": ops.fold_in(key, 0)}


def test_a_key_that_is_given_means_the_same_numbers_for_all_rows():
    graph = keyed("input", drawing)
    values = {"rng": np.array([0, 7], np.uint32), "x": np.ones((N, 3), np.float32)}
    same_as_loop(graph, {"x"}, values)
    same_as_loop(graph, {"x", "rng"}, values | {"rng": np.arange(2 * N, dtype=np.uint32).reshape(N, 2)})


def test_rows_draw_apart_from_the_key_of_the_model_itself():
    mapped = verify(ml.vmap(keyed("state", drawing)))
    key = np.array([0, 7], np.uint32)
    results = evaluate(mapped, {"rng": key, "x": np.ones((N, 3), np.float32)})
    assert len({row.tobytes() for row in results["y"]}) == N
    np.testing.assert_array_equal(results["state/rng"], ops.fold_in(key, 0))
    noise = ops.normal(ops.fold_in(key, 1), shape=(N, 3))
    expected = ops.dropout(1 + noise, ops.fold_in(key, 2), p=0.5)
    np.testing.assert_allclose(results["y"], expected, 1e-6)
    outer = verify(ml.vmap(ml.vmap(keyed("state", drawing), size=2), size=N))
    nested = evaluate(outer, {"rng": key, "x": np.ones((N, 2, 3), np.float32)})["y"]
    assert len({row.tobytes() for row in nested.reshape(-1, 3)}) == 2 * N


def test_rows_draw_independently_in_loops():
    def steps(x, key):
        returned, _ = ops.scan(lambda c, i: (ops.dropout(c, ops.fold_in(key, i), p=0.5), None), x, np.arange(3))
        return {"y": returned, "next": ops.fold_in(key, 0)}

    results = evaluate(
        verify(ml.vmap(keyed("state", steps), size=16)),
        {"rng": np.array([0, 7], np.uint32), "x": np.ones((16, 3), np.float32)},
    )
    assert len({row.tobytes() for row in results["y"]}) > 2


# -- state ---------------------------------------------------------------------------------------------------------
def counting():
    with Builder() as b:
        x, total = b.input("x", ()), b.input("total", (), role="state")
        new = total + x
        return b.build([Output(new * 2, "y"), result("state", "total", new)])


def test_a_state_that_differs_between_rows_must_be_said_to():
    with pytest.raises(ml.GraphError, match=r"(?s)output 'state/total' differs between rows.*in_axes={'total': 0}"):
        ml.vmap(counting())
    mapped = ml.vmap(counting(), {"total": 0})
    results = evaluate(mapped, {"x": np.arange(3.0, dtype=np.float32), "total": np.ones(3, np.float32)})
    np.testing.assert_array_equal(results["state/total"], [1, 2, 3])


# -- what is refused -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_axes": None}, "in_axes.*expected"),
        ({"in_axes": {"z": 0}}, "'z' in in_axes matches no input"),
        ({"in_axes": 2}, "in_axes of 'x' is 2.*-2 to 1"),
        ({"in_axes": {"x": None}}, "no input has rows"),
        ({"out_axes": {"y": None}}, "output 'y' differs between rows"),
        ({"in_axes": (0,)}, "requires names"),
        ({"size": "B"}, "'B' is one of the graph's own"),
    ],
)
def test_wrong_arguments(options, message):
    graph = built(lambda x: x * 2, x=(ml.Dim("B"),))
    with pytest.raises(ml.MithrilError, match=f"(?s){message}"):
        ml.vmap(graph, **options)


def test_unsupported_arguments_are_rejected():
    with pytest.raises(ml.GraphError, match="str cannot be transformed"):
        ml.vmap("model")
    with pytest.raises(ml.GraphError, match="'argument 1' has 4 rows, expected 3"):
        ml.vmap(lambda a, b: a + b)(np.ones(3), np.ones(4))


@pytest.fixture
def own_ops():
    before = dict(registry._operations)
    yield
    registry._operations.clear()
    registry._operations.update(before)


def declared(**options):
    @op(name="acme.ranks", shape=same_shape, dtype=like, samples=[sample((2, 3))], **options)
    def ranks(x):
        """The rank of each element in its row."""
        return np.argsort(np.argsort(x, axis=-1), axis=-1).astype(x.dtype)

    ranks.no_vjp("positions")
    return ranks


def test_an_operation_without_axes_says_so(own_ops):
    ranks = declared(no_axes="nobody knows")
    with pytest.raises(ml.OperationError, match=r"(?s)'acme.ranks' cannot run on all rows.*nobody knows.*@ranks\.vmap"):
        ml.vmap(built(ranks, x=(2, 3)))


def test_an_operation_with_axes_needs_nothing(own_ops):
    same_as_loop(built(declared(axes="... n -> ... n | n whole"), x=(2, 3)), {"x"})


def test_a_rule_of_its_own(own_ops):
    ranks = declared(no_axes="nobody knows")
    ranks.vmap(lambda rows, has_rows, x: ranks(x))
    same_as_loop(built(ranks, x=(2, 3)), {"x"})
    ranks.vmap(lambda rows, has_rows, x: x[0])
    with pytest.raises(
        ml.OperationError, match=r"(?s)rows of 'acme.ranks' are f32\[2, 3\], expected f32\[rows, 2, 3\]"
    ):
        ml.vmap(built(ranks, x=(2, 3)))


def test_a_gradient_that_the_body_does_not_have_is_not_lost(own_ops):
    """Keep a composite that has another gradient than its body."""

    @composite(name="acme.rounded_product", samples=[sample((2, 3), (3, 2))])
    def rounded_product(x, w):
        """Multiply the rounded matrix."""
        return ops.dot(ops.round(x), w, contract_a=(1,), contract_b=(0,))

    rounded_product.surrogate_vjp(lambda g, y, x, w: (g @ ops.transpose(w), ops.transpose(x) @ g))
    graph = built(rounded_product, x=(2, 3), w=(3, 2))
    assert "acme.rounded_product" in names_of(same_as_loop(graph, {"x"}))
    with pytest.raises(
        ml.OperationError, match=r"(?s)'acme.rounded_product' cannot run on all rows.*@rounded_product\.vmap"
    ):
        ml.vmap(graph)


def test_a_wrong_place_is_not_taken(own_ops):
    """Shift an axis that an attribute names."""
    x = built(lambda x: ops.cumsum(x, axis=1), x=(4, 4)).nodes[0]
    place = place_rows(x.op, [v.type for v in x.operands], x.attributes, [True])
    assert place.edited(x.attributes, 3)["axis"] == 2
    assert place.axis_places == place.results == (0,)
