"""Batches in chunks: operations on separate examples run; all others are refused with the layer's name."""

from __future__ import annotations

import numpy as np
import pytest
from test_shard import CASES, step_graph

import mithril as ml
from mithril import ops
from mithril.graph import Builder, UnsupportedError, evaluate
from mithril.models import BatchNorm1d, Conv2d, Flatten, IOKey, Linear, MaxPool2d, Model, Relu
from mithril_parallel.sharding.api import CHUNK
from mithril_parallel.sharding.spmd import partition_graph

# Operations whose results have the examples of their first operand, but which read other examples, too.
MIXING = {
    "argsort": "orders all examples",
    "cholesky": "factors a matrix of all examples",
    "cummax": "accumulates over all examples",
    "cummin": "accumulates over all examples",
    "dynamic_update_slice": "replaces examples from an index on",
    "flip": "moves the last example to the front",
    "logcumsumexp": "accumulates over all examples",
    "nms": "compares all boxes",
    "qr": "factors a matrix of all examples",
    "randint": "draws from one key for all elements",
    "roi_align": "reads the image of each box by index",
    "scatter": "replaces examples by index",
    "scatter_add": "adds to examples by index",
    "scatter_reduce": "combines examples by index",
    "scatter_nd": "replaces examples by index",
    "scatter_nd_add": "adds to examples by index",
    "sort": "orders all examples",
    "svd": "factors a matrix of all examples",
    "ternarize": "uses one scale for all elements",
    "top_k": "selects from all examples",
}


def refused(case):
    """Whether the first operand cannot be cut into chunks along its first axis; None if the case cannot decide this."""
    name, first = next(iter(case.inputs().items()), ("", np.zeros(())))
    graph = case.graph()
    if not first.ndim or not first.shape[0] or first.shape[0] % 2 or first.shape[0] not in _lengths(graph):
        return None
    split = {name: (CHUNK, *[None] * (first.ndim - 1))}
    try:
        partition_graph(graph, {CHUNK: 2}, split, sequential_axes=(CHUNK,))
    except UnsupportedError:
        return True
    return False


def _lengths(graph):
    return [v.shape[0] for v in graph.outputs if v.ndim]


def test_operations_that_mix_examples_are_refused():
    refusals = {}
    for case in CASES:
        refusals.setdefault(case.op.name, set()).add(refused(case))
    assert {name for name, answers in refusals.items() if True in answers} == MIXING.keys() & refusals.keys()
    assert len([name for name, answers in refusals.items() if False in answers]) > 70


def chunked(graph, arguments):
    """Run one stage with two chunks by the reference implementations."""
    from test_pipeline import run

    pipeline = ml.staged(graph, 1, 2)
    return run(pipeline, arguments)


def test_pooling_and_its_gradient_run_in_chunks():
    h = MaxPool2d(2)(Relu()(Conv2d(4, kernel_size=3, padding=1, name="conv")(IOKey("x"))))
    model = Model.create(outputs={"y": Linear(5, name="head")(Flatten()(h))})
    graph, arguments = step_graph(model, {"x": [4, 3, 8, 8]}, "y")
    results = chunked(graph, arguments)
    for name, x in evaluate(graph, arguments).items():
        np.testing.assert_allclose(results[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


def built(make, **shapes):
    with Builder() as builder:
        values = [builder.input(name, shape) for name, shape in shapes.items()]
        output = make(*values)
    return builder.build({"y": output})


@pytest.mark.parametrize(
    "make",
    [
        lambda x, w: ops.matmul(x, w),
        lambda x, w: ops.cond(ops.greater(ops.sum(w), 0.0), lambda: (x * 2.0,), lambda: (x,))[0],
        lambda x, w: ops.scatter_add_along_axis(x, ops.argmax(x, axis=1, keepdims=True), x[:, :1], axis=1),
        lambda x, w: ops.take_along_axis(x, ops.argsort(x, axis=1), axis=1),
    ],
    ids=["product with a vector", "branch", "scatter in each row", "argsort of each row"],
)
def test_operations_on_separate_examples_run_in_chunks(make):
    graph = built(make, x=(4, 6), w=(6,))
    numbers = np.random.default_rng(0)
    arguments = {"x": numbers.standard_normal((4, 6), np.float32), "w": numbers.standard_normal(6).astype(np.float32)}
    np.testing.assert_allclose(chunked(graph, arguments)["y"], evaluate(graph, arguments)["y"], rtol=1e-6)


def test_branch_on_the_batch_is_refused():
    graph = built(lambda x: ops.cond(ops.greater(ops.sum(x), 0.0), lambda: (x * 2.0,), lambda: (x,))[0], x=(4, 6))
    with pytest.raises(ml.UnsupportedError, match="mixes the examples"):
        ml.staged(graph, 1, 2)


def test_layer_that_mixes_examples_is_named_in_the_error():
    model = Model.create(outputs={"y": Linear(4, name="head")(BatchNorm1d(8, name="norm")(IOKey("x")))})
    graph, _ = step_graph(model, {"x": [8, 8]}, "y")
    with pytest.raises(ml.UnsupportedError, match="mixes the examples") as caught:
        ml.staged(graph, 2, 4)
    assert "norm" in str(caught.value)
    assert ml.staged(graph, 2, 1).chunks == 1


def test_indivisible_batch_error_proposes_chunks():
    graph, _ = step_graph(Model.create(outputs={"y": Linear(4)(IOKey("x"))}), {"x": [8, 8]}, "y")
    with pytest.raises(ml.OptionError) as caught:
        ml.staged(graph, 1, 3)
    assert str(caught.value) == (
        "8 items of input 'x' cannot be cut into 3 chunks\n"
        "hint: use a batch of 9 (drop_last=True for the end of a DataLoader), or set pipeline_chunks=2"
    )
