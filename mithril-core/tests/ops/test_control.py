"""Control flow compared with Python's, captures at any depth, and errors that name the difference."""

from __future__ import annotations

import numpy as np
import pytest

import mithril.ops as ops
from mithril.derivatives.regions import LateSums
from mithril.derivatives.reverse import Derivative
from mithril.graph import Builder, Origin, iterate, parse, structurally_equal, verify
from mithril.graph.dims import Dim
from mithril.graph.errors import DTypeError, OperationError, ParseError, ShapeError, VerificationError
from mithril.graph.evaluation import evaluate

F = np.float32
X = np.linspace(-1.0, 1.0, 12, dtype=F).reshape(4, 3)


def built(function, *types):
    """Build the verified graph of a function after a round trip through text."""
    with Builder() as b:
        result = function(*[b.input(f"x{k}", *t) for k, t in enumerate(types)])
    graph = verify(b.build(result if isinstance(result, dict) else {"y": result}))
    back = parse(str(graph))
    assert structurally_equal(back, graph)
    assert str(back) == str(graph)
    return graph


def run(graph, *arrays):
    return evaluate(graph, {f"x{k}": a for k, a in enumerate(arrays)})


# -- if -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pred", [True, False])
def test_cond_takes_one_branch(pred):
    graph = built(lambda p, x: ops.cond(p, lambda v: v * 2.0, lambda v: v - 1.0, x), ((), "bool"), ((3,),))
    np.testing.assert_array_equal(run(graph, pred, X[0])["y"], X[0] * 2 if pred else X[0] - 1)


def test_cond_with_several_results_and_plain_numbers():
    def build(p, x):
        a, b, c = ops.cond(p, lambda v: (v, 1, True), lambda v: [v + 1.0, ops.size_of(v, axis=0), ops.any(v > 0.0)], x)
        return {"a": a, "b": b, "c": c}

    graph = built(build, ((), "bool"), ((3,),))
    yes, no = run(graph, True, X[0]), run(graph, False, X[0])
    assert yes["b"] == 1 and no["b"] == 3 and yes["c"] and not no["c"]
    assert [str(v.type) for v in graph.outputs] == ["f32[3]", "i32[]", "bool[]"]


def test_a_plain_number_takes_the_other_branch_s_dtype():
    graph = built(lambda p, x: ops.cond(p, lambda: 0.0, lambda: ops.sum(x)), ((), "bool"), ((3,), "float16"))
    assert str(graph.outputs[0].type) == "f16[]"


def test_branches_capture_outer_values():
    def build(p, x, w):
        k = ops.exp(w)
        return ops.cond(p, lambda: x @ k, lambda: x)

    graph = built(build, ((), "bool"), ((4, 3),), ((3, 3),))
    node = graph.nodes[-1]
    assert [v.name for v in node.operands] == ["x0", "x1", "exp"]
    assert all(len(r.inputs) == 2 for r in node.regions)  # both take all, whichever reads it
    w = np.eye(3, dtype=F)
    np.testing.assert_allclose(run(graph, True, X, w)["y"], X @ np.exp(w), rtol=1e-6)
    np.testing.assert_array_equal(run(graph, False, X, w)["y"], X)


@pytest.mark.parametrize(
    ("then", "other", "error", "text"),
    [
        (lambda v: (v, v), lambda v: v, OperationError, "then returns 2 results, else 1"),
        (
            lambda v: v,
            lambda v: ops.cast(v, dtype="float64"),
            DTypeError,
            "result 0 of else is float64, but then returns float32",
        ),
        (
            lambda v: (v, v),
            lambda v: (v, v[:2]),
            ShapeError,
            "result 1 of else is f32[2], but then returns f32[3]",
        ),
        (lambda v: "no", lambda v: v, OperationError, "the then of a control flow operation returned a str"),
        (lambda v: None, lambda v: v, OperationError, "returned a NoneType"),
    ],
)
def test_branches_that_differ(then, other, error, text):
    with Builder() as b:
        p, x = b.input("p", (), "bool"), b.input("x", (3,))
        with b.at(Origin("net.gate", "model.py", 4)), pytest.raises(error) as caught:
            ops.cond(p, then, other, x)
    assert text in str(caught.value)


def test_errors_say_where():
    with Builder() as b:
        p, x = b.input("p", (), "bool"), b.input("x", (3,))
        with b.at(Origin("net.gate", "model.py", 4)), pytest.raises(ShapeError) as caught:
            ops.cond(p, lambda v: v, lambda v: v[:2], x)
    assert "layer 'net.gate' at model.py:4" in str(caught.value)
    assert "hint: reshape or broadcast one of them" in str(caught.value)


@pytest.mark.parametrize(
    ("pred", "error", "text"),
    [
        ((("p", ()), "float32"), DTypeError, "the condition of 'if' is float32, expected bool"),
        ((("p", (2,)), "bool"), ShapeError, "the condition of 'if' is bool[2], expected a scalar"),
    ],
)
def test_a_condition_is_a_bool_scalar(pred, error, text):
    with Builder() as b:
        (name, shape), dtype = pred
        p = b.input(name, shape, dtype)
        with pytest.raises(error) as caught:
            ops.cond(p, lambda: 1.0, lambda: 2.0)
    assert text in str(caught.value)


# -- while --------------------------------------------------------------------------------------------------------
def test_while_against_python():
    graph = built(
        lambda n, x: ops.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 2.0), (0, x))[1],
        ((), "int32"),
        ((3,),),
    )
    for n in (-1, 0, 1, 7):
        np.testing.assert_array_equal(run(graph, n, X[0])["y"], X[0] * 2.0 ** max(n, 0))


@pytest.mark.parametrize("bound", [0, 1, 3, 10])
def test_while_stops_at_its_bound(bound):
    graph = built(lambda n: ops.while_loop(lambda i: i < n, lambda i: i + 1, 0, max_trips=bound), ((), "int32"))
    assert run(graph, 5)["y"] == min(5, bound)


def test_while_captures_outer_values():
    graph = built(
        lambda x, w, stop: ops.while_loop(lambda v: ops.sum(v) < stop, lambda v: v @ w, x), ((3,),), ((3, 3),), ((),)
    )
    w = np.eye(3, dtype=F) * 2
    np.testing.assert_array_equal(run(graph, np.ones(3, F), w, F(20.0))["y"], np.full(3, 8.0))


@pytest.mark.parametrize(
    ("cond", "body", "error", "text"),
    [
        (
            lambda s: s[1] < 3.0,
            lambda s: (s[0], s[1]),
            ShapeError,
            "the condition of 'while' is bool[3], expected a scalar",
        ),
        (lambda s: s[0], lambda s: s, DTypeError, "the condition of 'while' is int32, expected bool"),
        (lambda s: (s[0] < 3, s[0] < 4), lambda s: s, OperationError, "returns 2 results, expected one bool"),
        (lambda s: s[0] < 3, lambda s: s[0], OperationError, "the body of 'while' returns 1 states, but takes 2"),
        (
            lambda s: s[0] < 3,
            lambda s: (s[0] + 1, s[1][:1]),
            ShapeError,
            "state 1 of 'while' after the body is f32[1], but before it was f32[3]",
        ),
        (
            lambda s: s[0] < 3,
            lambda s: (s[0] * 0.5, s[1]),
            DTypeError,
            "state 0 of 'while' after the body is float32, but before it was int32",
        ),
    ],
)
def test_states_that_change_their_type(cond, body, error, text):
    with Builder() as b:
        x = b.input("x", (3,))
        with pytest.raises(error) as caught:
            ops.while_loop(cond, body, (0, x))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda x: ops.while_loop(lambda a, b: a < 3, lambda a, b: (a, b), (0, x)),
            """the condition of a control flow operation does not fit: missing a required argument: 'b'
  its parameters: (a, b)
  it receives: a tuple of 2
hint: a tuple is one argument: unpack it in the function""",
        ),
        (
            lambda x: ops.cond(True, lambda: 1.0, lambda v: v, x),
            """the then of a control flow operation does not fit: too many positional arguments
  its parameters: ()
  it receives: one value""",
        ),
        (
            lambda x: ops.scan(lambda c: (c, None), x, x),
            """the body of a control flow operation does not fit: too many positional arguments
  its parameters: (c)
  it receives: one value, one value""",
        ),
        (
            lambda x: ops.while_loop(lambda a: a < 3, lambda a: a, 0, x),
            """max_trips of 'while' is a number of steps, got Value
hint: several states are a tuple: while_loop(cond, body, (x, y))""",
        ),
    ],
)
def test_functions_that_do_not_fit(call, text):
    with Builder() as b, pytest.raises(OperationError) as caught:
        call(b.input("x", (3,)))
    assert str(caught.value) == text


def test_while_takes_no_negative_bound():
    with Builder(), pytest.raises(OperationError, match="requires max_trips of at least 0, got -1"):
        ops.while_loop(lambda i: i < 3, lambda i: i + 1, 0, max_trips=-1)


# -- scan ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_against_python(reverse):
    def body(carry, x):
        total, product = carry
        row, scale = x
        return (total + row, product * scale), (total, scale * row)

    def build(x, s):
        (total, product), (before, scaled) = ops.scan(body, (np.zeros(3, F), 1.0), (x, s), reverse=reverse)
        return {"total": total, "product": product, "before": before, "scaled": scaled}

    graph = built(build, ((4, 3),), ((4,),))
    s = np.array([1, 2, 3, 4], F)
    actual = run(graph, X, s)
    total, before = np.zeros(3, F), [None] * 4
    for k in reversed(range(4)) if reverse else range(4):
        before[k], total = total, total + X[k]
    np.testing.assert_array_equal(actual["total"], total)
    np.testing.assert_array_equal(actual["before"], np.stack(before))
    np.testing.assert_array_equal(actual["scaled"], X * s[:, None])
    assert actual["product"] == 24


def test_scan_without_sequences_or_results():
    graph = built(lambda x: ops.scan(lambda c, none: (c * 2.0, none), x, length=5)[0], ((3,),))
    np.testing.assert_array_equal(run(graph, X[0])["y"], X[0] * 32)


def test_scan_over_nothing():
    def build(x):
        last, ys = ops.scan(lambda c, row: (c + row, ops.sum(row)), np.ones(3, F), x)
        return {"last": last, "ys": ys}

    actual = run(built(build, ((0, 3),)), X[:0])
    np.testing.assert_array_equal(actual["last"], np.ones(3))
    assert actual["ys"].shape == (0,)


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
def test_late_sums_are_of_transposed_matrices(perm):
    with Builder() as b:
        x, y, w = (b.input(name, (3, 3)) for name in "xyw")
        cotangent = ops.matmul(ops.transpose(x, perm=perm), y)
        backward = b.build({"w": cotangent}).nodes
    late = LateSums(Derivative((), (), backward, (), (), (), ()), {w: cotangent})
    assert late.terms == ({w: (x, y)} if perm == (1, 0) else {})


def test_scan_of_symbolic_length():
    T, B = Dim("T"), Dim("B", 1, 8)

    def build(x, h):
        def body(c, row):
            new = ops.tanh(c + row)
            return new, (new, ops.sum(ops.full(shape=(T, B), value=1.0)))

        last, (ys, counts) = ops.scan(body, h, x)
        return {"last": last, "ys": ys, "counts": counts}

    graph = built(build, ((T, B),), ((B,),))
    assert [str(v.type) for v in graph.outputs] == ["f32[B]", "f32[T, B]", "f32[T]"]
    for t, b in ((3, 2), (5, 1), (0, 4)):
        actual = run(graph, np.ones((t, b), F), np.zeros(b, F))
        assert actual["ys"].shape == (t, b)
        np.testing.assert_array_equal(actual["counts"], np.full(t, t * b, F))


def test_lengths_that_cannot_be_compared_become_a_guard():
    graph = built(
        lambda a, b: ops.scan(lambda c, x: (c + x[0] * x[1], None), 0.0, (a, b))[0], ((Dim("N"),),), ((Dim("M"),),)
    )
    assert [str(g) for g in graph.guards] == ["M == N"]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: ops.scan(lambda c, r: (c, r), 0.0), OperationError, "'scan' without sequences requires a length"),
        (lambda x: ops.scan(lambda c, r: c, 0.0, x), OperationError, "the body of 'scan' must return a pair"),
        (
            lambda x: ops.scan(lambda c, r: (c, r), 0.0, x, length=5),
            ShapeError,
            "sequence 0 of 'scan' has 4 steps, but the length is 5",
        ),
        (
            lambda x: ops.scan(lambda c, r: (c, r), 0.0, (x, x[:2])),
            ShapeError,
            "sequence 1 of 'scan' has 2 steps, but the length is 4",
        ),
        (lambda x: ops.scan(lambda c, r: (c, r), 0.0, (x, 1.0)), ShapeError, "sequence 1 of 'scan' is a scalar"),
        (
            lambda x: ops.scan(lambda c, r: (c + r, r), 0.0, x),
            ShapeError,
            "state 0 of 'scan' after the body is f32[3], but before it was f32[]",
        ),
        (
            lambda x: ops.scan(lambda c, r: (c, r), 0.0, "text"),
            OperationError,
            "control flow does not support operands of type str",
        ),
        (
            lambda x: ops.scan(lambda c, r: (c, r), 0.0, length=-2),
            ShapeError,
            "'scan' requires a length of at least 0, got -2",
        ),
    ],
)
def test_scans_that_do_not_fit(call, error, text):
    with Builder() as b:
        x = b.input("x", (4, 3))
        with pytest.raises(error) as caught:
            call(x)
    assert text in str(caught.value)


# -- regions ------------------------------------------------------------------------------------------------------
def test_capture_through_several_levels():
    def build(p, x, w):
        def step(c, row):
            def grow(v):
                return ops.while_loop(lambda s: ops.sum(s) < ops.sum(w), lambda s: s + ops.exp(w), v, max_trips=4)

            return ops.cond(p, grow, lambda v: v * w, c + row), None

        return ops.scan(step, np.zeros(3, F), x)[0]

    graph = built(build, ((), "bool"), ((4, 3),), ((3,),))
    w = np.full(3, 0.7, F)

    def expected(p):
        c = np.zeros(3, F)
        for row in X:
            c = c + row
            if p:
                for _ in range(4):
                    if not c.sum() < w.sum():
                        break
                    c = c + np.exp(w)
            else:
                c = c * w
        return c

    for p in (True, False):
        np.testing.assert_allclose(run(graph, p, X, w)["y"], expected(p), rtol=1e-6)
    for node, owner in iterate(graph):
        defined = {i.value for i in owner.inputs} | {v for n in owner.nodes for v in n.results}
        assert all(v in defined for v in node.operands), node


def test_declarations_in_a_body_belong_to_the_graph():
    with Builder() as b:
        x = b.input("x", (4, 3))

        def step(c, row):
            w = Builder.current().param("w", (3, 3), init="zeros")
            return ops.cond(ops.sum(c) > 0.0, lambda: c @ w + np.arange(3, dtype=F), lambda: c + row), None

        y = ops.scan(step, np.zeros(3, F), x)[0]
    graph = verify(b.build({"y": y}))
    assert [(i.name, i.role) for i in graph.inputs] == [
        ("x", "input"),
        ("constant", "constant"),
        ("w", "param"),
        ("constant_1", "constant"),
    ]
    assert dict(graph.input("w").tags) == {"init": "zeros"}
    assert all(i.role == "input" for n, _ in iterate(graph) for r in n.regions for i in r.inputs)
    assert evaluate(graph, {"x": X, "w": np.eye(3)})["y"].shape == (3,)


def test_bodies_keep_the_layer_they_come_from():
    origin = Origin("net.rnn", "model.py", 9)
    with Builder() as b:
        x = b.input("x", (4, 3))
        with b.at(origin, {"keep": "float32"}):
            y = ops.scan(lambda c, row: (ops.cond(ops.sum(c) > 0.0, lambda: c, lambda: c + row), None), 0.0 * x[0], x)[
                0
            ]
    graph = b.build({"y": y})
    assert {n.origin for n, _ in iterate(graph)} == {origin}
    assert "# net.rnn @ model.py:9" in str(graph)
    assert all(n.tags["keep"] == "float32" for n, _ in iterate(graph))


def test_a_value_returned_as_it_came_from_outside():
    def build(p, x):
        return ops.cond(p, lambda: x, lambda: ops.exp(x))

    graph = built(build, ((), "bool"), ((3,),))
    np.testing.assert_array_equal(run(graph, True, X[0])["y"], X[0])


def test_an_error_in_a_body_does_not_change_the_builder():
    with Builder() as b:
        x = b.input("x", (4, 3))
        with pytest.raises(ZeroDivisionError):
            ops.scan(lambda c, row: 1 / 0, 0.0, x)
        assert Builder.current() is b
        y = ops.exp(x)
    verify(b.build({"y": y}))


def test_a_damaged_region_is_found():
    graph = built(lambda p, x: ops.cond(p, lambda: x, lambda: ops.exp(x)), ((), "bool"), ((3,),))
    for old, new, error in (
        ("exp(%x1)", "exp(%gone)", ParseError),
        ("    graph else {", "    graph else {\n      input %more: f32[]", VerificationError),
        ("%chosen: f32[3]", "%chosen: f32[4]", VerificationError),
    ):
        assert old in str(graph)
        with pytest.raises(error):
            parse(str(graph).replace(old, new))


# -- on arrays ----------------------------------------------------------------------------------------------------
def test_arrays_compute():
    assert ops.cond(np.bool_(True), lambda v: v + 1, lambda v: v - 1, np.int32(2)) == 3
    assert ops.while_loop(lambda i: i < 10, lambda i: i * 2, 1) == 16
    (last, count), ys = ops.scan(lambda c, x: ((c[0] + x, c[1] + 1), c[0] * x), (F(0.0), 0), np.arange(5, dtype=F))
    assert last == 10 and count == 5
    np.testing.assert_array_equal(ys, [0, 0, 2, 9, 24])
    last, none = ops.scan(lambda c, x: (c * 2, None), 1, length=3)
    assert last == 8 and none is None


def test_a_composite_of_control_flow_means_the_same_on_arrays_and_in_graphs():
    from mithril.graph import registry
    from mithril.graph.declare import composite

    before = dict(registry._operations)
    try:

        @composite(name="test.horner")
        def horner(x, coefficients):
            """A polynomial."""
            return ops.scan(lambda c, a: (c * x + a, None), ops.full(shape=x.shape, value=0.0), coefficients)[0]

        a = np.array([1, -2, 3], F)
        expected = np.polyval(a, X)
        np.testing.assert_allclose(horner(X, a), expected, rtol=1e-5)
        graph = built(horner, ((4, 3),), ((3,),))
        np.testing.assert_allclose(run(graph, X, a)["y"], expected, rtol=1e-5)
    finally:
        registry._operations.clear()
        registry._operations.update(before)


# -- barriers -----------------------------------------------------------------------------------------------------
def test_a_barrier_gives_its_operands():
    def build(x, n):
        a, b = ops.barrier(x, n)
        return {"a": a, "b": b}

    graph = built(build, ((3,),), ((2,), "int32"))
    actual = run(graph, X[0], np.array([1, 2], np.int32))
    np.testing.assert_array_equal(actual["a"], X[0])
    assert actual["b"].dtype == np.int32
    assert graph.nodes[0].op.opaque


def test_stop_gradient_gives_its_operand():
    np.testing.assert_array_equal(ops.stop_gradient(X), X)
    graph = built(ops.stop_gradient, ((2,), "int32"))
    assert str(graph.outputs[0].type) == "i32[2]"
