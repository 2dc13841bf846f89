"""Gradient checkpointing: equal gradients, less memory, barriers that hold, the requested segments."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import mithril as ml
from mithril.backend.memory_plan import plan
from mithril.derivatives import gradients
from mithril.graph import Builder, verify
from mithril.graph.evaluation import evaluate
from mithril.models import Dropout, Model, TransformerEncoderLayer
from mithril.ops import exp, matmul, sum, tanh
from mithril.passes import PassContext, random_arguments
from mithril_passes.cleaning.cleanup import common_subexpression, dead_code_elimination
from mithril_passes.memory.checkpointing import gradient_checkpointing, split_forward_backward

X = np.random.default_rng(0).standard_normal((2, 32, 32)).astype(np.float32)


def deep(layers=24, dropout=0.0):
    model = Model()
    for k in range(layers):
        model += TransformerEncoderLayer(32, 2, 128, name=f"l{k}")
        if dropout:
            model += Dropout(dropout, name=f"d{k}")
    return model


def measured(layers=24, dropout=0.0, **options):
    compiled = ml.compile(deep(layers, dropout), "numpy", shapes={"input": [2, 32, 32]}, **options)
    params = compiled.randomize_params(0)
    (name,) = [n for n in compiled.interface.output_names if not n.startswith("state/")]
    call = {name: np.ones_like(X)}
    compiled.evaluate(params, {"input": X}, call)
    tracemalloc.start()
    gradients = compiled.evaluate(params, {"input": X}, call)[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return gradients, peak - sum_bytes(gradients), compiled


def sum_bytes(arrays):
    return np.sum([a.nbytes for a in arrays.values()])


def test_memory_falls_to_a_third_at_equal_gradients():
    expected, before, _ = measured()
    gradients, after, compiled = measured(gradient_checkpointing=True)
    for name, g in expected.items():
        np.testing.assert_array_equal(gradients[name], g, err_msg=name)
    assert before >= 3 * after, (before, after)
    assert "segments" in str(compiled.decisions)


def test_dropout_draws_the_same_again():
    expected, _, _ = measured(layers=4, dropout=0.3)
    gradients, _, _ = measured(layers=4, dropout=0.3, gradient_checkpointing=True, checkpoint_segments=3)
    for name, g in expected.items():
        np.testing.assert_array_equal(gradients[name], g, err_msg=name)


def test_number_of_segments_is_as_requested():
    _, _, compiled = measured(layers=6, gradient_checkpointing=True, checkpoint_segments=4)
    assert "gradient checkpointing in 4 segments" in str(compiled.decisions)
    barriers = [n for n in compiled.graph.nodes if n.op.name == "barrier"]
    assert len(barriers) == 3  # the last segment's values are still there


def chain(n=12, size=64):
    with Builder() as b:
        x = b.input("x", (8 * size, size))
        for k in range(n):
            x = tanh(matmul(x, b.param(f"w{k}", (size, size))))
        y = sum(exp(x * 0.1))
    return gradients(b.build({"y": y}))


def test_the_plan_shrinks_and_cleaning_does_not_merge_it_back():
    graph = chain()
    result = gradient_checkpointing(graph, PassContext(options={}))
    verify(result, since=graph)
    cleaned = common_subexpression(dead_code_elimination(result))
    assert len(cleaned.nodes) == len(result.nodes)
    assert plan(cleaned).size < 0.75 * plan(graph).size
    arguments = random_arguments(graph)
    expected, actual = evaluate(graph, arguments), evaluate(result, arguments)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)


def test_recomputation_waits_for_the_cotangent():
    result = gradient_checkpointing(chain(), PassContext(options={"checkpoint_segments": 3}))
    _, backward = split_forward_backward(result)
    later = {v for n in backward for v in n.results}
    for node in result.nodes:
        if node.op.name == "barrier":
            assert any(v in later or v.name.startswith("grad/") for v in node.operands), node


def test_forward_graph_is_unchanged():
    with Builder() as b:
        y = tanh(b.input("x", (4,)))
    graph = b.build({"y": y})
    assert gradient_checkpointing(graph, PassContext()) is graph


def test_no_segments_is_a_mistake():
    with pytest.raises(ml.OptionError, match="checkpoint_segments.*at least 1"):
        measured(layers=2, gradient_checkpointing=True, checkpoint_segments=0)


# -- the limit ----------------------------------------------------------------------------------------------------
def test_too_much_memory_is_refused_with_a_remedy_that_works():
    with pytest.raises(ml.MemoryLimitError) as error:
        measured(max_memory_gb="3MB")
    text = str(error.value)
    assert "this program needs" in text and "max_memory_gb allows 3 MB" in text and "largest: '" in text
    assert "gradient_checkpointing=True needs" in text
    measured(max_memory_gb="3MB", gradient_checkpointing=True)


def test_a_batch_that_fits_is_named():
    model = Model()
    model += TransformerEncoderLayer(32, 2, 128)
    with pytest.raises(ml.MemoryLimitError, match="a batch of [0-9]+ fits") as error:
        ml.compile(model, "numpy", shapes={"input": [64, 32, 32]}, max_memory_gb="1MB")
    batch = int(str(error.value).rpartition("a batch of ")[2].split()[0])
    ml.compile(model, "numpy", shapes={"input": [batch, 32, 32]}, max_memory_gb="1MB")


def test_a_strategy_without_an_arena_is_recorded_and_unknown_ones_refused():
    model = deep(1)
    compiled = ml.compile(model, "numpy", shapes={"input": [2, 32, 32]}, memory_planning="best_fit")
    assert "memory_planning='best_fit': backend 'numpy' has no arena" in str(compiled.decisions)
    with pytest.raises(ml.OptionError, match="unknown memory planning strategy 'gredy'"):
        ml.compile(model, "numpy", shapes={"input": [2, 32, 32]}, memory_planning="gredy")


def test_policies_store_products_in_segments_of_layers():
    def recomputed(policy):
        options = {"gradient_checkpointing": True, "checkpoint_policy": policy, "shapes": {"input": [2, 32, 32]}}
        compiled = ml.compile(deep(4), "numpy", **options)
        params = compiled.randomize_params(0)
        (name,) = [n for n in compiled.interface.output_names if not n.startswith("state/")]
        gradients = compiled.evaluate(params, {"input": X}, {name: np.ones_like(X)})[1]
        nodes = [n for n in compiled.programs[-1].graph.nodes if n.tags.get("phase") == "recomputed"]
        assert "gradient checkpointing in 5 segments" in str(compiled.decisions)  # 4 layers, the next key
        return gradients, [n.op.name for n in nodes if n.op.name in ("linear", "matmul", "attention")]

    policies = ("nothing", "dots_with_no_batch_dims", "dots")
    results, operations = zip(*map(recomputed, policies), strict=True)
    for name, g in results[0].items():
        for other in results[1:]:
            np.testing.assert_allclose(other[name], g, atol=1e-5, err_msg=name)
    assert [sorted(set(names)) for names in operations] == [["attention", "linear"], ["attention"], []]
