"""Mixed precision: low and full operations, overrides by the user, and accuracy of models."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.graph import Builder, parse, verify
from mithril.models import Embedding, Linear, Model, MSELoss, Relu, TransformerEncoderLayer
from mithril.ops import dequantize, exp, linear, matmul, relu, softmax, sum, transpose
from mithril.passes import PassContext, PassManager
from mithril_passes.precision.mixed_precision import mixed_precision

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


def small(graph, setting=True):
    return PassManager([mixed_precision]).run(graph, PassContext(options={"mixed_precision": setting}))[0]


def dtypes(graph):
    return {n.op.name: n.result.dtype.name for n in graph.nodes if n.op.name != "cast"}


def chain():
    with Builder() as b:
        x = b.input("x", (4, 8))
        w, c = b.param("w", (8, 8)), b.param("c", (8,))
        y = sum(exp(relu(matmul(x, w) + c) * 2.0), axis=1)
    return b.build({"y": y})


def test_products_are_small_followers_follow_and_the_rest_is_full():
    result = small(chain())
    verify(result)
    assert dtypes(result) == {
        "matmul": "bfloat16",
        "add": "bfloat16",
        "relu": "bfloat16",
        "constant": "float32",
        "mul": "bfloat16",  # by a scalar, which follows as well
        "exp": "float32",
        "sum": "float32",
    }
    assert result.outputs[0].dtype is ml.float32
    renamed = small(parse(str(chain()).replace("%relu", "%gate")))
    assert "gate" in {n.result.name for n in renamed.nodes}


def test_parameters_stay_full_and_are_cast_once():
    with Builder() as b:
        x, w = b.input("x", (4, 8)), b.param("w", (8, 8))
        y = matmul(matmul(x, w), w)
    result = small(b.build({"y": y}))
    assert result.input("w").type.dtype is ml.float32
    casts = [n for n in result.nodes if n.op.name == "cast" and n.operands[0] is result.input("w").value]
    assert len(casts) == 1


def test_graph_without_products_is_unchanged():
    with Builder() as b:
        y = exp(b.input("x", (4,)) + 1.0)
    graph = b.build({"y": y})
    assert small(graph) is graph


def test_the_user_chooses_dtype_layers_and_operations():
    assert dtypes(small(chain(), {"dtype": "float16"}))["matmul"] == "float16"
    assert dtypes(small(chain(), {"full": ["relu"]}))["relu"] == "float32"
    assert dtypes(small(chain(), {"low": ["exp"]}))["exp"] == "bfloat16"
    with pytest.raises(ml.OptionError, match="unknown dtype 'float64' in mixed_precision"):
        small(chain(), {"dtype": "float64"})
    with pytest.raises(ml.OptionError, match="unknown key 'keeps' of mixed_precision"):
        ml.compile(Model(Linear(2)), "numpy", shapes={"input": [2, 2]}, mixed_precision={"keeps": []})


def test_layers_can_be_kept():
    model = Model()
    model |= Linear(8, name="first")(input="x", output="h")
    model |= Linear(8, name="head")(input="h", output="output")
    compiled = ml.compile(model, "numpy", shapes={"x": [4, 8]}, mixed_precision={"keep": ["head"]})
    kinds = {n.origin.path: n.result.dtype.name for n in compiled.graph.nodes if n.op.name == "linear"}
    assert kinds == {"first": "bfloat16", "head": "float32"}


@pytest.mark.parametrize("keep", ["head", "head.inner", "*.inner", "h*d"])
def test_a_kept_layer_keeps_its_sublayers(keep):
    head = Model(name="head")
    head |= Linear(8, name="inner")(input="x", output="output")
    model = Model()
    model |= Linear(8, name="first")(input="x", output="h")
    model |= head(x="h", output="k")
    model |= Linear(8, name="header")(input="k", output="output")  # begins with the name, but is another layer
    compiled = ml.compile(model, "numpy", shapes={"x": [4, 8]}, mixed_precision={"keep": keep})
    kinds = {n.origin.path: n.result.dtype.name for n in compiled.graph.nodes if n.op.name == "linear"}
    assert kinds == {"first": "bfloat16", "head.inner": "float32", "header": "bfloat16"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_transformer_and_its_gradients_stay_near(dtype):
    model = Model()
    model |= TransformerEncoderLayer(16, 2, 32, name="block")(input="x", output="h")
    model |= MSELoss()(predictions="h", targets="t", output="loss")
    model.set_outputs("loss")
    x = np.random.default_rng(1).standard_normal((2, 5, 16)).astype(np.float32)
    shapes = {"x": [2, 5, 16], "t": [2, 5, 16]}
    results = []
    for setting in (False, {"dtype": dtype}):
        compiled = ml.compile(model, "numpy", shapes=shapes, mixed_precision=setting)
        params = compiled.randomize_params(0)
        results.append(compiled.evaluate(params, {"x": x, "t": 0.1 * x}, "loss", training=False))
    (full, exact), (rough_loss, rough) = results
    assert abs(float(full["loss"] - rough_loss["loss"])) < 0.02 * abs(float(full["loss"]))
    largest = max(float(np.abs(g).max()) for g in exact.values())
    for name, g in exact.items():
        assert rough[name].dtype == g.dtype
        np.testing.assert_allclose(rough[name], g, atol=0.05 * largest, err_msg=name)


def test_numeric_verification_knows_its_tolerance():
    model = Model()
    model |= Linear(8)(input="x", output="h")
    model |= Relu()(input="h", output="output")
    ml.compile(model, "numpy", shapes={"x": [4, 8]}, mixed_precision=True, verify="numeric")


def test_softmax_and_linear_with_activation():
    with Builder() as b:
        x, w = b.input("x", (4, 8)), b.param("w", (8, 8))
        y = softmax(linear(x, w, activation="relu"))
    assert dtypes(small(b.build({"y": y}))) == {"linear": "bfloat16", "softmax": "float32"}


def test_gradients_of_an_encoder_pass_the_numeric_check():
    """The key's bias has a gradient of zero, the embedding's is a sum over rows of gradients of norms, which cancel."""
    model = Model()
    model |= Embedding(20, 8)(input="input", output="hidden")
    model += TransformerEncoderLayer(8, 2)(input="hidden", output="coded")
    model += Linear(3)(input="coded", output="output")
    options = {"mixed_precision": True, "verify": "numeric"}
    compiled = ml.compile(model, "numpy", shapes={"input": [2, 16]}, types={"input": "int32"}, **options)
    tokens = np.arange(32, dtype=np.int32).reshape(2, 16) % 20
    params = compiled.randomize_params(seed=0)
    _, gradients = compiled.evaluate(params, {"input": tokens}, output_gradients=np.ones((2, 16, 3), np.float32))
    assert set(gradients) == set(params)


def test_a_product_of_quantized_weights_stays_full():
    """A 16-bit dtype would replace its quantized weights, also behind a transpose, by numbers."""
    with Builder() as b:
        x, q, scale = b.input("x", (4, 8)), b.input("q", (8, 8), "int8"), b.input("scale", ())
        quantized = matmul(x, transpose(dequantize(q, scale), perm=(1, 0)))
        y = matmul(quantized, transpose(b.param("w", (8, 8)), perm=(1, 0)))
    assert [n.result.dtype.name for n in small(b.build({"y": y})).nodes if n.op.name == "matmul"] == [
        "float32",
        "bfloat16",
    ]
