"""Partitioned graphs equal the full graph: every operation with sampled splits, models and their gradients."""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import pytest
from gpt import gpt
from lstm_lm import lstm_lm
from shards import run, shard
from small_models import block, scalar_loss

import mithril as ml
from mithril import ops
from mithril.compiler import ProgramKey, ProgramKind
from mithril.derivatives import operation_gradient
from mithril.graph import ALL, Builder, Op, evaluate
from mithril.graph.type_rules import floating, same_shape
from mithril_parallel import plugin
from mithril_parallel.sharding.custom_gradients import is_linear
from mithril_parallel.sharding.spmd import partition_graph
from mithril_testing.cases import backend_cases

MESH = {"data": 2, "model": 2}
RANDOM = {"random_bits", "uniform", "normal", "bernoulli", "dropout", "split_key", "fold_in"}
CASES = [
    case
    for case in backend_cases(ALL)
    if case.dtype is None and not case.op.name.startswith("mesh.") and case.op.name not in RANDOM
]


def splits_of(array):
    """Yield all splits of up to two divisible axes."""
    fits = [k for k, n in enumerate(array.shape) if n and n % 2 == 0]
    for data, model in itertools.product([None, *fits], repeat=2):
        if data is None or data != model:
            yield tuple("data" if k == data else "model" if k == model else None for k in range(array.ndim))


def sampled_splits(case, limit=12):
    """Return at most ``limit`` combinations of splits of the operands."""
    choices = [list(splits_of(a)) for a in case.arrays if a is not None]
    every = list(itertools.product(*choices))
    rng = np.random.default_rng(len(every))
    selection = rng.permutation(len(every))[:limit]
    return [every[k] for k in sorted(selection)]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_partitioned_operation_equals_reference(case):
    graph = case.graph()
    inputs = case.inputs()
    expected = evaluate(graph, inputs)
    for combination in sampled_splits(case):
        names = dict(zip(inputs, combination, strict=True))
        outputs = run(partition_graph(graph, MESH, names), inputs)
        for name, x in expected.items():
            scale = np.abs(x[np.isfinite(x)]).max(initial=1.0) if x.dtype.kind == "f" else 1.0
            if x.dtype.kind in "iub":
                np.testing.assert_array_equal(outputs[name], x, err_msg=str(names))
            else:
                np.testing.assert_allclose(
                    outputs[name].astype(np.float64),
                    x.astype(np.float64),
                    rtol=1e-5,
                    atol=1e-6 * float(scale),
                    err_msg=str(names),
                )


def test_inner_axis_stays_split_through_a_merged_axis():
    """Merged axes are divided in blocks: element-wise operations and sums keep the blocks, a reshape removes them."""
    with Builder() as b:
        x = b.input("x", (4, 6, 3))
        flat = ops.tanh(ops.reshape(x, shape=(24, 3)) * 2.0)
        y = ops.reshape(ops.sum(flat, axis=1), shape=(4, 6))
        z = ops.sum(flat, axis=0)
    graph = b.build({"y": y, "z": z})
    arrays = {"x": np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)}
    sharded = partition_graph(graph, {"data": 2}, {"x": (None, "data", None)})
    assert sharded.outputs["y"].split == (None, "data")
    assert [n.op.name for n in sharded.graph.nodes if n.op.name.startswith("mesh.")] == ["mesh.all_reduce"]
    for name, expected in evaluate(graph, arrays).items():
        np.testing.assert_allclose(run(sharded, arrays)[name], expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- models
def step_graph(model, shapes, target):
    """Return the training graph that PyTorch's backend would compile, and arguments for it."""
    pytest.importorskip("mithril_torch")
    compiled = ml.compile(model, "torch", shapes=shapes)
    types = compiled.programs[0].request.types
    graph = compiled.compiler.lowered(ProgramKey(types, ProgramKind(True, (target,))))
    numbers = np.random.default_rng(0)
    params = {n: compiled.backend.to_numpy(x) for n, x in compiled.randomize_params(0).items()}
    state = {n: compiled.backend.to_numpy(x) for n, x in compiled.initial_state().items()}
    arguments = {**params, **state}
    for i in graph.arguments:
        if i.name not in arguments:
            shape = i.type.shape
            array = numbers.integers(0, 5, shape) if i.type.dtype.is_integer else numbers.normal(size=shape)
            arguments[i.name] = np.asarray(array, i.type.dtype.numpy)
    return graph, arguments


MODELS = {
    "block": (lambda: block(16, 4, 32), {"x": [4, 6, 16]}, "y"),
    "gpt": (lambda: gpt(32, 8, layers=2, heads=4, features=16), {"input": [4, 8]}, "output"),
    "lstm": (lambda: lstm_lm(16, 8), {"input": [4, 6]}, "output"),
    "loss": (lambda: scalar_loss(16), {"x": [8, 12]}, "loss"),
}
WAYS = {
    "data": ({"data": 4}, {}),
    "model": ({"model": 2}, {}),
    "both": ({"data": 2, "model": 2}, {}),
    "fsdp": ({"data": 4}, {"fsdp": True}),
    "fsdp and model": ({"data": 2, "model": 2}, {"fsdp": True}),
    "requested": ({"model": 2}, {"splits": {"weights": 0}}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_sharded_model_and_gradients_equal_one_device(name, way):
    make, shapes, target = MODELS[name]
    graph, arguments = step_graph(make(), shapes, target)
    axes, options = WAYS[way]
    sharded, _ = shard(graph, axes, **options)
    expected, results = evaluate(graph, arguments), run(sharded, arguments)
    for output, x in expected.items():
        np.testing.assert_allclose(results[output], x, rtol=2e-4, atol=2e-5, err_msg=output)


def test_causal_attention_on_parts_of_the_queries_is_one_operation():
    with Builder() as b:
        q, k, v = (b.input(name, (2, 2, 6, 4)) for name in "qkv")
        y = ops.attention(q, k, v, causal=True)
    graph = b.build({"y": y})
    inputs = {name: np.random.default_rng(n).standard_normal((2, 2, 6, 4), np.float32) for n, name in enumerate("qkv")}
    sharded = partition_graph(graph, {"context": 2}, dict.fromkeys("qkv", (None, None, "context", None)))
    operations = [n.op.name for n in sharded.graph.nodes]
    assert operations.count("attention") == 1
    assert operations.count("mesh.all_gather") == 2  # keys and values
    np.testing.assert_allclose(run(sharded, inputs)["y"], evaluate(graph, inputs)["y"], rtol=1e-5)


def test_cotangents_are_counted_by_their_places():
    """Treat a product of the cotangent with itself as not linear."""
    for combine, linear in ((ops.mul, False), (ops.div, False), (ops.add, True)):

        def same(x):
            """Return the operand."""
            return x

        new = ml.op(name="test.same", shape=same_shape, dtype=floating)(same)
        new.surrogate_vjp(lambda g, y, x, combine=combine: (combine(g, g),))
        with Builder() as b:
            new(b.input("x", (3,)))
        assert is_linear(operation_gradient(b.nodes[-1])) == linear, combine


def test_the_plugin_names_every_operation_of_its_modules():
    """An operation without a name there is unknown until another one of its module is used."""
    for spec in plugin.mithril_ops():
        module = importlib.import_module(spec.module)
        declared = {x.name for x in vars(module).values() if isinstance(x, Op)}
        assert set(spec.names) == {name for name in declared if name.startswith("mesh.")}


def test_activations_have_a_layout_where_products_with_split_weights_begin_and_end():
    """Before the query, key and value, after the output of attention, and around the feedforward layer."""
    graph = ml.compile(block(16, 4, 32), "numpy", shapes={"x": [3, 6, 16]}, optimization_level="none").graph
    splits, _ = ml.placement(graph, {"model": 2})
    layouts = [n for n in ml.with_model_layout(graph, splits, 2).nodes if n.op.name == "mesh.constrain"]
    sources = [graph.producers[graph.by_name[n.operands[0].name]].op.name for n in layouts]
    assert sources == ["layer_norm", "linear", "layer_norm", "linear"]
    assert not any("model" in n.attributes["split"] for n in layouts)
