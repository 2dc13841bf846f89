"""Inference passes: batch norm folding, horizontal fusion, quantized pairs dropped only on request."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.graph import Builder, verify
from mithril.models import BatchNorm1d, BatchNorm2d, Conv2d, Linear, Model, MultiHeadAttention, Relu
from mithril.ops import dequantize, linear, quantize
from mithril_testing import PassConformance

IMAGE = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def siblings():
    with Builder() as b:
        x = b.input("x", (20, 8))
        y = {n: linear(x, b.param(n, (k, 8)), b.param(f"{n}_bias", (k,))) for n, k in (("q", 3), ("k", 5), ("v", 2))}
    return b.build(y)


class TestSiblings(PassConformance):
    pass_ = "sibling-products"
    graphs = {"siblings": siblings()}


class TestBatchNormFolding(PassConformance):
    pass_ = "batch-norm-folding"


def ops_of(compiled):
    return [n.op.name for n in compiled.graph.nodes]


def params_of(compiled):
    return [i.value for i in compiled.graph.inputs]


def state_of(compiled):
    rng = np.random.default_rng(1)
    return {n: rng.uniform(0.5, 1.5, np.shape(a)).astype(np.float32) for n, a in compiled.initial_state().items()}


@pytest.mark.parametrize("bias", [True, False])
def test_batch_norm_goes_into_the_convolution(bias):
    model = Model()
    model |= Conv2d(3, 4, kernel_size=3, bias=bias, name="c")(input="x", output="h")
    model |= BatchNorm2d(4, name="n")(input="h", output="g")
    model |= Relu()(input="g", output="output")
    plain = ml.compile(model, "numpy", shapes={"x": [2, 3, 8, 8]})
    folded = ml.compile(model, "numpy", shapes={"x": [2, 3, 8, 8]}, inference=True)
    assert "batch_norm" in ops_of(plain) and "batch_norm" not in ops_of(folded)
    params, state = plain.randomize_params(0), state_of(plain)
    expected = plain.evaluate(params, {"x": IMAGE}, state=state)[0]["output"]
    actual = folded.evaluate(params, {"x": IMAGE}, state=state)[0]["output"]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_an_open_batch_counts_as_one_image():
    """Run all batches in one program: scaled weights must pay off for the least of them."""
    model = Model()
    model |= Conv2d(64, 64, kernel_size=3, padding=1, name="c")(input="x", output="h")
    model |= BatchNorm2d(64, name="n")(input="h", output="output")
    for pixels, folded in ((8, False), (32, True)):
        for batch in (None, 1):
            compiled = ml.compile(model, "numpy", shapes={"x": [batch, 64, pixels, pixels]}, inference=True)
            scaled = [
                n for n in compiled.graph.nodes if n.op.name == "conv" and n.operands[1] not in params_of(compiled)
            ]
            assert bool(scaled) is folded


def test_batch_norm_goes_into_the_linear():
    model = Model()
    model |= Linear(4, name="l")(input="x", output="h")
    model |= BatchNorm1d(4, name="n")(input="h", output="output")
    x = np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32)
    plain = ml.compile(model, "numpy", shapes={"x": [32, 6]})
    folded = ml.compile(model, "numpy", shapes={"x": [32, 6]}, inference=True)
    assert "batch_norm" not in ops_of(folded)
    params, state = plain.randomize_params(0), state_of(plain)
    expected = plain.evaluate(params, {"x": x}, state=state)[0]["output"]
    np.testing.assert_allclose(
        folded.evaluate(params, {"x": x}, state=state)[0]["output"], expected, rtol=1e-4, atol=1e-5
    )


def test_a_convolution_that_others_read_is_left():
    model = Model()
    model |= Conv2d(3, 4, kernel_size=3, name="c")(input="x", output="h")
    model |= BatchNorm2d(4, name="n")(input="h", output="g")
    compiled = ml.compile(model, "numpy", shapes={"x": [2, 3, 8, 8]}, inference=True, outputs=["h", "g"])
    assert "batch_norm" in ops_of(compiled)


def test_training_keeps_its_batch_norm_and_the_switch_works():
    model = Model()
    model |= Conv2d(3, 4, kernel_size=3, name="c")(input="x", output="h")
    model |= BatchNorm2d(4, name="n")(input="h", output="g")
    shapes = {"x": [2, 3, 8, 8]}
    assert "batch-norm-folding" not in ml.compile(model, "numpy", shapes=shapes).pipeline.names
    off = ml.compile(model, "numpy", shapes=shapes, inference=True, optimizations={"batch-norm-folding": False})
    assert "batch_norm" in ops_of(off)


def test_queries_keys_and_values_are_one_product_at_level_high():
    model = Model()
    model |= MultiHeadAttention(16, 2, name="a")(query="x", output="y")
    x = np.random.default_rng(0).standard_normal((2, 9, 16)).astype(np.float32)
    results = []
    for level in ("medium", "high"):
        compiled = ml.compile(model, "numpy", shapes={"x": [2, 9, 16]}, optimization_level=level)
        results.append(compiled.evaluate(compiled.randomize_params(0), {"x": x})["y"])
        assert ops_of(compiled).count("linear") == (4 if level == "medium" else 2)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_few_rows_are_not_worth_copying_the_weights():
    model = Model()
    model |= MultiHeadAttention(16, 2, name="a")(query="x", output="y")
    compiled = ml.compile(model, "numpy", shapes={"x": [1, 3, 16]}, optimization_level="high")
    assert ops_of(compiled).count("linear") == 4


def test_quantized_pairs_are_dropped_only_on_request():
    with Builder() as b:
        x, scale = b.input("x", (4, 8)), b.param("scale", ())
        y = dequantize(quantize(x, scale), scale)
    graph = b.build({"y": y})
    from mithril_passes.cleaning.simplify import QUANTIZE_PAIRS

    result = QUANTIZE_PAIRS(graph)
    verify(result)
    assert not result.nodes
    assert "quantize-pairs" not in ml.compile(Model.create(outputs={"o": ml.IOKey("i") + 1.0}), "numpy").pipeline.names
