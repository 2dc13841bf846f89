"""Graph text: its form, and round trips, random graphs included."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from mithril.graph import Builder, Origin, parse, structural_hash, structurally_equal, to_text, verify
from mithril.graph.dims import Dim
from mithril.graph.dtypes import ALL, dtype as as_dtype
from mithril.graph.errors import ParseError
from mithril.ops import (
    add,
    cast,
    concat,
    cond,
    exp,
    mul,
    neg,
    relu,
    reshape,
    scan,
    slice as slice_,
    softmax,
    sum,
    transpose,
    where,
    while_loop,
)
from mithril_testing.constants import SHAPES, difference, values
from mithril_testing.sample_graphs import sample_graphs


def test_text_format():
    b = Builder("net")
    with b:
        x = b.input("x", (Dim("B", 1, 32), 3))
        w = b.param("w", (3, 2), init="zeros")
        with b.at(Origin("head", "model.py", 7)):
            y = softmax(x @ w + np.float32([0.5, -0.0]))
    text = to_text(b.build({"y": y}))
    assert (
        text
        == """\
graph net {
  dim B in 1..32
  input %x: f32[B, 3]
  param %w: f32[3, 2] {init="zeros"}
  constant %constant: f32[2] = [0.5, -0.0]
  %matmul: f32[B, 2] = matmul(%x, %w)  # head @ model.py:7
  %add: f32[B, 2] = add(%matmul, %constant)  # head @ model.py:7
  %softmax: f32[B, 2] = softmax(%add, axis=1)  # head @ model.py:7
  return y=%softmax
}"""
    )


@pytest.mark.parametrize("graph", [g for _, g in sample_graphs()], ids=[n for n, _ in sample_graphs()])
def test_sample_graphs_round_trip(graph):
    result = parse(to_text(graph))
    assert structurally_equal(result, graph)
    assert to_text(result) == to_text(graph)
    verify(result)


def around(write, *inputs):
    with Builder() as b:
        result = write(*[b.input(f"x{k}", *i) for k, i in enumerate(inputs)])
    return b.build({"y": result} if not isinstance(result, dict) else result)


def read_back(graph):
    result = parse(str(graph))
    assert str(result) == str(graph)
    assert structurally_equal(result, graph)
    return result


@pytest.mark.parametrize("number", [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 0.1, 1 / 3, 3.4e38])
def test_numbers_round_trip(number):
    result = read_back(around(lambda x: x * number, ((2,), "float64")))
    value = result.nodes[0].attributes["value"]
    assert (value == number or (math.isnan(value) and math.isnan(number))) and math.copysign(1, value) == math.copysign(
        1, number if not math.isnan(number) else 1
    )


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((0, 3), np.float32),
        np.array(3, np.int64),
        np.arange(100, dtype=np.int8),
        np.array([True, False]),
        np.array([1.5, -2.0], ml_dtypes.bfloat16),
        np.linspace(0, 1, 40).astype(np.float16).reshape(5, 8),
        np.array([math.nan, math.inf, -0.0], np.float32),
        np.asfortranarray(np.arange(20.0).reshape(4, 5)),
        np.array([2**64 - 1], np.uint64),
    ],
    ids=str,
)
def test_constants_round_trip(data):
    b = Builder()
    with b:
        y = neg(b.constant(data)) if data.dtype != bool else b.constant(data) & True
    result = read_back(b.build({"y": y}))
    (constant,) = result.with_role("constant")
    assert constant.data.dtype == data.dtype
    assert constant.data.tobytes() == np.asarray(data, order="C").tobytes()


def test_colliding_names_are_numbered():
    graph = around(lambda x: exp(x), ((2,),))
    graph.nodes[0].result.name = "x0"  # as a pass may leave it
    assert structurally_equal(parse(str(graph)), graph)


def test_control_flow_round_trips():
    def write(x):
        c = cond(sum(x) > 0.0, lambda: neg(x), lambda: exp(x) * 2.0)
        n = while_loop(lambda s: sum(s) < 10.0, lambda s: s + 1.0, c, max_trips=4)
        return scan(lambda s, e: (s + e, s * e), sum(n), n)[1]

    read_back(around(write, ((3,),)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "graph"),
        ("graph a {", ""),
        ("graph a {\n  input %x: f99[2]\n  return y=%x\n}", "f99"),
        ("graph a {\n  input %x: f32[2]\n  %y: f32[2] = nosuch(%x)\n  return y=%y\n}", "nosuch"),
        ("graph a {\n  input %x: f32[2]\n  %y: f32[2] = neg(%z)\n  return y=%y\n}", "z"),
        ("graph a {\n  input %x: f32[2]\n  %y: f32[2] = softmax(%x, axis=__import__('os'))\n  return y=%y\n}", ""),
        ("graph a {\n  constant %x: f32[2] = base64:!!!!\n  return y=%x\n}", "base64"),
        ("graph a {\n  constant %x: f32[3] = [1.0, 2.0]\n  return y=%x\n}", ""),
        ("graph a {\n  input %x: f32[2]\n}", ""),
        ("graph a {\n  input %x: f32[2]\n  return y=%x\n}\nmore", ""),
    ],
)
def test_bad_text_is_a_parse_error(text, message):
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert message in str(caught.value)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="graph {}%x:f32[2]=neg()\n ,.-'\"1", max_size=80))
def test_any_text_parses_or_raises_parse_error(text):
    try:
        parse(text)
    except ParseError:
        pass


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_corrupt_text_parses_or_raises_mithril_error(data):
    from mithril.graph.errors import MithrilError

    text = str(dict(sample_graphs())[data.draw(st.sampled_from(["mlp", "symbolic", "control"]))])
    offset = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:offset] + data.draw(st.sampled_from(["", "%", "{", "9", "]", "\n", "=", "é"])) + text[offset + 1 :]
    try:
        verify(parse(damaged))
    except MithrilError:
        pass


def test_out_of_range_axes_are_rejected():
    from mithril.graph.errors import MithrilError

    text = "graph g {\n  input %x: f32[2, 3]\n  %y: f32[2, 3] = layer_norm(%x, none, none, axes=[7])\n  return y=%y\n}"
    with pytest.raises(MithrilError, match="the attributes of operation 'layer_norm' do not match its operands"):
        parse(text)


# -- random graphs ------------------------------------------------------------------------------------------------
@st.composite
def graphs(draw):
    """Graphs of a few shapes, with symbolic sizes, constants, attributes of every kind, and branches."""
    sizes = [draw(st.sampled_from([1, 2, 3, Dim("B", 1, 9), Dim("L", 2, 5)])) for _ in range(2)]
    b = Builder(draw(st.sampled_from(["forward", "net", "a_b"])))
    with b:
        values = [b.input("x", tuple(sizes)), b.param("w", tuple(sizes), init=draw(st.sampled_from(["zeros", "ones"])))]
        for _ in range(draw(st.integers(1, 12))):
            a, c = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
            kind = draw(st.integers(0, 9))
            number = draw(st.floats(width=32))
            if kind == 0:
                result = neg(a)
            elif kind == 1 and a.shape == c.shape:
                result = draw(st.sampled_from([add, mul]))(a, c)
            elif kind == 2:
                result = a * number
            elif kind == 3 and a.ndim:
                result = sum(a, axis=draw(st.integers(-a.ndim, a.ndim - 1)), keepdims=draw(st.booleans()))
            elif kind == 4 and a.ndim == 2:
                result = transpose(a, perm=(1, 0))
            elif kind == 5 and a.ndim:
                result = softmax(a, axis=-1)
            elif kind == 6 and a.shape == c.shape and a.ndim:
                result = concat(a, c, axis=0)
            elif kind == 7:
                result = where(a > number, a, c if c.shape == a.shape else a)
            elif kind == 8:
                result = cond(sum(cast(a, dtype="float32")) > number, lambda a=a: relu(a), lambda a=a: a * 2.0)
            else:
                result = (
                    reshape(a, shape=(1, *a.shape))
                    if a.ndim < 4
                    else slice_(a, starts=(0,), stops=(1,), axes=(0,), steps=(1,))
                )
            values.append(result)
        outputs = {f"y{k}": values[draw(st.integers(0, len(values) - 1))] for k in range(draw(st.integers(1, 3)))}
    return b.build(outputs)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_random_graphs_round_trip(graph):
    verify(graph)
    text = str(graph)
    result = parse(text)
    verify(result)
    assert str(result) == text
    assert structural_hash(result) == structural_hash(graph)


@pytest.mark.parametrize("kind", [d.name for d in ALL])
def test_constants_of_every_dtype_and_rank_round_trip(kind):
    """In memory the constants of the graph that was read are those that were written."""
    arrays = {name: values(as_dtype(kind), shape) for name, shape in SHAPES.items()}
    b = Builder("constants")
    with b:
        result = {name: b.constant(array) for name, array in arrays.items()}
    graph = parse(to_text(b.build(result)))
    for (name, expected), i in zip(arrays.items(), graph.inputs, strict=True):
        assert difference(name, i.data, expected) == ""
