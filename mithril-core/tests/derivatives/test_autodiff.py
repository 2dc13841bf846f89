"""Gradients against central differences in float64: both orders, through control flow, on random graphs."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mithril.ops as ops
from mithril.derivatives import gradients, value_and_gradients
from mithril.graph import Builder, Origin, iterate, parse, registry, verify
from mithril.graph.declare import composite, op
from mithril.graph.dims import Dim
from mithril.graph.dtypes import dtype
from mithril.graph.errors import GradientError
from mithril.graph.evaluation import evaluate
from mithril.graph.type_rules import floating, same_shape

B, T = Dim("B", 1, 32), Dim("T")
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def numbers_of_its_own(request, monkeypatch):
    """Give each test the same numbers, independent of the tests before it."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(zlib.crc32(request.node.name.encode())))


@pytest.fixture
def own_ops():
    """Operations declared by a test are gone after it."""
    before = dict(registry._operations)
    yield
    registry._operations.clear()
    registry._operations.update(before)


def built(function, *shapes, kind="float64"):
    """Build the verified graph of a function of inputs x0, x1, ...; a shape may be a pair of shape and dtype."""
    with Builder() as b:
        inputs = []
        for k, s in enumerate(shapes):
            shape, own_dtype = s if len(s) == 2 and isinstance(s[1], str) else (s, kind)
            inputs.append(b.input(f"x{k}", shape, own_dtype))
        result = function(*inputs)
    return verify(b.build(result if isinstance(result, dict) else {"y": result}))


def normal(*shape):
    return RNG.normal(size=shape)


def check(graph, arrays, outputs=("y",), wrt=None, step=1e-5, rtol=5e-6, atol=1e-7):
    """Check the gradient graph in random directions and return it."""
    arrays = {f"x{k}": a for k, a in enumerate(arrays)} if not isinstance(arrays, dict) else arrays
    if wrt is None:
        wrt = [i.name for i in graph.arguments if i.type.dtype.is_float]
    result = verify(gradients(graph, outputs, wrt))
    assert same_shape(parse(str(result)), result)
    plain = evaluate(graph, arrays)
    cotangents = {n: normal(*plain[n].shape) for n in outputs}
    names = [i.name for i in result.arguments[-len(outputs) :]]
    actual = evaluate(result, arrays | dict(zip(names, cotangents.values())))
    gradient_names = dict(zip(wrt, result.output_names[len(graph.outputs) :]))
    for name in plain:
        np.testing.assert_array_equal(actual[name], plain[name], err_msg=f"output {name}")
    for name in wrt:
        x = np.asarray(arrays[name], np.float64)
        for _ in range(2):
            d = normal(*x.shape)
            high, low = (evaluate(graph, arrays | {name: x + s * step * d}) for s in (1, -1))
            numeric = sum(float(np.sum(cotangents[n] * (high[n] - low[n]))) for n in outputs) / (2 * step)
            exact = float(np.sum(actual[gradient_names[name]] * d))
            assert exact == pytest.approx(numeric, rel=rtol, abs=atol), name
    return result


def gradient(function, *arrays, wrt=0):
    """Return the gradient of the sum of a function of plain arrays."""
    graph = built(lambda *xs: ops.sum(function(*xs)), *[(np.shape(a), np.asarray(a).dtype.name) for a in arrays])
    result = value_and_gradients(graph, "y", [f"x{wrt}"])
    return evaluate(result, {f"x{k}": a for k, a in enumerate(arrays)})[f"grad/x{wrt}"]


def opnames(graph):
    return [n.op.name for n in graph.nodes]


# -- the form of the answer ---------------------------------------------------------------------------------------
def test_forward_nodes_are_shared_and_backward_ones_follow():
    origin = Origin("net.act", "model.py", 3)
    with Builder() as b:
        x, w = b.input("x", (B, 3)), b.param("w", (3, 2))
        with b.at(origin, {"keep": "float32"}):
            y = ops.tanh(x @ w)
    graph = b.build({"y": y})
    result = verify(gradients(graph))
    n = len(graph.nodes)
    assert all(a is b for a, b in zip(result.nodes[:n], graph.nodes))
    assert result.output_names == ("y", "grad/w")
    assert [(r.role, r.of) for r in result.results] == [("output", ""), ("gradient", "w")]
    assert result.with_role("cotangent")[0].of == "y"
    assert [(i.name, i.role) for i in result.inputs] == [("x", "input"), ("w", "param"), ("grad/y", "cotangent")]
    assert str(result.input("grad/y").type) == "f32[B, 2]" and str(result.outputs[1].type) == "f32[3, 2]"
    assert all(node.tags["phase"] == "backward" for node in result.nodes[n:])
    assert all(node.origin == origin and node.tags["keep"] == "float32" for node in result.nodes[n:])
    assert "%grad/w" in str(result)
    assert result.guards == graph.guards


def test_defaults():
    with Builder() as b:
        x, w, k = b.input("x", (3,)), b.param("w", (3,)), b.param("k", (3,), "int32")
        outputs = {"loss": ops.sum(x * w), "count": ops.sum(k), "more": ops.exp(w)}
    result = gradients(b.build(outputs))
    assert [n for n in result.output_names if n.startswith("grad/")] == ["grad/w"]
    assert [i.name for i in result.arguments if i.name.startswith("grad/")] == ["grad/loss", "grad/more"]


def test_a_loss_needs_no_cotangent():
    graph = built(lambda x: {"loss": ops.sum(x * x), "other": x}, (3,))
    result = verify(value_and_gradients(graph, wrt=["x0"]))
    assert [i.name for i in result.arguments] == ["x0"]
    x = normal(3)
    actual = evaluate(result, {"x0": x})
    np.testing.assert_allclose(actual["grad/x0"], 2 * x)
    assert actual["loss"] == pytest.approx((x * x).sum())


def test_only_what_is_needed_is_computed():
    def build(x, w):
        ops.exp(x)  # unused
        aside = ops.sin(x)
        return {"y": ops.sum(x * w), "aside": aside}

    graph = built(build, (3,), (3,))
    result = gradients(graph, ["y"], ["x1"])
    assert "cos" not in opnames(result)
    assert opnames(result)[len(graph.nodes) :] == ["reshape", "broadcast_to", "mul"]


# -- broadcasting, several uses, nothing --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shapes",
    [((2, 1, 4), (3, 1)), ((), (2, 3)), ((1,), (2, 3)), ((3,), (3,)), ((2, 1), (1, 3)), ((0, 3), (3,)), ((1, 1), ())],
)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "atan2"])
def test_broadcasting(name, shapes):
    function = registry.operation(name)
    check(built(function, *shapes), [normal(*s) + 3.0 for s in shapes])


def test_broadcasting_of_symbolic_sizes():
    graph = built(lambda x, w, s: x * w + s, (B, T, 3), (T, 1), ())
    result = check(graph, [normal(2, 5, 3), normal(5, 1), normal()])
    assert [str(v.type) for v in result.outputs[1:]] == ["f64[B, T, 3]", "f64[T, 1]", "f64[]"]
    check(graph, [normal(1, 1, 3), normal(1, 1), normal()])


def test_sizes_that_are_equal_by_a_guard():
    graph = built(lambda x, y: x * y, (Dim("N"),), (Dim("M"),))
    result = check(graph, [normal(4), normal(4)])
    assert [str(v.type) for v in result.outputs[1:]] == ["f64[N]", "f64[M]"]


def test_where_and_clip_between_shapes():
    graph = built(lambda c, a, b: ops.where(c > 0.0, a, b), (3, 1), (4,), ())
    check(graph, [normal(3, 1), normal(4), normal()], wrt=["x1", "x2"])
    check(built(lambda x: ops.clip(x, low=-0.5, high=0.7), (20,)), [normal(20)])


def test_many_uses_of_one_value():
    check(built(lambda x: x * x * x + ops.exp(x) * x, (3,)), [normal(3)])

    def fan(x):
        total = x
        for k in range(200):
            total = total + x * float(k)
        return total

    result = check(built(fan, (2,)), [normal(2)])
    depth = {}
    for node in result.nodes:
        if node.tags:
            depth[node.result] = 1 + max((depth.get(v, 0) for v in node.operands), default=0)
    assert max(depth.values()) < 20  # the 201 cotangents are added as a tree


def test_an_output_that_is_an_input_and_one_given_twice():
    graph = built(lambda x: {"a": x, "b": ops.exp(x), "c": x}, (3,))
    check(graph, [normal(3)], outputs=("a", "b", "c"))
    graph = built(lambda x: dict.fromkeys("ab", ops.exp(x)), (3,))
    check(graph, [normal(3)], outputs=("a", "b"))


def test_no_influence_gives_zeros():
    graph = built(lambda x, w: ops.exp(x), (B, 3), (B, 2))
    result = verify(gradients(graph, ["y"], ["x1"]))
    actual = evaluate(result, {"x0": normal(4, 3), "x1": normal(4, 2), "grad/y": normal(4, 3)})
    assert actual["grad/x1"].shape == (4, 2) and not actual["grad/x1"].any()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.cast(ops.cast(x, dtype="int32"), dtype="float64"),
        lambda x: ops.floor(x) + ops.sign(x),
        lambda x: ops.stop_gradient(x * x),
        lambda x: ops.cast(x > 0.0, dtype="float64"),
        lambda x: ops.cast(ops.argmax(x), dtype="float64"),
    ],
)
def test_nothing_flows_through_steps_and_integers(function):
    assert not gradient(function, normal(4)).any()


def test_integers_on_the_way_choose_but_get_nothing():
    graph = built(lambda x, i: ops.take(x, i), (5,), ((3,), "int32"))
    result = check(graph, [normal(5), np.array([0, 4, 0], np.int32)])
    assert result.output_names == ("y", "grad/x0")


def test_missing_cotangents_of_several_results_are_zeros():
    def build(x, y):
        a, _ = ops.barrier(ops.exp(x), ops.sin(y))
        return a

    result = check(built(build, (3,), (2,)), [normal(3), normal(2)])
    assert opnames(result).count("barrier") == 1


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_have_the_dtype_of_their_input(kind):
    graph = built(lambda x, w: ops.sum(ops.exp(x) * 0.5 + ops.cast(w, dtype=kind)), ((3,), kind), ((3,), "float32"))
    result = verify(value_and_gradients(graph, "y", ["x0", "x1"]))
    assert [v.dtype for v in result.outputs[1:]] == [dtype(kind), dtype("float32")]


# -- special points -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (ops.abs, [-2.0, 0.0, 3.0], [-1, 0, 1]),
        (lambda x: ops.maximum(x, 0.0), [-1.0, 0.0, 1.0], [0, 0.5, 1]),
        (lambda x: ops.minimum(x, 0.0), [-1.0, 0.0, 1.0], [1, 0.5, 0]),
        (lambda x: ops.maximum(x, x), [2.0], [1]),
        (lambda x: ops.pow(x, 0.0), [0.0, 1.0], [0, 0]),
        (lambda x: ops.pow(x, 1.0), [0.0], [1]),
        (lambda x: ops.pow(x, 2.0), [0.0, -3.0], [0, -6]),
        (lambda x: ops.max(x), [1.0, 5.0, 5.0], [0, 0.5, 0.5]),
        (lambda x: ops.prod(x), [0.0, 2.0, 3.0], [6, 0, 0]),
        (lambda x: ops.prod(x), [0.0, 0.0, 3.0], [0, 0, 0]),
        (lambda x: ops.clip(x, low=0.0, high=1.0), [-1.0, 0.0, 0.5, 1.0, 2.0], [0, 1, 1, 1, 0]),
    ],
)
def test_special_points(function, x, expected):
    np.testing.assert_array_equal(gradient(function, np.array(x)), expected)


def test_the_exponent_at_a_base_of_zero():
    assert gradient(ops.pow, np.array([0.0, 2.0]), np.array([2.0, 3.0]), wrt=1).tolist() == [0, 8 * math.log(2)]


# -- composites ---------------------------------------------------------------------------------------------------
def test_composites_stay_whole_where_they_can(own_ops):
    @composite(name="test.cube")
    def cube(x):
        """No gradient of its own, with a composite inside that has one."""
        return ops.rsqrt(x) * x

    graph = built(lambda x: {"y": cube(x), "aside": ops.square(x), "whole": ops.rsqrt(x)}, (3,))
    result = check(graph, [np.abs(normal(3)) + 0.5], outputs=("y", "whole"))
    assert "test.cube" not in opnames(result)
    assert opnames(result).count("square") == 1  # not on the differentiated path, so it is not decomposed
    assert opnames(result).count("rsqrt") == 2


@pytest.mark.parametrize(
    ("lowers", "stays"),
    [(None, False), (lambda node: True, True), (lambda node: node.op is not ops.grid_sample_grad, False)],
)
def test_a_composite_with_a_kernel_for_its_gradient_stays(lowers, stays):
    graph = built(ops.grid_sample, (1, 2, 3, 3), (1, 2, 2, 2))
    result = verify(gradients(graph, ["y"], ["x0", "x1"], lowers))
    assert (opnames(result) == ["grid_sample", "grid_sample_grad"]) == stays


def test_a_composite_off_the_differentiated_path_is_not_decomposed():
    def build(x, n):
        def body(c, row):
            return (c[0] + ops.square(row), ops.square(c[1])), None

        return {"y": ops.scan(body, (n * 0.0, n), x)[0][0]}

    graph = built(build, (4, 3), (3,))
    result = check(graph, [normal(4, 3), normal(3)], wrt=["x0"])
    forward = next(n for n in result.nodes if n.op.name == "scan").regions[0]
    assert opnames(forward).count("square") == 1


# -- errors -------------------------------------------------------------------------------------------------------
def test_names_that_do_not_exist():
    graph = built(lambda weights: {"loss": ops.sum(weights), "n": ops.argmax(weights)}, (3,))
    with pytest.raises(GradientError) as caught:
        gradients(graph, ["los"], ["x0"])
    assert str(caught.value) == "unknown output 'los'\n  known: loss, n\nhint: did you mean 'loss'?"
    with pytest.raises(GradientError, match="unknown input to differentiate by 'x1'"):
        gradients(graph, ["loss"], ["x1"])
    with pytest.raises(GradientError, match="output 'n' is int32: only floats have gradients"):
        gradients(graph, ["n"])
    with pytest.raises(GradientError, match="input 'x1' is int32: only floats have gradients"):
        gradients(built(lambda x, i: ops.take(x, i), (3,), ((2,), "int32")), ["y"], ["x1"])


def test_a_loss_is_a_scalar():
    graph = built(lambda x: {"a": ops.sum(x), "b": ops.sum(x), "c": x}, (3,))
    with pytest.raises(GradientError) as caught:
        value_and_gradients(graph)
    assert str(caught.value) == "which output is the loss?\n  scalar outputs: a, b\nhint: name it"
    with pytest.raises(GradientError, match="(?s)no output is a scalar.*'y' is f64.3.*reduce it with sum"):
        value_and_gradients(built(ops.sin, (3,)))
    with pytest.raises(GradientError) as caught:
        value_and_gradients(graph, "c")
    assert "the loss 'c' is f64[3], not a scalar" in str(caught.value)
    with pytest.raises(GradientError, match="unknown output 'd'"):
        value_and_gradients(graph, "d")


def primitive(name):
    @op(shape=same_shape, dtype=floating, name=name)
    def made(x):
        """x."""
        return x

    return made


def test_an_operation_without_a_gradient(own_ops):
    lost = primitive("test.lost")
    with Builder() as b:
        x = b.input("x", (3,))
        with b.at(Origin("net.odd", "model.py", 12)):
            y = ops.exp(lost(x))
    graph = b.build({"y": y, "z": y})
    with pytest.raises(GradientError) as caught:
        gradients(graph, ["y"], ["x"])
    assert str(caught.value) == (
        "operation 'test.lost' has no gradient\n  in the gradient of 'test.lost'\n"
        "  from layer 'net.odd' at model.py:12\n"
        "hint: declare one with @test.lost.vjp, or put stop_gradient(x) before it"
    )


def test_a_missing_gradient_matters_only_on_the_way(own_ops):
    lost = primitive("test.lost")
    graph = built(lambda x, w: {"y": ops.exp(lost(w)) * x, "z": lost(x)}, (3,), (3,))
    result = verify(gradients(graph, ["y"], ["x0"]))
    assert opnames(result).count("test.lost") == 2
    graph = built(lambda x: ops.exp(ops.stop_gradient(lost(x))) * x, (3,))
    verify(gradients(graph, ["y"], ["x0"]))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda g, y, x: (g, g), "gave 2 cotangents for 1 operands"),
        (lambda g, y, x: ops.cast(g, dtype="float32"), "is f32[3], expected f64[3]"),
        (lambda g, y, x: ops.matmul(g, x[:2]), "is no dot product"),
        (lambda g, y, x: {}["scale"], "failed: KeyError: 'scale'"),
    ],
)
def test_gradients_declared_wrongly(own_ops, answer, text):
    wrong = primitive("test.wrong")
    wrong.vjp(answer)
    graph = built(lambda x: wrong(x), (3,))
    from mithril.graph.errors import MithrilError

    with pytest.raises(MithrilError) as caught:
        gradients(graph, ["y"], ["x0"])
    assert "the gradient of 'test.wrong'" in str(caught.value)
    if text != "is no dot product":
        assert text in str(caught.value) and "declared at" in str(caught.value)


# -- second order -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: ops.tanh(x) * ops.exp(x) / (x * x + 1.0), [(4,)]),
        (lambda x, w: ops.log(ops.sum(ops.exp(x @ w), axis=-1)), [(3, 4), (4, 2)]),
        (lambda x: ops.sqrt(ops.var(x, axis=0) + 1.0), [(3, 4)]),
        (lambda x, w: ops.sin(x * w) + ops.erf(x), [(2, 3), (3,)]),
        (lambda x: ops.cumsum(ops.square(x), axis=1), [(2, 3)]),
    ],
)
def test_second_order(function, shapes):
    graph = built(function, *shapes)
    arrays = {f"x{k}": normal(*s) for k, s in enumerate(shapes)}
    first = gradients(graph, ["y"], ["x0"])
    check(first, {**arrays, "grad/y": normal(*evaluate(graph, arrays)["y"].shape)}, ["grad/x0"])


def test_names_of_second_order():
    first = gradients(built(lambda x: ops.sin(x), (3,)), ["y"], ["x0"])
    second = verify(gradients(first, ["y", "grad/x0"], ["x0", "grad/y"]))
    assert [i.name for i in second.inputs] == ["x0", "grad/y", "grad/grad/y", "grad/grad/x0"]
    assert second.output_names == ("y", "grad/x0", "grad/grad/x0", "grad/grad/y")
    x, g, gg = normal(3), normal(3), normal(3)
    actual = evaluate(second, {"x0": x, "grad/y": g, "grad/grad/y": 0 * g, "grad/grad/x0": gg})
    np.testing.assert_allclose(actual["grad/grad/x0"], -gg * g * np.sin(x))
    np.testing.assert_allclose(actual["grad/grad/y"], gg * np.cos(x))


# -- control flow -------------------------------------------------------------------------------------------------
def twice(graph, arrays, wrt=None):
    """First and second order."""
    arrays = {f"x{k}": a for k, a in enumerate(arrays)}
    wrt = wrt or [i.name for i in graph.arguments if i.type.dtype.is_float]
    first = check(graph, arrays, ["y"], wrt)
    shape = evaluate(graph, arrays)["y"].shape
    check(first, {**arrays, "grad/y": normal(*shape)}, [f"grad/{n}" for n in wrt], wrt, rtol=1e-5, atol=1e-6)
    return first


@pytest.mark.parametrize("pred", [True, False])
def test_through_if(pred):
    def build(p, x, w):
        a, n, b = ops.cond(p, lambda v: (ops.sin(v) * w, 1, v), lambda v: (v * v, 2, ops.exp(w)), x)
        return ops.sum(a) + ops.cast(n, dtype="float64") + b

    result = twice(built(build, ((), "bool"), (3,), (3,)), [np.bool_(pred), normal(3), normal(3)])
    assert opnames(result).count("if") == 2


def test_a_branch_that_does_not_read_an_operand_gives_it_zeros():
    graph = built(lambda p, x, w: ops.cond(p, lambda: x, lambda: w), ((), "bool"), (3,), (3,))
    result = check(graph, [np.bool_(True), normal(3), normal(3)])
    actual = evaluate(result, {"x0": True, "x1": normal(3), "x2": normal(3), "grad/y": np.ones(3)})
    assert actual["grad/x1"].tolist() == [1, 1, 1] and actual["grad/x2"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_through_scan(reverse, length):
    def build(x, h, w):
        def body(c, row):
            state, n = c
            state = ops.tanh(state @ w + row)
            return (state, n + 1), (state, ops.sin(row) * ops.cast(n, dtype="float64"))

        (last, n), (states, sines) = ops.scan(body, (h, 0), x, reverse=reverse)
        return ops.sum(last * 2.0) + ops.sum(states * states) + ops.sum(sines) + ops.cast(n, dtype="float64")

    twice(built(build, (T, B, 3), (B, 3), (3, 3)), [normal(length, 2, 3), normal(2, 3), normal(3, 3)])


@pytest.mark.parametrize("reverse", [False, True])
def test_weights_of_a_scan_get_one_product_over_all_steps(reverse):
    def build(x, h, w, b):
        return ops.scan(lambda c, row: (ops.tanh(ops.linear(c, w, b) + row), None), h, x, reverse=reverse)[0]

    graph = built(build, (5, 2, 3), (2, 3), (3, 3), (3,))
    result = check(graph, [normal(5, 2, 3), normal(2, 3), normal(3, 3), normal(3)])
    *_, backward = (n for n in result.nodes if n.op.name == "scan")
    assert [str(v.type) for v in backward.results] == ["f64[2, 3]", "f64[5, 2, 3]"], "of the state, and of the rows"
    assert sum(n.op.name == "matmul" for n in backward.regions[0].nodes) == 1, "for the state"


def test_scan_of_which_only_a_part_matters():
    def build(x, h, w):
        def body(c, row):
            a, b = c
            return (a * row, b + ops.exp(w)), (a, b)

        (a, b), (rows, other_rows) = ops.scan(body, (h, h), x)
        return {"a": a, "b": b, "rows": rows, "others": other_rows}

    graph = built(build, (4, 3), (3,), (3,))
    arrays = [normal(4, 3), normal(3), normal(3)]
    for output_names in (["a"], ["b"], ["rows"], ["others"], ["a", "others"]):
        for wrt in (["x0"], ["x1"], ["x2"], ["x1", "x2"]):
            check(graph, arrays, output_names, wrt)


def test_a_carry_that_becomes_dependent_later():
    def build(x, w):
        def body(c, row):
            _, b, d = c
            return (b, d, d * 0.5 + w * row), None

        zero = ops.stop_gradient(w) * 0.0
        return ops.scan(body, (zero, zero, zero), x)[0][0]

    twice(built(build, (5, 3), (3,)), [normal(5, 3), normal(3)])


def test_scan_keeps_little():
    """Steps save residuals; loop-invariant or cheap values are not saved per step."""

    def build(x, w):
        def body(c, row):
            same_each_step = ops.exp(ops.sin(w))
            expanded = ops.broadcast_to(ops.reshape(row, shape=(1, 3)), shape=(100, 3))
            return c * same_each_step + ops.sum(ops.square(expanded), axis=0), None

        return ops.scan(body, w, x)[0]

    graph = built(build, (7, 3), (3,))
    result = twice(graph, [normal(7, 3), normal(3) * 0.1])
    forward = next(n for n in result.nodes if n.op.name == "scan")
    assert [str(v.type) for v in forward.results] == ["f64[3]", "f64[7, 3]"]  # the last carry; carries before each step


def test_a_stacked_result_is_not_kept_again():
    def build(x, h):
        return ops.sum(ops.scan(lambda c, row: ((e := ops.exp(c * row)), e), h, x)[1])

    result = check(built(build, (4, 3), (3,)), [normal(4, 3), normal(3) * 0.1])
    forward = next(n for n in result.nodes if n.op.name == "scan")
    assert len(forward.results) == 3  # carry, the stacked exp, the carry before each step


@pytest.mark.parametrize("trips", [0, 1, 3, 8])
def test_through_bounded_while(trips):
    def build(n, x, w):
        def body(s):
            k, v = s
            return k + 1, ops.sin(v @ w) + v

        return ops.while_loop(lambda s: s[0] < n, body, (0, x), max_trips=5)[1]

    graph = built(build, ((), "int32"), (2, 3), (3, 3))
    twice(graph, [np.int32(trips), normal(2, 3), normal(3, 3) * 0.5])


def test_a_while_that_depends_on_its_state():
    def build(x):
        return ops.while_loop(lambda v: ops.sum(v) < 10.0, lambda v: v * 1.5 + 0.1, x, max_trips=12)

    twice(built(build, (3,)), [np.abs(normal(3)) + 0.3])


def test_an_unbounded_while():
    with Builder() as b:
        x = b.input("x", (3,))
        with b.at(Origin("net.loop", "model.py", 5)):
            y = ops.while_loop(lambda v: ops.sum(v) < 10.0, lambda v: v * 1.5, x)
    graph = b.build({"y": y, "z": y})
    with pytest.raises(GradientError) as caught:
        gradients(graph, ["y"], ["x"])
    assert str(caught.value) == (
        "a 'while' without max_trips has no gradient\n  in the gradient of 'while'\n"
        "  from layer 'net.loop' at model.py:5\n"
        "hint: pass a bound: While(..., max_trips=...), while_loop(..., max_trips=...)"
    )
    built_aside = built(
        lambda x: ops.stop_gradient(ops.while_loop(lambda v: ops.sum(v) < 10.0, lambda v: v * 1.5, x)) * x, (3,)
    )
    check_value = evaluate(gradients(built_aside, ["y"], ["x0"]), {"x0": np.ones(3), "grad/y": np.ones(3)})
    np.testing.assert_allclose(check_value["grad/x0"], np.full(3, 1.5**3))


@pytest.mark.parametrize("pred", [True, False])
def test_regions_in_regions(pred):
    def build(p, x, w):
        def step(c, row):
            def grow(v):
                inner, stacked = ops.scan(
                    lambda s, r: (ops.sin(s * r) + w, s * row), v, ops.stack(row, row * w, axis=0)
                )
                return inner + ops.sum(stacked, axis=0)

            def loop(v):
                return ops.while_loop(lambda s: ops.sum(s) < 50.0, lambda s: s + ops.exp(w) * row * row, v, max_trips=3)

            result = ops.cond(p, grow, loop, c)
            return result, result * w

        last, ys = ops.scan(step, w * 0.1, x)
        return ops.sum(ys) + ops.sum(last)

    twice(built(build, ((), "bool"), (3, 2), (2,)), [np.bool_(pred), normal(3, 2), normal(2) * 0.5])


def test_arrays_that_bodies_hold(own_ops):
    @composite(name="test.table")
    def table(x):
        """No gradient of its own; holds an array."""
        return ops.sin(x * np.arange(1.0, 4.0))

    graph = built(lambda x: ops.scan(lambda c, row: (table(c) + row, None), x[0], x)[0], (4, 3))
    twice(graph, [normal(4, 3)])
    graph = built(lambda p, x: ops.cond(p, lambda: table(x), lambda: x), ((), "bool"), (3,))
    twice(graph, [np.bool_(True), normal(3)])


# -- random graphs ------------------------------------------------------------------------------------------------
UNARY = [ops.sin, ops.tanh, ops.square, ops.neg, lambda x: ops.exp(x * 0.1), lambda x: ops.sqrt(x * x + 1.0)]
BINARY = [ops.add, ops.sub, ops.mul, lambda a, b: a / (b * b + 1.0), lambda a, b: ops.where(a > b, a, b * 2.0)]
SHAPES = [(2, 3), (3,), (1, 3), (2, 1), ()]


def flowing(x, y, how):
    """Control flow over two values of one shape."""
    if how == 0:
        return ops.cond(ops.sum(x) > 0.0, lambda v: ops.sin(v) * y, lambda v: v + y, x)
    if how == 1:
        return ops.scan(lambda c, r: (ops.tanh(c * y) + r, None), x, ops.stack(y, x, axis=0))[0]
    return ops.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, ops.sin(s[1]) * y), (0, x), max_trips=3)[1]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99)), min_size=3, max_size=14),
    seed=st.integers(0, 2**16),
)
def test_random_graphs(shapes, steps, seed):
    def build(*xs):
        values = list(xs)
        for kind, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            if kind < 3:
                values.append(UNARY[second % len(UNARY)](a))
            elif kind < 7:
                values.append(BINARY[(first + second) % len(BINARY)](a, b))
            elif kind == 7:
                values.append(ops.sum(a, axis=None, keepdims=bool(second % 2)))
            elif kind == 8:
                values.append(ops.barrier(a)[0])
            else:
                values.append(flowing(a + b * 0.0, b + a * 0.0, second % 3))
        return {"y": values[-1], "z": values[len(values) // 2]}

    rng = np.random.default_rng(seed)
    graph = built(build, *shapes)
    check(graph, [rng.normal(size=s) for s in shapes], ["y", "z"], step=1e-6, rtol=1e-3, atol=1e-4)


# -- size ---------------------------------------------------------------------------------------------------------
def test_long_graphs_need_no_deep_stack():
    n = 5000

    def build(x):
        for _ in range(n):
            x = ops.sin(x)
        return x

    graph = built(build, (2,))
    result = gradients(graph, ["y"], ["x0"])
    assert len(result.nodes) == 3 * n


def test_regions_are_visited_once_each():
    """Nested control flow costs its own size: no branch is differentiated again for every level around it."""

    def nest(x, depth):
        if depth == 0:
            return ops.sin(x)
        return ops.cond(ops.sum(x) > 0.0, lambda v: nest(v, depth - 1), lambda v: v, x)

    sizes = []
    for depth in (2, 4, 8):
        graph = built(lambda x, depth=depth: nest(x, depth), (3,))
        sizes.append(sum(1 for _ in iterate(gradients(graph, ["y"], ["x0"]))))
    assert sizes[2] < 5 * sizes[0]
