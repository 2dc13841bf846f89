"""Every rule of the standard passes against itself: both sides agree, bit for bit where it says so; and it fires."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, verify
from mithril.graph.dims import TensorType
from mithril.graph.dtypes import dtype as as_dtype
from mithril.graph.evaluation import evaluate
from mithril.models import Linear, Model, Relu
from mithril.passes import RuleSet, random_arguments
from mithril_numpy.backend import NumpyBackend
from mithril_passes.cleaning import simplify
from mithril_passes.fusion import batch_norm, composite_matching, horizontal_fusion
from mithril_testing import PassConformance, RuleConformance
from mithril_testing.levels import LEVELS, Levels, special_arguments
from mithril_testing.rewritten_gradients import KINKS

HEADS = [("float32", (1, 2, 4, 3))] * 3
STATISTICS = [("float32", (4,))] * 4  # scale, bias, mean, variance
SHAPES = {
    "slice of everything": [("float32", (9,))],
    "plus zero, of integers": [("int32", (2, 3))],
    "a choice of one": [("bool", (2, 3)), ("float32", (2, 3))],
    "linear": [("float32", (2, 3)), ("float32", (4, 3)), ("float32", (4,))],
    "bias of a linear": [("float32", (2, 3)), ("float32", (4, 3)), ("float32", (4,))],
    "layer norm": [("float32", (2, 3)), ("float32", (3,)), ("float32", (3,))],
    "parameters of a layer norm": [("float32", (2, 3)), ("float32", (3,)), ("float32", (3,))],
    "RMS norm": [("float32", (2, 3)), ("float32", (3,))],
    "batch norm of a convolution": [("float32", (2, 3, 5, 5)), ("float32", (4, 3, 1, 1)), *STATISTICS],
    "batch norm of a convolution with bias": [
        ("float32", (2, 3, 5, 5)),
        ("float32", (4, 3, 1, 1)),
        ("float32", (4,)),
        *STATISTICS,
    ],
    "batch norm of a convolution with a bias of its shape": [
        ("float32", (2, 3, 5, 5)),
        ("float32", (4, 3, 1, 1)),
        ("float32", (1, 4, 1, 1)),
        *STATISTICS,
    ],
    "batch norm of a linear": [("float32", (8, 3)), ("float32", (4, 3)), ("float32", (4,)), *STATISTICS],
    "batch norm of a linear without bias": [("float32", (8, 3)), ("float32", (4, 3)), *STATISTICS],
    "attention": HEADS,
    "attention with a mask": [*HEADS, ("float32", (1, 1, 4, 4))],
    "attention of scaled queries": [*HEADS, ("float32", (1, 1, 4, 4))],
    "attention to repeated heads": [*HEADS, ("float32", (1, 1, 4, 4))],
    "attention to selected keys": [*HEADS, ("bool", (1, 1, 4, 4))],
    "weights on the right": [("float32", (2, 3)), ("float32", (4, 3))],
    "guarded weights": [("float32", (2, 3, 4)), ("float32", (2, 4, 3))],
    "product": [("float32", (2, 3)), ("float32", (3, 2))],
    "transpose of joined axes": [("float32", (1, 2, 4, 3))],
    "RMS norm by scaled parameters": [("float32", (2, 3)), ("float32", (3,))],
    "parameters of an RMS norm": [("float32", (2, 3)), ("float32", (3,))],
    "softmax between casts": [("bfloat16", (2, 3))],
    "log-softmax between casts": [("bfloat16", (2, 3))],
    "layer norm between casts": [("bfloat16", (2, 3))],
    "layer norm with parameters between casts": [("bfloat16", (2, 3)), ("bfloat16", (3,)), ("bfloat16", (3,))],
    "RMS norm between casts": [("bfloat16", (2, 3))],
    "RMS norm with parameters between casts": [("bfloat16", (2, 3)), ("bfloat16", (3,))],
    "activation between casts": [("bfloat16", (2, 3))],
    "reduction between casts": [("bfloat16", (2, 3))],
    "operand with axes of size 1 in front": [("float32", (2, 3)), ("float32", (3,))],
}
MODULES = (simplify, composite_matching, horizontal_fusion, batch_norm)
SETS = [s for m in MODULES for s in vars(m).values() if isinstance(s, RuleSet) and s is not simplify.QUANTIZE_PAIRS]
ALL = list({id(r): r for s in SETS for r in s.rules}.values())  # some sets select rules of another


def kit(rule):
    linear = [("float32", (2, 3)), ("float32", (4, 3)), ("float32", (4,))]
    default = linear if rule.name.startswith("linear") else [("float32", (2, 3))] * 4
    members = {
        "rule": rule,
        "types": SHAPES.get(rule.name, default)[: len(rule.pattern.variables)],
        "gradients": rule.name != "relu",  # whose slope at 0 is not that of maximum
    }
    return type("Kit", (RuleConformance,), members)()


@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.name)
def test_both_sides_agree(rule):
    one = kit(rule)
    one.test_both_sides_fit()
    one.test_both_sides_agree_on_random_values()
    with np.errstate(all="ignore"):
        one.test_both_sides_agree_on_special_values()
        one.test_both_sides_have_equal_gradients()


@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.name)
def test_it_fires_on_its_pattern(rule):
    before, _ = kit(rule).sides()
    rewritten = rule(before)
    assert rewritten is not before, "\n".join(map(str, rule.explain(before)))
    verify(rewritten)


@pytest.mark.parametrize("dtype", ["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.soak)])
@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_default_level_applies_it_where_both_sides_agree(rule, dtype):
    """Values and gradients at kinks, infinities, nan and the largest numbers."""
    types = [TensorType(as_dtype(dtype if d == "float32" else d), s) for d, s in kit(rule).types]
    before, _ = rule.both_graphs(types)
    levels = Levels(before, NumpyBackend())
    for seed in range(3):
        for gradient in [False, True] if levels.of else [False]:
            assert levels.differences("medium", special_arguments(before, seed), gradient=gradient) == []


@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_level_changes_a_gradient_at_a_kink_or_tie(rule):
    before, _ = kit(rule).sides()
    levels = Levels(before, NumpyBackend())
    for k in range(len(KINKS)):
        arguments = {
            i.name: np.resize(np.roll(KINKS, k * n), i.type.shape).astype(i.type.dtype.numpy)
            for n, i in enumerate(before.arguments)
        }
        for level in LEVELS:
            assert levels.differences(level, arguments, gradient=bool(levels.of)) == []


class TestSimplify(PassConformance):
    pass_ = "simplify"


class TestFastMath(PassConformance):
    pass_ = "fast-math"


class TestOperatorFusion(PassConformance):
    pass_ = "operator-fusion"


class TestLinearActivation(PassConformance):
    pass_ = "linear-activation"


def fused(write, *shapes):
    with Builder() as b:
        outputs = write(*[b.input(f"x{k}", s) for k, s in enumerate(shapes)])
    graph = b.build({"y": outputs})
    after = composite_matching.RULES(graph)
    verify(after)
    arguments = random_arguments(graph)
    expected, actual = evaluate(graph, arguments)["y"], evaluate(after, arguments)["y"]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    return [n.op.name for n in after.nodes if n.op.name != "constant"]


def test_hand_written_attention_becomes_one():
    def write(q, k, v):
        scores = q @ ops.transpose(k, perm=(0, 1, 3, 2)) * (1 / math.sqrt(8))
        e = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True))
        return (e / ops.sum(e, axis=-1, keepdims=True)) @ v

    assert fused(write, *[(2, 4, 6, 8)] * 3) == ["attention"]


def test_hand_written_attention_with_a_mask():
    def write(q, k, v, m):
        return ops.softmax(q @ ops.transpose(k, perm=(0, 1, 3, 2)) / math.sqrt(8) + m) @ v

    assert fused(write, *[(2, 4, 6, 8)] * 3, (6, 6)) == ["attention"]


def test_softmax_over_another_axis_does_not_match_attention():
    def write(q, k, v):
        return ops.softmax(q @ ops.transpose(k, perm=(0, 1, 3, 2)) * 0.5, axis=2) @ v

    assert fused(write, *[(2, 4, 6, 8)] * 3)[-1] == "matmul"


def test_hand_written_norm_and_activation():
    def write(x, w, b):
        mean = ops.mean(x, axis=-1, keepdims=True)
        var = ops.mean((x - mean) * (x - mean), axis=-1, keepdims=True)
        y = (x - mean) / ops.sqrt(var + 1e-6) * w + b
        return y * (1.0 / (1.0 + ops.exp(-y)))

    graph_ops = fused(write, (3, 8), (8,), (8,))
    assert "silu" in graph_ops or "sigmoid" in graph_ops


def test_weights_of_other_shapes_are_left():
    def write(x, w, b):
        c = x - ops.mean(x, axis=-1, keepdims=True)
        return c * ops.rsqrt(ops.mean(c * c, axis=-1, keepdims=True) + 1e-5) * w + b

    assert "layer_norm" in fused(write, (3, 8), (3, 8), (8,))


def test_activations_join_linears_unless_others_read_them():
    model = Model()
    model |= Linear(4, name="l")(input="x", output="h")
    model += Relu()(input="h", output="y")
    compiled = ml.compile(model, "numpy", shapes={"x": [2, 3]})
    assert [n.op.name for n in compiled.graph.nodes] == ["linear"]
    assert compiled.graph.nodes[0].attributes["activation"] == "relu"
    shared = ml.compile(model, "numpy", shapes={"x": [2, 3]}, outputs=["h", "y"])
    assert [n.op.name for n in shared.graph.nodes] == ["linear", "relu"]


def test_gradients_use_matched_composites():
    """Fusion runs before differentiation, so that a composite's own gradient is used."""
    model = Model()
    model |= Linear(4, name="l")(input="x", output="h")
    compiled = ml.compile(model, "numpy", shapes={"x": [2, 3]})
    params = compiled.randomize_params(0)
    _, gradients = compiled.evaluate(params, {"x": np.ones((2, 3), np.float32)}, np.ones((2, 4), np.float32))
    np.testing.assert_allclose(gradients["l.bias"], [2, 2, 2, 2])
