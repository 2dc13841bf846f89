"""What a batch in chunks can do: everything that leaves examples apart. The rest is refused, by the layer's name."""

from __future__ import annotations

import numpy as np
import pytest
from test_shard import CASES, step_graph

import mithril as ml
from mithril import ops
from mithril.base import UnsupportedError
from mithril.ir import Builder, evaluate
from mithril.models import BatchNorm1d, Conv2d, Flatten, IOKey, Linear, MaxPool2d, Model, Relu
from mithril_parallel.sharding.api import CHUNK
from mithril_parallel.sharding.spmd import cut

# Of the operations whose results have the examples of their first operand, these look at other examples as well.
MIXING = {
    "argsort": "an order of all examples",
    "dynamic_update_slice": "examples from a place on are replaced",
    "flip": "the last example comes first",
    "scatter": "examples that a place names are replaced",
    "scatter_add": "examples that a place names are added to",
    "scatter_nd": "examples that a place names are replaced",
    "scatter_nd_add": "examples that a place names are added to",
    "sort": "an order of all examples",
    "ternarize": "one scale for all elements",
    "top_k": "the largest of all examples",
}


def refused(case):
    """Whether the first operand cannot be cut into chunks along its first axis; None where that says nothing."""
    name, first = next(iter(case.inputs().items()), ("", np.zeros(())))
    graph = case.graph()
    if not first.ndim or not first.shape[0] or first.shape[0] % 2 or first.shape[0] not in _lengths(graph):
        return None
    split = {name: (CHUNK, *[None] * (first.ndim - 1))}
    try:
        cut(graph, {CHUNK: 2}, split, sequential_axes=(CHUNK,))
    except UnsupportedError:
        return True
    return False


def _lengths(graph):
    return [v.shape[0] for v in graph.outputs if v.ndim]


def test_what_mixes_examples():
    refusals = {}
    for case in CASES:
        refusals.setdefault(case.op.name, set()).add(refused(case))
    assert {name for name, answers in refusals.items() if True in answers} == MIXING.keys() & refusals.keys()
    assert len([name for name, answers in refusals.items() if False in answers]) > 70


def chunked(graph, arguments):
    """One stage, two chunks, run by the references."""
    from test_pipeline import run

    pipeline = ml.staged(graph, 1, 2)
    return run(pipeline, arguments)


def test_pooling_and_its_gradient():
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
    ids=["a product with a vector", "a branch", "places in each row", "an order of each row"],
)
def test_examples_that_stay_apart(make):
    graph = built(make, x=(4, 6), w=(6,))
    numbers = np.random.default_rng(0)
    arguments = {"x": numbers.standard_normal((4, 6), np.float32), "w": numbers.standard_normal(6).astype(np.float32)}
    np.testing.assert_allclose(chunked(graph, arguments)["y"], evaluate(graph, arguments)["y"], rtol=1e-6)


def test_a_branch_that_looks_at_the_batch_is_refused():
    graph = built(lambda x: ops.cond(ops.greater(ops.sum(x), 0.0), lambda: (x * 2.0,), lambda: (x,))[0], x=(4, 6))
    with pytest.raises(ml.UnsupportedError, match="mixes the examples"):
        ml.staged(graph, 1, 2)


def test_what_mixes_examples_is_refused_by_name():
    model = Model.create(outputs={"y": Linear(4, name="head")(BatchNorm1d(8, name="norm")(IOKey("x")))})
    graph, _ = step_graph(model, {"x": [8, 8]}, "y")
    with pytest.raises(ml.UnsupportedError, match="mixes the examples") as caught:
        ml.staged(graph, 2, 4)
    assert "norm" in str(caught.value)
    assert ml.staged(graph, 2, 1).chunks == 1


def test_a_batch_that_cannot_be_cut_says_what_can():
    graph, _ = step_graph(Model.create(outputs={"y": Linear(4)(IOKey("x"))}), {"x": [8, 8]}, "y")
    with pytest.raises(ml.OptionError) as caught:
        ml.staged(graph, 1, 3)
    assert str(caught.value) == (
        "8 items of input 'x' cannot be cut into 3 chunks\n"
        "hint: a batch of 9 (drop_last=True for the end of a DataLoader), or pipeline_chunks=2"
    )
