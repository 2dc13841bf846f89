"""Graphs of 16-bit floats whose values are float32 between operations."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mithril import ops
from mithril.backend import in_float32
from mithril.graph import Builder, evaluate, verify
from mithril.graph.dims import TensorType

HALF = ("float16", "bfloat16")


def everything(node, follows):
    return True


def types(graph):
    return [(node.op.name, node.result.dtype.name) for node in graph.nodes]


@pytest.mark.parametrize("kind", HALF)
def test_only_inputs_and_results_are_rounded(kind):
    with Builder() as b:
        x, w = b.input("x", (4, 8), kind), b.param("w", (3, 8), kind)
        y = ops.relu(ops.linear(x, w)) * 0.1 + b.constant(np.full(3, 0.5), kind)
        graph = b.build({"y": y})
    rewritten = in_float32(graph, everything)
    verify(rewritten)
    assert [t for t in types(rewritten) if t[0] == "cast"] == [("cast", "float32"), ("cast", "float32"), ("cast", kind)]
    assert {t for name, t in types(rewritten) if name not in ("cast", "constant")} == {"float32"}
    assert rewritten.outputs[0].type == graph.outputs[0].type
    rng = np.random.default_rng(0)
    numpy = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[kind]
    arrays = {i.name: rng.normal(size=i.type.shape).astype(numpy) for i in graph.inputs if i.role != "constant"}
    exact = np.maximum(arrays["x"].astype(float) @ arrays["w"].astype(float).T, 0) * 0.1 + 0.5
    assert (
        np.abs(evaluate(rewritten, arrays)["y"].astype(float) - exact).max()
        <= np.spacing(exact.astype(numpy)).max() * 0.51
    )


def test_graphs_without_16_bit_floats_are_unchanged():
    with Builder() as b:
        graph = b.build({"y": ops.relu(b.input("x", (4,)))})
    assert in_float32(graph, everything) is graph


def test_unselected_operations_read_and_return_16_bits():
    with Builder() as b:
        x = b.input("x", (4, 4), "bfloat16")
        y = ops.relu(x)
        graph = b.build({"y": ops.exp(ops.matmul(y, x)), "seen": y})
    rewritten = in_float32(graph, lambda node, follows: node.op is not ops.matmul)
    verify(rewritten)
    assert types(rewritten) == [
        ("cast", "float32"),
        ("relu", "float32"),
        ("cast", "bfloat16"),
        ("matmul", "bfloat16"),
        ("cast", "float32"),
        ("exp", "float32"),
        ("cast", "bfloat16"),
    ]


def test_moves_follow_and_conversions_of_the_user_round():
    with Builder() as b:
        x, w = b.input("x", (4, 4), "bfloat16"), b.param("w", (4, 4), "bfloat16")
        y = ops.transpose(ops.matmul(x, ops.transpose(w, perm=(1, 0))), perm=(1, 0))
        rounded = ops.cast(ops.cast(ops.cast(y, dtype="float32"), dtype="bfloat16"), dtype="float32")
        graph = b.build({"y": rounded})
    rewritten = in_float32(graph, everything)
    verify(rewritten)
    assert types(rewritten)[0] == ("transpose", "bfloat16")
    assert types(rewritten)[-3:] == [("transpose", "float32"), ("cast", "bfloat16"), ("cast", "float32")]


def test_bodies_of_control_flow_compute_in_float32():
    with Builder() as b:
        x = b.input("x", (4,), "float16")
        graph = b.build({"y": ops.cond(ops.greater(ops.sum(x), 0.0), ops.exp, ops.cos, x)})
    rewritten = in_float32(graph, everything)
    verify(rewritten)
    (node,) = [n for n in rewritten.nodes if n.regions]
    assert [types(region)[1][1] for region in node.regions] == ["float32", "float32"]
    assert node.result.type == TensorType(graph.outputs[0].dtype, (4,))
    ones = np.ones(4, np.float16)
    np.testing.assert_array_equal(
        evaluate(rewritten, {"x": ones})["y"], np.exp(ones.astype(np.float32)).astype(np.float16)
    )


def test_values_that_are_read_in_part_are_not_converted():
    with Builder() as b:
        x, w = b.input("x", (4, 8), "bfloat16"), b.param("w", (2, 8, 3), "bfloat16")
        with b.at(b.origin, {"cached": True}):
            y = ops.matmul(x, w)
        graph = b.build({"y": y})
    assert in_float32(graph, everything) is graph


def test_open_sizes_that_a_guard_makes_equal():
    with Builder() as b:
        x, y = b.input("x", ("N", 8), "bfloat16"), b.input("y", ("M", 8), "bfloat16")
        graph = b.build({"z": x + y})
    assert graph.guards
    rewritten = in_float32(graph, everything)
    assert rewritten.guards == graph.guards
    assert rewritten.outputs[0].type == graph.outputs[0].type
