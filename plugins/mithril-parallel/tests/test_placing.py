"""How splits are chosen and passed on, without any framework: pairs of weights, tables, batches, sums, loops."""

from __future__ import annotations

from collections import Counter

import pytest

import mithril as ml
from mithril import Builder
from mithril.base.registry import operation as op
from mithril_parallel.mesh import Mesh
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.rules import RULES, groups
from mithril_parallel.placing.strategy import choose

MESH = Mesh({"data": 2, "model": 4})
MODEL_ONLY = Mesh({"data": 1, "model": 4})


def exchanges(graph, mesh, given=None):
    splits = choose(graph, mesh).splits if given is None else given
    return Counter((e.kind, e.axis) for e in propagate(graph, mesh, splits).exchanges)


def pair(between="relu", out=8):
    with Builder("pair") as b:
        x = b.input("x", (16, 12))
        h = x @ b.param("up", (12, 32)) + b.param("bias", (32,))
        h = op(between)(h) if between in ("relu", "tanh") else op(between)(h, axis=-1)
        y = h @ b.param("down", (32, out))
    return b.build({"y": y})


def test_a_pair_is_split_by_columns_then_rows():
    found = choose(pair(), MESH)
    assert found.splits == {
        "x": ("data", None),
        "up": (None, "model"),
        "bias": ("model",),
        "down": ("model", None),
    }
    assert exchanges(pair(), MESH) == {("all-reduce", "model"): 1}


def test_what_needs_whole_rows_between_keeps_the_first_weight_whole():
    found = choose(pair("softmax"), MODEL_ONLY)
    assert "up" not in found.splits
    assert "bias" not in found.splits


def test_the_last_product_may_end_in_split_columns():
    with Builder("head") as b:
        x = b.input("x", (16, 12))
        y = op("softmax")(x, axis=-1) @ b.param("head", (12, 32))
    graph = b.build({"y": y})
    assert choose(graph, MODEL_ONLY).splits == {"head": (None, "model")}
    assert not exchanges(graph, MODEL_ONLY)


def test_a_table_is_split_by_rows_where_inputs_are_looked_up_and_whole_where_places_are():
    with Builder("tables") as b:
        tokens = b.input("tokens", (4, 8), "int32")
        x = op("take")(b.param("words", (64, 16)), tokens, axis=0)
        y = x + op("take")(b.param("places", (8, 16)), op("iota")(shape=(8,)), axis=0)
    graph = b.build({"y": y})
    assert choose(graph, MODEL_ONLY).splits == {"words": ("model", None)}
    assert exchanges(graph, MODEL_ONLY) == {("all-reduce", "model"): 1}


def test_what_cannot_be_divided_is_said():
    with Builder("odd") as b:
        x = b.input("x", (16, 12))
        y = op("relu")(x @ b.param("up", (12, 30))) @ b.param("down", (30, 6))
    found = choose(b.build({"y": y}), MODEL_ONLY)
    assert "30 cannot be divided by 4" in found.left["up"]


def test_a_batch_that_cannot_be_divided_is_an_error():
    with pytest.raises(ml.OptionError, match="16 items of input 'x' cannot be divided over 3"):
        choose(pair(), Mesh({"data": 3, "model": 1}))


def test_heads_stay_whole_on_a_device_or_the_weights_are_not_split():
    def attention(heads):
        with Builder("attention") as b:
            x = b.input("x", (2, 6, 16))
            q = op("transpose")(
                op("reshape")(x @ b.param("q", (16, 16)), shape=(2, 6, heads, 16 // heads)), perm=(0, 2, 1, 3)
            )
            y = op("reshape")(op("transpose")(q * 2.0, perm=(0, 2, 1, 3)), shape=(2, 6, 16)) @ b.param("o", (16, 16))
        return b.build({"y": y})

    assert choose(attention(4), MODEL_ONLY).splits == {"q": (None, "model"), "o": ("model", None)}
    assert "q" not in choose(attention(2), MODEL_ONLY).splits


def test_channels_of_convolutions_are_split_in_pairs():
    with Builder("images") as b:
        x = b.input("x", (4, 3, 8, 8))
        h = op("relu")(
            op("conv")(x, b.param("first", (16, 3, 3, 3)), padding=((1, 1), (1, 1)), stride=(1, 1), dilation=(1, 1))
        )
        y = op("conv")(h, b.param("second", (6, 16, 3, 3)), padding=((1, 1), (1, 1)), stride=(1, 1), dilation=(1, 1))
    graph = b.build({"y": y})
    found = choose(graph, MODEL_ONLY).splits
    assert found == {"first": ("model", None, None, None), "second": (None, "model", None, None)}
    assert exchanges(graph, MODEL_ONLY) == {("all-reduce", "model"): 1}


# ------------------------------------------------------------------------------------------------------- exchanges
def test_sums_that_are_added_are_exchanged_once():
    with Builder("two") as b:
        x = b.input("x", (8, 16))
        y = op("tanh")((x @ b.param("a", (16, 4))) + (x @ b.param("b", (16, 4))))
    given = {"x": (None, "model"), "a": ("model", None), "b": ("model", None)}
    assert exchanges(b.build({"y": y}), MODEL_ONLY, given) == {("all-reduce", "model"): 1}


def test_giving_up_a_split_gathers_once():
    with Builder("gather") as b:
        x = b.input("x", (8, 16))
        y = op("cumsum")(x, axis=1) + op("cumsum")(op("cumsum")(x, axis=1), axis=1)
    assert exchanges(b.build({"y": y}), MODEL_ONLY, {"x": (None, "model")}) == {("all-gather", "model"): 1}


def test_the_gradient_of_a_weight_is_summed_over_the_data():
    with Builder("step") as b:
        x, g = b.input("x", (8, 16)), b.input("g", (8, 4))
        made = op("transpose")(x, perm=(1, 0)) @ g
    placed = propagate(b.build({"w": made}), MESH, {"x": ("data", None), "g": ("data", None)})
    assert [(e.kind, e.axis, e.bytes) for e in placed.exchanges] == [("all-reduce", "data", 16 * 4 * 4)]


def test_a_loop_keeps_the_batch_split_and_sums_a_collected_gradient_once():
    with Builder("loop") as b:
        xs, w = b.input("xs", (5, 8, 4)), b.param("w", (4, 4))
        start, total = op("full")(shape=(8, 4), value=0.0), op("full")(shape=(4, 4), value=0.0)

        def body(carry, x):
            h, collected = carry
            h = op("tanh")(h @ w + x)
            return (h, collected + op("transpose")(h, perm=(1, 0)) @ x), h

        (last, collected), ys = ml.ops.scan(body, (start, total), xs)
    graph = b.build({"last": last, "collected": collected, "ys": ys})
    placed = propagate(graph, MESH, {"xs": (None, "data", None)})
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    assert placed.splits[outputs["last"]] == ("data", None)
    assert placed.splits[outputs["ys"]] == (None, "data", None)
    assert [(e.kind, e.axis, e.times) for e in placed.exchanges] == [("all-reduce", "data", 1)]


def test_merged_axes_keep_a_split_and_cut_ones_only_the_outermost():
    with Builder("rows") as b:
        x = b.input("x", (5, 8, 4))
        flat = op("reshape")(x, shape=(40, 4))
        w = op("transpose")(flat, perm=(1, 0)) @ flat
    graph = b.build({"w": w})
    placed = propagate(graph, MESH, {"x": (None, "data", None)})
    assert [(e.kind, e.bytes) for e in placed.exchanges] == [("all-reduce", 64)]
    with Builder("cut") as b:
        y = op("reshape")(b.input("x", (8, 6)), shape=(4, 2, 6))
    graph = b.build({"y": y})
    assert propagate(graph, MESH, {"x": ("model", None)}).splits[graph.outputs[0]] == ("model", None, None)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((4, 32), (4, 8, 4), [([0], [0]), ([1], [1, 2])]),
        ((4, 8, 4), (32, 4), [([0, 1], [0]), ([2], [1])]),
        ((6,), (1, 6, 1), [([], [0]), ([0], [1]), ([], [2])]),
        ((2, 3, 4), (24,), [([0, 1, 2], [0])]),
    ],
)
def test_axes_that_a_reshape_joins_or_cuts(before, after, expected):
    found = [g for g in groups(before, after) if g[0] and g[1]]
    wanted = [g for g in expected if g[0] and g[1]]
    # Axes of length one may stand in any group.
    assert [[k for k in left if before[k] > 1] for left, _ in found] == [
        [k for k in left if before[k] > 1] for left, _ in wanted
    ]
    assert [[k for k in right if after[k] > 1] for _, right in found] == [
        [k for k in right if after[k] > 1] for _, right in wanted
    ]


def test_every_rule_is_of_an_operation_that_exists():
    assert all(op(name).name == name for name in RULES)
