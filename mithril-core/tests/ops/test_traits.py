"""Traits and facts that follow from declarations, compared with the tables of names that they replaced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mithril import ops
from mithril.derivatives import gradients
from mithril.graph import Builder, evaluate, operations, sample_nodes, traits
from mithril.ops.nn import ACTIVATIONS
from mithril_testing.traits import false_traits

NODES = {name: nodes for name, o in operations().items() if (nodes := sample_nodes(o))}
PRIMITIVE = {name for name, o in operations().items() if not o.composite}


def where(holds, how=any):
    return {name for name, nodes in NODES.items() if how(holds(node) for node in nodes)}


def words(text):
    return set(text.split())


@pytest.mark.parametrize(
    ("holds", "table"),
    [
        (traits.is_cheap, "constant full iota broadcast_to reshape transpose size_value"),
        (traits.is_unchanged, "cast reshape transpose broadcast_to barrier"),
        (traits.is_view, "reshape"),
        (traits.is_product, "matmul dot conv conv_input_grad conv_weight_grad"),
        (traits.is_windowed_product, "conv conv_input_grad conv_weight_grad"),
        (traits.is_source, "constant full iota size_value"),
        (traits.is_fold, "sum mean prod max min any all"),
    ],
)
def test_primitives(holds, table):
    """Compare the primitives: of barriers, pads and transposes only some calls are layouts."""
    sometimes = {"barrier", "pad", "transpose"}
    assert (where(holds) & PRIMITIVE) - sometimes == words(table) - sometimes


def test_expensive_operations_declare_their_cost():
    """A sample on either side of the limit: a new operation needs its declaration only."""
    assert words("exp log sqrt tanh erf pow div floordiv mod random_bits") <= where(traits.is_expensive)
    assert not words("add sub mul neg abs maximum minimum select sum matmul cast") & where(traits.is_expensive)


def test_composites():
    assert words("squeeze unsqueeze stop_gradient") <= where(traits.is_view, all)
    assert words("squeeze unsqueeze stop_gradient repeat tile") <= where(traits.is_layout, all)
    products = where(traits.is_product) - PRIMITIVE
    assert products == words(
        "einsum linear attention attention_grad conv_transpose resize adaptive_avg_pool fft ifft rfft irfft fftn ifftn "
        "rfftn irfftn pinv lstsq affine_grid info_nce_loss expert_matmul expert_mixture expert_weight_grad"
    )
    assert "shape_of" not in where(traits.is_layout)


LOW = """
    attention attention_grad conv conv_input_grad conv_transpose conv_weight_grad dot einsum expert_matmul
    expert_mixture expert_weight_grad linear matmul"""
FOLLOW = """
    abs add avg_pool barrier broadcast_to clip concat dropout elu flip gelu glu hard_sigmoid hard_swish hard_tanh
    leaky_relu max_pool maximum minimum mul neg pad pixel_shuffle relu relu6 repeat reshape roll rotary_embedding select
    selu sigmoid silu slice split squeeze stack stop_gradient sub swiglu take take_along_axis tanh tile transpose tril
    triu unsqueeze where"""
# These follow since they only move elements, round them, or are one operation.
NOW = """
    ceil floor round sign trunc prelu scatter gather_nd scatter_nd dynamic_slice dynamic_update_slice embedding sort
    full constant adaptive_max_pool cummax cummin zeros ones zeros_like ones_like outer"""


def test_precision():
    kinds = {name: {traits.precision(node) for node in nodes} for name, nodes in NODES.items()}
    assert {name for name, kind in kinds.items() if kind == {"low"}} == words(LOW)
    floats = {name for name, nodes in NODES.items() if any(v.dtype.is_float for node in nodes for v in node.results)}
    follow = {name for name, kind in kinds.items() if kind == {"follow"}} & floats
    assert follow == (words(FOLLOW) | words(NOW)) & NODES.keys()


def test_labels_name_an_operand():
    labels = {name: o.labels for name, o in operations().items() if o.labels}
    assert {"cross_entropy": "labels", "nll_loss": "labels", "embedding": "indices"}.items() <= labels.items()
    assert all(o.labels in o.operands for o in operations().values() if o.labels)


@pytest.mark.parametrize("declared", [o for o in operations().values() if o.samples], ids=lambda o: o.name)
def test_traits_hold(declared):
    assert false_traits(declared) == []


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("matmul", {"linear": "a b"}, "it is not linear in a and b"),
        ("exp", {"linear": "x"}, "it is not linear in x"),
        ("cumsum", {"moves": True}, "it does more than move them"),
        ("sub", {"commutative": True}, "it is not commutative"),
        ("take", {"labels": "index"}, "labels='index' is not an operand"),
        ("tanh", {"precision": "small"}, "precision='small' is not low, follow or full"),
    ],
)
def test_false_traits_are_found(name, change, reason):
    wrong = false_traits(replace(operations()[name], **change))
    assert wrong and reason in wrong[0]


def test_activations():
    names = """relu relu6 leaky_relu elu celu selu gelu silu mish sigmoid log_sigmoid softplus softsign tanh hard_tanh
    hard_sigmoid hard_swish"""
    assert {o.activation for o in operations().values() if o.activation} == words(names)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_linear_has_the_gradient_of_its_activation(name):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((3, 4)), "w": rng.standard_normal((5, 4)), "b": rng.standard_normal(5)}
    results = []
    for form in (
        lambda x, w, b: ops.linear(x, w, b, activation=name),
        lambda *xwb: ACTIVATIONS[name](ops.linear(*xwb)),
    ):
        with Builder() as builder:
            y = form(*(builder.input(n, a.shape, "float64") for n, a in arrays.items()))
        graph = gradients(builder.build({"y": y}), wrt=list(arrays))
        cotangents = {i.name: np.full(i.type.shape, 1.5) for i in graph.arguments if i.name not in arrays}
        results.append(evaluate(graph, {**arrays, **cotangents}))
    assert len(results[0]) == 4
    for actual, theirs in zip(results[0].values(), results[1].values(), strict=True):
        np.testing.assert_allclose(actual, theirs, rtol=1e-9, atol=1e-12)
