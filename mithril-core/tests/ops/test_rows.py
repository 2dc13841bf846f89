"""Row independence: derived for every operation's samples, and compared with computed values."""

from __future__ import annotations

import numpy as np
import pytest

from mithril import ops
from mithril.graph import Builder
from mithril.graph.dims import Dim
from mithril.graph.evaluation import evaluate
from mithril.ops.row_independence import first_row_mixing_node

B = Dim("B", 1, 64)
ROWS = 5


def graph_of(write, *shapes):
    with Builder() as b:
        inputs = [b.input(f"x{k}", s) for k, s in enumerate(shapes)]
        y = write(*inputs)
    return b.build({"y": y})


def running(x, shape):
    """Sums so far, step by step along the first axis."""
    return ops.scan(lambda h, e: (ops.tanh(h + e), h), ops.full(shape=shape, value=0.0, dtype="float32"), x)[1]


APART = {
    "linear": (lambda x, w: ops.linear(x, w, None), (B, 3, 4), (5, 4)),
    "chain": (lambda x, w: ops.softmax(ops.matmul(x, w), axis=-1), (B, 4), (4, 4)),
    "element-wise with a vector": (lambda x, v: ops.maximum(x, v) * 2.0, (B, 4), (4,)),
    "norm": (lambda x, s: ops.layer_norm(x, s, s), (B, 3, 4), (4,)),
    "batch norm with given statistics": (
        lambda x, s: ops.batch_norm(x, s, s, s, ops.square(s) + 1.0),
        (B, 4, 5),
        (4,),
    ),
    "heads": (
        lambda x: ops.reshape(ops.transpose(ops.reshape(x, shape=(B, 3, 2, 4)), perm=(0, 2, 1, 3)), shape=(B, 2, 3, 4)),
        (B, 3, 8),
    ),
    "attention": (lambda q, k, v: ops.attention(q, k, v, causal=True), (B, 2, 5, 4), (B, 2, 5, 4), (B, 2, 5, 4)),
    "sum of each row": (lambda x: ops.sum(x, axis=1), (B, 4)),
    "conv": (
        lambda x, w: ops.conv(x, w, padding=((1, 1), (1, 1)), stride=(1, 1), dilation=(1, 1)),
        (B, 3, 6, 6),
        (4, 3, 3, 3),
    ),
    "pool": (lambda x: ops.max_pool(x, kernel=(2, 2), stride=(2, 2)), (B, 3, 6, 6)),
    "flatten": (lambda x: ops.reshape(x, shape=(B, 12)), (B, 3, 4)),
    "constants of as many rows": (
        lambda x: ops.concat(x, ops.full(shape=(B, 1), value=1.0, dtype="float32"), axis=1),
        (B, 3),
    ),
    "time first": (lambda x: ops.cumsum(ops.transpose(x, perm=(1, 0, 2)), axis=0), (B, 3, 4)),
    "rows second": (lambda x: x * 2.0, (3, B)),
    "batches of products": (lambda a, b: ops.matmul(a, ops.transpose(b, perm=(0, 2, 1))), (B, 3, 4), (B, 5, 4)),
    "transposed conv": (lambda x, w: ops.conv_transpose(x, w, stride=(2, 2)), (B, 3, 4, 4), (3, 2, 2, 2)),
    "channels of pools": (lambda x: ops.avg_pool(x, kernel=(2,), stride=(2,)), (3, B, 6)),
    "gradient of a pool": (lambda g, x: ops.max_pool_grad(g, x, kernel=(2,), stride=(2,)), (B, 2, 3), (B, 2, 6)),
    "columns of a look-up": (lambda x: ops.gather_nd(x, np.array([[0], [2]], np.int32)), (4, B)),
    "barrier": (lambda x, v: ops.barrier(x, v)[0], (B, 3), (4,)),
    "padding other axes": (lambda x: ops.pad(x, widths=((0, 0), (1, 1))), (B, 3)),
    "slices of other axes": (lambda x: x[:, 1:3], (B, 4)),
    "scan over time": (lambda x: running(ops.transpose(x, perm=(1, 0, 2)), (B, 4)), (B, 3, 4)),
}
MIXED = {
    "mean of all": (lambda x: ops.mean(x), "'mean'", (B, 4)),
    "sum over rows": (lambda x: ops.sum(x, axis=0), "'sum'", (B, 4)),
    "rows as columns": (lambda x: ops.matmul(ops.transpose(x, perm=(1, 0)), x), "'matmul'", (B, 4)),
    "pairs of rows": (lambda x: ops.reshape(x, shape=(B * 4,)), "'reshape'", (B, 4)),
    "the first row": (lambda x: x[0], "'select'", (B, 4)),
    "softmax over rows": (lambda x: ops.softmax(x, axis=0), "'softmax'", (B, 4)),
    "statistics of the batch": (
        lambda x, s: ops.batch_norm_training(x, s, s)[0],
        "'batch_norm_training'",
        (B, 4, 5),
        (4,),
    ),
    "the number of rows": (
        lambda x: x * ops.cast(ops.size_value(value=B), dtype="float32"),
        "'size_value'",
        (B, 4),
    ),
    "random numbers": (
        lambda x, k: x + ops.uniform(ops.cast(k, dtype="uint32"), shape=(B, 4), dtype="float32"),
        "'uniform'",
        (B, 4),
        (2,),
    ),
    "reversed rows": (lambda x: ops.flip(x, axis=(0,)), "'flip'", (B, 4)),
    "rows below each other": (lambda x: ops.concat(x, x, axis=0), "'concat'", (B, 4)),
    "a row more": (lambda x: ops.pad(x, widths=((1, 0), (0, 0))), "'pad'", (B, 4)),
    "all against all": (lambda x: ops.reshape(x, shape=(B, 1)) + ops.reshape(x, shape=(1, B)), "'add'", (B,)),
    "scan over rows": (lambda x: running(x, (4,)), "'scan'", (B, 4)),
    "rows further in": (
        lambda x: ops.reshape(ops.reshape(x, shape=(B, 2, 3)), shape=(2, B, 3)),
        "'reshape'",
        (B, 6),
    ),
}


def along(value):
    return next(axis for axis, n in enumerate(value.shape) if n == B)


@pytest.mark.parametrize("name", APART)
def test_independent_rows(name):
    """The derived answer is true: rows have the same results among other rows."""
    write, *shapes = APART[name]
    graph = graph_of(write, *shapes)
    assert first_row_mixing_node(graph, B) is None
    rng = np.random.default_rng(0)
    more = {
        i.name: rng.normal(size=[2 * ROWS if n == B else n for n in i.type.shape]).astype("f") for i in graph.inputs
    }
    few = {
        i.name: np.take(more[i.name], range(ROWS), axis=along(i.value)) if B in i.type.shape else more[i.name]
        for i in graph.inputs
    }
    full, part = (evaluate(graph, arrays)["y"] for arrays in (more, few))
    np.testing.assert_allclose(np.take(full, range(ROWS), axis=along(graph.outputs[0])), part, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_not(name):
    write, reason, *shapes = MIXED[name]
    mixing_node = first_row_mixing_node(graph_of(write, *shapes), B)
    assert mixing_node is not None and mixing_node.startswith(reason), mixing_node


def test_an_input_with_rows_along_two_axes():
    assert first_row_mixing_node(graph_of(lambda x: x, (B, B)), B) == "input 'x0' of shape [B, B]"
