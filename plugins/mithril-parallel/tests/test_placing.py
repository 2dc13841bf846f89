"""Sharding strategies and propagation without a framework: pairs of weights, tables, batches, sums, loops."""

from __future__ import annotations

from collections import Counter

import pytest

import mithril as ml
from mithril import Builder
from mithril.derivatives import gradients
from mithril.graph import Node, Output, TensorType, Value, float16, operation as op
from mithril_parallel.mesh import Mesh
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.rules import op_sharding
from mithril_parallel.placing.strategy import choose, forward_nodes

MESH = Mesh({"data": 2, "model": 4})
MODEL_ONLY = Mesh({"data": 1, "model": 4})


def exchanges(graph, mesh, input_splits=None):
    splits = choose(graph, mesh).splits if input_splits is None else input_splits
    return Counter((e.kind, e.axis) for e in propagate(graph, mesh, splits).exchanges)


def pair(between="relu", out=8):
    with Builder("pair") as b:
        x = b.input("x", (16, 12))
        h = x @ b.param("up", (12, 32)) + b.param("bias", (32,))
        h = op(between)(h) if between in ("relu", "tanh") else op(between)(h, axis=-1)
        y = h @ b.param("down", (32, out))
    return b.build({"y": y})


def test_weight_pair_is_split_by_columns_then_rows():
    strategy = choose(pair(), MESH)
    assert strategy.splits == {
        "x": ("data", None),
        "up": (None, "model"),
        "bias": ("model",),
        "down": ("model", None),
    }
    assert exchanges(pair(), MESH) == {("all-reduce", "model"): 1}


def test_row_operation_between_weights_prevents_the_split():
    strategy = choose(pair("softmax"), MODEL_ONLY)
    assert "up" not in strategy.splits
    assert "bias" not in strategy.splits


def test_a_cast_of_a_gradient_belongs_to_no_pair():
    """Passes of precision insert casts without a phase."""
    graph = gradients(pair(), of=["y"], wrt=["up"])
    gradient = next(r.value for r in graph.results if r.name != "y")
    assert graph.producers[gradient].tags["phase"] == "backward"
    half = Value("half", TensorType(float16, gradient.shape))
    cast = Node(op("cast"), (gradient,), {"dtype": float16}, (half,))
    inserted = graph.replaced(nodes=(*graph.nodes, cast), results=(*graph.results, Output(half, "half")))
    assert cast not in forward_nodes(inserted)
    assert choose(inserted, MODEL_ONLY).splits["up"] == (None, "model")


def test_the_last_product_may_end_in_split_columns():
    with Builder("head") as b:
        x = b.input("x", (16, 12))
        y = op("softmax")(x, axis=-1) @ b.param("head", (12, 32))
    graph = b.build({"y": y})
    assert choose(graph, MODEL_ONLY).splits == {"head": (None, "model")}
    assert not exchanges(graph, MODEL_ONLY)


def test_table_is_split_by_rows_only_for_indices_from_inputs():
    with Builder("tables") as b:
        tokens = b.input("tokens", (4, 8), "int32")
        x = op("take")(b.param("words", (64, 16)), tokens, axis=0)
        y = x + op("take")(b.param("places", (8, 16)), op("iota")(shape=(8,)), axis=0)
    graph = b.build({"y": y})
    assert choose(graph, MODEL_ONLY).splits == {"words": ("model", None)}
    assert exchanges(graph, MODEL_ONLY) == {("all-reduce", "model"): 1}


def test_indivisible_weight_is_reported():
    with Builder("odd") as b:
        x = b.input("x", (16, 12))
        y = op("relu")(x @ b.param("up", (12, 30))) @ b.param("down", (30, 6))
    strategy = choose(b.build({"y": y}), MODEL_ONLY)
    assert "30 cannot be divided by 4" in strategy.unsplit["up"]


def test_indivisible_batch_is_rejected():
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
    splits = choose(graph, MODEL_ONLY).splits
    assert splits == {"first": ("model", None, None, None), "second": (None, "model", None, None)}
    assert exchanges(graph, MODEL_ONLY) == {("all-reduce", "model"): 1}


# ------------------------------------------------------------------------------------------------------- exchanges
def test_added_partial_sums_are_reduced_once():
    with Builder("two") as b:
        x = b.input("x", (8, 16))
        y = op("tanh")((x @ b.param("a", (16, 4))) + (x @ b.param("b", (16, 4))))
    splits = {"x": (None, "model"), "a": ("model", None), "b": ("model", None)}
    assert exchanges(b.build({"y": y}), MODEL_ONLY, splits) == {("all-reduce", "model"): 1}


def test_dropped_split_is_gathered_once():
    with Builder("gather") as b:
        x = b.input("x", (8, 16))
        y = op("cumsum")(x, axis=1) + op("cumsum")(op("cumsum")(x, axis=1), axis=1)
    assert exchanges(b.build({"y": y}), MODEL_ONLY, {"x": (None, "model")}) == {("all-gather", "model"): 1}


def test_weight_gradient_is_reduced_over_data():
    with Builder("step") as b:
        x, g = b.input("x", (8, 16)), b.input("g", (8, 4))
        gradient = op("transpose")(x, perm=(1, 0)) @ g
    sharding = propagate(b.build({"w": gradient}), MESH, {"x": ("data", None), "g": ("data", None)})
    assert [(e.kind, e.axis, e.bytes) for e in sharding.exchanges] == [("all-reduce", "data", 16 * 4 * 4)]


def test_loop_keeps_the_batch_split_and_reduces_an_accumulated_gradient_once():
    with Builder("loop") as b:
        xs, w = b.input("xs", (5, 8, 4)), b.param("w", (4, 4))
        start, total = op("full")(shape=(8, 4), value=0.0), op("full")(shape=(4, 4), value=0.0)

        def body(carry, x):
            h, collected = carry
            h = op("tanh")(h @ w + x)
            return (h, collected + op("transpose")(h, perm=(1, 0)) @ x), h

        (last, collected), ys = ml.ops.scan(body, (start, total), xs)
    graph = b.build({"last": last, "collected": collected, "ys": ys})
    sharding = propagate(graph, MESH, {"xs": (None, "data", None)})
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    assert sharding.splits[outputs["last"]] == ("data", None)
    assert sharding.splits[outputs["ys"]] == (None, "data", None)
    assert [(e.kind, e.axis, e.times) for e in sharding.exchanges] == [("all-reduce", "data", 1)]


def test_merged_axes_keep_a_split_and_divided_axes_only_the_outermost():
    with Builder("rows") as b:
        x = b.input("x", (5, 8, 4))
        flat = op("reshape")(x, shape=(40, 4))
        w = op("transpose")(flat, perm=(1, 0)) @ flat
    graph = b.build({"w": w})
    sharding = propagate(graph, MESH, {"x": (None, "data", None)})
    assert [(e.kind, e.bytes) for e in sharding.exchanges] == [("all-reduce", 64)]
    with Builder("cut") as b:
        y = op("reshape")(b.input("x", (8, 6)), shape=(4, 2, 6))
    graph = b.build({"y": y})
    assert propagate(graph, MESH, {"x": ("model", None)}).splits[graph.outputs[0]] == ("model", None, None)


@pytest.mark.parametrize(
    ("before", "split", "after", "need", "give"),
    [
        ((4, 32), (None, "model"), (4, 8, 4), (None, "model"), (None, "model", None)),
        ((4, 8, 4), (None, "model", None), (32, 4), (None, "model", None), ("model", None)),
        ((6,), ("data",), (1, 6, 1), ("data",), (None, "data", None)),
        ((2, 3, 4), (None, None, "model"), (24,), (None, None, "model"), ("model",)),
        ((8,), ("model",), (2, 4), (None,), (None, None)),  # two blocks on four devices
        ((4, 6), ("model", None), (3, 8), (None, None), (None, None)),  # uneven blocks
    ],
)
def test_splits_pass_through_reshapes(before, split, after, need, give):
    with Builder("reshape") as b:
        op("reshape")(b.input("x", before), shape=after)
    sharding = op_sharding(b.nodes[0], [split], MESH)
    assert (sharding.operand_splits, sharding.result_splits) == ((need,), (give,))


@pytest.mark.parametrize(
    ("name", "split", "give", "sums", "at_once"),
    [
        ("sum", (None, "model"), (None,), {"model"}, False),
        ("mean", ("data", "model"), ("data",), {"model"}, False),
        ("max", (None, "model"), (None,), {"model"}, True),
        ("prod", (None, "model"), (None,), {"model"}, True),
        ("cumsum", ("data", "model"), ("data", None), set(), False),
    ],
)
def test_reductions_yield_partial_sums_and_scans_need_the_full_axis(name, split, give, sums, at_once):
    with Builder("reduce") as b:
        op(name)(b.input("x", (8, 16)), axis=1)
    sharding = op_sharding(b.nodes[0], [split], MESH)
    assert (sharding.result_splits, sharding.sums, sharding.at_once) == ((give,), sums, at_once)


def test_product_of_another_distribution_is_sharded_like_matmul():
    with Builder("twins") as b:
        x, w = b.input("x", (8, 16)), b.input("w", (16, 12))
        op("matmul")(x, w)
        op("dot")(x, w, contract_a=(1,), contract_b=(0,))
    splits = [("data", "model"), ("model", None)]
    first, second = (op_sharding(node, splits, MESH) for node in b.nodes)
    assert first == second
    assert first.sums == {"model"}
