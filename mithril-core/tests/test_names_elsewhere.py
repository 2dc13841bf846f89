"""Errors for names of NumPy, PyTorch, Keras and JAX say what they are called here."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import mithril as ml
from mithril import models, ops
from mithril.compiler import resolve_options
from mithril.graph import LAYERS, METHODS, OPERATIONS, OPTIONS, PACKAGE
from mithril.graph.synonyms import EXPRESSIONS
from mithril.models import flatten

# Pairs: the name that users type, and the name that the hint has to contain.
EXPECTED_OPERATIONS = """
range arange, logspace linspace, cat concat, concatenate concat, hstack concat, vstack concat,
expand_dims unsqueeze, permute transpose, swapaxes transpose, moveaxis transpose, multiply mul, bmm matmul, mm matmul,
tensordot matmul, empty zeros, empty_like zeros_like, fill full, full_like full, stddev std, reduce_std std,
variance var, diagonal diag, diag_part diag,
mse mse_loss, mean_squared_error mse_loss, mae l1_loss, absolute abs, arccos acos, arcsin asin, arctan atan,
arctan2 atan2, arcsinh asinh, arctanh atanh, divide div, true_divide div, floor_divide floordiv, subtract sub,
negative neg, power pow, remainder mod, fmod mod, clamp clip, clip_by_value clip, amax max, amin min, reduce_sum sum,
reduce_mean mean, average mean, reduce_max max, fmax maximum, fmin minimum, astype cast,
index_select take, embedding_lookup take, topk top_k, chunk split, unbind split, unstack split,
inner einsum, view reshape, ravel reshape, expand broadcast_to, detach stop_gradient,
logistic sigmoid, expit sigmoid, swish silu, randn normal, rand uniform, eq equal, ne not_equal, lt less,
le less_equal, gt greater, ge greater_equal, interpolate resize, inverse inv, invert bitwise_not, numel size_of,
conv2d conv, scaled_dot_product_attention attention, sparse_categorical_crossentropy cross_entropy,
onehot one_hot, to_categorical one_hot, repeat_interleave repeat, hardtanh hard_tanh, clamp_ clip, fori_loop scan,
dot_product_attention attention, bitcast_convert_type bitcast, rint round, relu_ relu
"""
EXPECTED_LAYERS = """
Dense Linear, Module Model, ReLU Relu, GELU Gelu, SiLU Silu, BatchNormalization BatchNorm2d,
LayerNormalization LayerNorm, MaxPooling2D MaxPool2d, AveragePooling2D AvgPool2d, Conv2DTranspose ConvTranspose2d,
GlobalAveragePooling2D GlobalAvgPool2d, MultiheadAttention MultiHeadAttention, Concatenate Concat,
CrossEntropyLoss CrossEntropy, BCEWithLogitsLoss BinaryCrossEntropyWithLogits, BCELoss BinaryCrossEntropy,
KLDivLoss KLDivergence, Permute Transpose, UpSampling2D Upsample, Conv2D Conv2d
"""
EXPECTED_NAMES = """
nn ml.models, jit ml.compile, Sequential ml.models.Sequential, Linear ml.models.Linear, Dense ml.models.Linear,
Module ml.models.Layer, Parameter self.param, Input ml.IOKey, softmax ml.ops.softmax, cat ml.ops.concat,
arange ml.ops.arange, value_and_grad ml.grad, custom_vjp ml.op, no_grad evaluate, lax ml.ops, np ml.ops
"""


def pairs(table):
    return [tuple(entry.split()) for entry in table.replace("\n", " ").split(",")]


PLACES = [(ops, EXPECTED_OPERATIONS), (models, EXPECTED_LAYERS), (ml, EXPECTED_NAMES)]
CASES = [(place, word, name) for place, table in PLACES for word, name in pairs(table)]


def test_many_names_are_known():
    assert len(CASES) >= 110


@pytest.mark.parametrize(("place", "word", "name"), CASES, ids=[f"{p.__name__}.{w}" for p, w, _ in CASES])
def test_the_hint_has_the_name_here(place, word, name):
    with pytest.raises(AttributeError) as caught:
        getattr(place, word)
    quoted = name if place is ml else f"did you mean '{name}'?"
    assert quoted in str(caught.value)


@pytest.mark.parametrize(("word", "name"), [("complie", "compile"), ("Compile", "compile"), ("iokey", "IOKey")])
def test_the_hint_of_a_misspelling_has_the_name(word, name):
    with pytest.raises(AttributeError, match=f"did you mean 'ml.{name}'"):
        getattr(ml, word)


def test_an_unknown_name_gets_no_hint():
    with pytest.raises(AttributeError, match="no installed plugin provides it$"):
        ml.xyzzy


def test_the_tables_refer_to_existing_names_and_no_word_twice():
    assert all(hasattr(ops, name) for name in OPERATIONS)
    assert set(LAYERS) <= set(models.__all__)
    for table in (OPERATIONS, LAYERS):
        words = [word for text in table.values() for word in text.split()]
        assert len(words) == len(set(words))
        assert not set(words) & set(table)
    assert not any(hasattr(ml, name) for name in PACKAGE)


def test_the_expressions_for_operations_of_others_compute():
    x = np.array([[0.5, 0.25, 0.75], [0.1, 0.9, 0.3]])
    names = {"ops": ops, "np": np, "ml": ml, "x": x, "y": x + 0.5, "p": x, "mask": x > 0.5, "value": 0.2, "axis": -1}
    names |= {"n": 3, "indices": np.array([2, 0]), "start": 0, "stop": 2, "shape": (2, 2, 3), "values": [1.0, 2.0]}
    layer = SimpleNamespace(key=lambda: np.array([0, 1], np.uint32))
    names |= {"self": layer, "key": layer.key(), "a": x, "b": np.eye(3)}
    names |= {"v": np.ones(3), "updates": x}
    computed = 0
    for words, text in EXPRESSIONS.items():
        if "ops." in text and ", or " not in text and ", as " not in text:
            eval(text, names | ({"x": np.arange(2), "y": np.arange(3)} if words == "meshgrid" else {}))
            computed += 1
        for word in words.split():
            assert not hasattr(ops, word) and not any(word in table for table in (OPERATIONS, LAYERS))
            with pytest.raises(AttributeError, match="write "):
                getattr(ops, word)
    assert computed > 30


def test_methods_of_models_elsewhere_are_errors_with_the_way_here():
    model = models.Sequential(models.Linear(3))
    for words in METHODS:
        for word in words.split():
            assert not hasattr(model, word), word
            with pytest.raises(AttributeError, match="use "):
                getattr(model, word)
    with pytest.raises(AttributeError, match=r"^Sequential has no attribute 'frobnicate'$"):
        model.frobnicate()
    assert not hasattr(model, "__len2__") and getattr(model, "frobnicate", 1) == 1


def test_keywords_of_other_compilers_are_errors_with_the_way_here():
    for words in OPTIONS:
        for word in words.split():
            with pytest.raises(ml.OptionError, match=f"unknown option '{word}' of ml.compile\nhint: use "):
                resolve_options({word: 1})


def test_models_of_other_frameworks_name_their_importer():
    for root, importer in [("torch.nn.modules.linear", "from_torch"), ("keras.layers", "from_keras")]:
        foreign = type("Foreign", (), {"__module__": root})()
        with pytest.raises(ml.ModelError, match=f"a Foreign cannot be compiled(?s:.)*ml.{importer}"):
            flatten(foreign)
