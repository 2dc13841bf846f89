"""Layers in place of patterns of parameters: optimizers of parts, groups, frozen layers, losses, regularizers."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import MLP, Linear, Model, Relu, Residual

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
BATCH = {"input": X, "target": X[:, :1]}


def network():
    model = Model()
    model += Linear(4, name="first")(input="input")
    model += Residual(MLP([6, 4]), name="body")
    model += Relu()
    model += Linear(1, name="head")
    return model


def trained(model, optimizer, **options):
    subject = ml.Trainer(model, optimizer, loss="mse", backend="numpy", progress=False, **options)
    for _ in range(2):
        subject.step(BATCH)
    return {name: np.array(x) for name, x in subject.params.items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def test_layers_select_the_parameters_of_their_paths():
    model = network()
    first, body = model.find("first")["first"], model.find("body")["body"]
    mlp = body.block
    plain = trained(network(), ml.SGD(0.1))
    parts = {first: ml.SGD(0.1), mlp: ml.Adam(0.01), "*": ml.SGD(0.2)}
    patterns = {"first.*": ml.SGD(0.1), "body.block.*": ml.Adam(0.01), "*": ml.SGD(0.2)}
    assert same(trained(model, parts), trained(network(), patterns))
    places = [(first, "first.*"), (mlp.layers[0], "body.block.layers.0.*"), (mlp, "body.block.*")]
    for layer, pattern in (*places, ("first", "first.*"), ("body.block", "body.block.*"), ("*block", "body.*")):
        assert same(trained(model, ml.SGD(0.1), frozen=layer), trained(network(), ml.SGD(0.1), frozen=pattern))
        assert not same(trained(model, ml.SGD(0.1), frozen=[layer]), plain)
        groups = [ml.SGD(0.1, groups={key: {"learning_rate": 0.01}}) for key in (layer, pattern)]
        assert same(trained(model, groups[0]), trained(network(), groups[1]))
        assert same(trained(model, ml.Lookahead(groups[0])), trained(network(), ml.Lookahead(groups[1])))
        penalties = [trained(model, ml.SGD(0.1), regularizers={key: ml.L2(0.1)}) for key in (layer, pattern)]
        assert same(*penalties)
        assert not same(penalties[0], plain)


def test_frozen_accepts_a_layer_while_training_runs():
    model = network()
    subject = ml.Trainer(model, ml.SGD(0.1), loss="mse", backend="numpy", progress=False)
    subject.step(BATCH)
    subject.frozen = model.find("head")["head"]
    before = {name: np.array(x) for name, x in subject.params.items()}
    subject.step(BATCH)
    assert {n for n, x in subject.params.items() if np.array_equal(x, before[n])} == {"head.weight", "head.bias"}


def test_other_layers_are_rejected():
    with pytest.raises(ml.OptionError, match=r"Linear\(4.* is not a layer of the model"):
        trained(network(), ml.SGD(0.1), frozen=Linear(4))
    model = network()
    with pytest.raises(ml.OptionError, match=r"'relu\.\*' in frozen matches no parameter"):
        trained(model, ml.SGD(0.1), frozen=model.find("relu")["relu"])
