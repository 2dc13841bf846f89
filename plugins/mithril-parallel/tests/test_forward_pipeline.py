"""Forward passes in stages and chunks: results, and gradients that each chunk computes from its cotangents."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import block, scalar_loss

import mithril as ml
from mithril import ops
from mithril.derivatives import gradients
from mithril.graph import Builder, cotangent_name, evaluate


def forward(model, shapes):
    return ml.compile(model, "numpy", shapes=shapes, optimization_level="none").graph


def loss_graph(kind):
    """Return a loss of a linear layer: a mean over valid targets, or another function of all rows."""
    with Builder() as builder:
        x, t = builder.input("x", (8, 3)), builder.input("t", (8,), ml.int32)
        w, s = builder.input("w", (3, 1), role="param"), builder.input("s", (), role="param")
        y = ops.reshape(ops.matmul(x, w), shape=(8,))
        valid = ops.cast(ops.greater(t, 0), dtype=ml.float32)
        mean = ops.sum(y * y * valid) / ops.sum(valid)
        loss = {
            "mean": lambda: mean,
            "penalty": lambda: mean + 0.1 * ops.sum(w * w) + s,
            "root": lambda: ops.sqrt(mean),
            "learned weight": lambda: mean * s,
        }[kind]()
        ratio = ops.sqrt(mean)  # a report
    return builder.build({"loss": loss, "ratio": ratio, "y": y})


def arguments_of(graph):
    numbers = np.random.default_rng(0)
    arguments = {}
    for i in graph.arguments:
        shape = tuple(map(int, i.type.shape))
        array = numbers.integers(0, 3, shape) if i.type.dtype.is_integer else numbers.normal(size=shape)
        arguments[i.name] = np.asarray(array, i.type.dtype.numpy)
    return arguments


def run(plan, arguments, chunks):
    """Return the results of the stages, run in order on each chunk, and the gradients of the first result."""
    cut = plan.cut
    parts = []
    for c in range(chunks):
        inputs = {n: np.split(x, chunks, cut.axes[n])[c] if n in cut.axes else x for n, x in arguments.items()} | {
            plan.indices[0]: np.int32(c)
        }
        parts.append(inputs)
    ends = [run_stages(plan, inputs) for inputs in parts]
    totals = {n: total(cut, n, [e[n] for e in ends]) for n in ends[0]}
    results = {n: totals[end] for n, end in cut.results.items()}
    if cut.finish is not None:
        results |= evaluate(cut.finish, select(cut.finish, {**arguments, **totals}))
    seeds = {}
    if cut.seeds is not None:
        ahead = {}
        if plan.ahead is not None:
            values = [evaluate(plan.ahead, select(plan.ahead, inputs)) for inputs in parts]
            ahead = {n: total(cut, n, [v[n] for v in values]) for n in values[0]}
        seeds = evaluate(cut.seeds, select(cut.seeds, {**arguments, **ahead, cotangent_name("loss"): np.float32(1)}))
    elif "loss" in cut.results:
        seeds = {cut.results["loss"]: np.float32(1)}
    assert set(seeds) == set(plan.objectives)
    params = [i.name for i in cut.body.with_role("param")]
    with_gradients = gradients(cut.body, plan.objectives, params)
    sums = dict.fromkeys(params, 0.0)
    for inputs in parts:
        cotangents = {cotangent_name(n): x if n in cut.sums else x / chunks for n, x in seeds.items()}
        values = evaluate(with_gradients, select(with_gradients, {**inputs, **cotangents}))
        sums = {n: sums[n] + values[cotangent_name(n)] for n in params}
    return results, sums


def run_stages(plan, inputs):
    values, ends = dict(inputs), {}
    for k, stage in enumerate(plan.stages):
        assert k > 0 or not stage.takes
        results = evaluate(stage.graph, select(stage.graph, values))
        ends |= {n: results[n] for n in stage.results}
        values = inputs | {n: results[n] for n in stage.gives}
    return ends


def select(graph, values):
    return {i.name: np.asarray(values[i.name], i.type.dtype.numpy) for i in graph.arguments}


def total(cut, name, parts):
    if name in cut.axes:
        return np.concatenate(parts, cut.axes[name])
    return np.sum(parts, 0) if name in cut.sums else parts[-1]


@pytest.mark.parametrize(("stages", "chunks"), [(1, 4), (2, 1), (3, 2)])
@pytest.mark.parametrize(
    ("model", "shapes"),
    [(block(16, 4, 32), {"x": [8, 6, 16]}), (scalar_loss(16), {"x": [8, 12]})],
    ids=["block", "loss"],
)
def test_stages_and_chunks_equal_the_full_graph(model, shapes, stages, chunks):
    graph = forward(model, shapes)
    arguments = arguments_of(graph)
    objectives = [n for n in graph.output_names if n == "loss"]
    plan = ml.forward_pipeline(graph, objectives, stages, chunks)
    assert len(plan.stages) == stages
    expected, (results, sums) = evaluate(graph, arguments), run(plan, arguments, chunks)
    for name, x in expected.items():
        np.testing.assert_allclose(results[name], x, rtol=1e-5, atol=1e-6, err_msg=name)
    if objectives:
        assert_gradients(graph, arguments, sums)


def assert_gradients(graph, arguments, sums):
    full = gradients(graph, ["loss"], list(sums))
    right = evaluate(full, select(full, {**arguments, cotangent_name("loss"): np.float32(1)}))
    for name, x in sums.items():
        np.testing.assert_allclose(x, right[cotangent_name(name)], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["mean", "penalty"])
def test_a_mean_over_valid_targets_has_exact_gradients_in_chunks(kind):
    graph = loss_graph(kind)
    arguments = arguments_of(graph)
    assert len({int((np.split(arguments["t"], 4)[c] > 0).sum()) for c in range(4)}) > 1
    plan = ml.forward_pipeline(graph, ["loss"], 1, 4)
    results, sums = run(plan, arguments, 4)
    for name, x in evaluate(graph, arguments).items():
        np.testing.assert_allclose(results[name], x, rtol=1e-5, atol=1e-6, err_msg=name)
    assert_gradients(graph, arguments, sums)


@pytest.mark.parametrize("kind", ["root", "learned weight"])
def test_a_loss_whose_gradient_needs_all_chunks_is_refused(kind):
    with pytest.raises(ml.UnsupportedError, match="depends on all chunks") as caught:
        ml.forward_pipeline(loss_graph(kind), ["loss"], 1, 4)
    assert "pipeline_chunks=1" in str(caught.value)
    assert ml.forward_pipeline(loss_graph(kind), ["loss"], 1, 1).cut.seeds is None


@pytest.mark.parametrize(("rows", "data", "chunks"), [(8, 1, 4), (6, 1, 3), (7, 1, 1), (1, 1, 1), (8, 2, 4), (4, 2, 2)])
def test_a_batch_that_cannot_be_divided_has_fewer_chunks(rows, data, chunks):
    graph = forward(block(16, 4, 32), {"x": [rows, 6, 16]})
    splits = {"x": ("data", None, None)} if data > 1 else {}
    assert ml.forward_pipeline(graph, [], 1, 4, rows={"data": data}, splits=splits).chunks == chunks


def test_impossible_chunks_and_stages_are_refused_with_a_remedy():
    graph = forward(block(16, 4, 32), {"x": [8, 6, 16]})
    with pytest.raises(ml.OptionError, match=r"pipeline_stages=99 is out of range(.|\n)*set pipeline_stages between"):
        ml.forward_pipeline(graph, [], 99)
    with pytest.raises(ml.OptionError, match="must be at least 1"):
        ml.forward_pipeline(graph, [], 1, 0)
