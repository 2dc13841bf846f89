"""Objectives on every backend: losses by output, weights of samples and classes, regularizers, losses of layers."""

from __future__ import annotations

import numpy as np

import mithril as ml
from mithril.models import Layer, Linear, Model

DRAW = np.random.default_rng(7)
X = DRAW.normal(size=(24, 5)).astype(np.float32)
KIND = (X.sum(1) > 0).astype(np.int32)
SIZE = X[:, :1] * 2
WEIGHT = DRAW.uniform(0, 2, 24).astype(np.float32)


class Sparse(Layer):
    """Penalize activations."""

    def build(self, x):
        self.add_loss(0.1 * ml.ops.mean(ml.ops.abs(x)))
        return x


def trained(backend):
    model = Model()
    model |= Linear(6, name="body")(input="input", output="body")
    model |= Sparse()(input="body", output="hidden")
    model |= Linear(3, name="kind")(input="hidden", output="kind")
    model |= Linear(1, name="size")(input="hidden", output="size")
    subject = ml.Trainer(
        model,
        ml.SGD(0.1),
        loss={"kind": "cross_entropy", "size": "mse"},
        loss_weights={"kind": 2.0},
        regularizers={"kind.weight": ml.L2(0.01), "size.*": lambda w: 0.1 * ml.ops.sum(ml.ops.abs(w))},
        backend=backend,
        progress=False,
    )
    subject.fit(
        X, {"kind": KIND, "size": SIZE}, epochs=2, batch_size=8, sample_weight=WEIGHT, validation=(X, (KIND, SIZE))
    )
    return subject


def test_objectives_agree_with_numpy(backend):
    subject, reference = trained(backend), trained("numpy")
    expected = ["loss", "kind_loss", "size_loss", "regularization", "added_loss"]
    assert subject.history.columns == [*expected, *(f"val_{n}" for n in expected)]
    for row, other in zip(subject.history.rows, reference.history.rows, strict=True):
        np.testing.assert_allclose([*row.values()], [*other.values()], rtol=1e-4)
    row = subject.history.rows[-1]
    parts = 2.0 * row["val_kind_loss"] + row["val_size_loss"] + row["val_regularization"] + row["val_added_loss"]
    np.testing.assert_allclose(row["val_loss"], parts, rtol=1e-5)


def test_class_weights_agree_with_those_of_the_loss(backend):
    results = []
    for loss, weights in (("cross_entropy", {1: 4.0}), (ml.models.CrossEntropy(weight=[1.0, 4.0]), None)):
        subject = ml.Trainer(Linear(2), ml.SGD(0.1), loss=loss, backend=backend, progress=False)
        subject.fit(X, KIND, epochs=2, batch_size=8, class_weight=weights)
        results.append(subject.predict(X))
    np.testing.assert_allclose(*results, atol=1e-6)


def test_operations_are_methods_of_the_values_of_a_loss():
    def squares(y, target):
        return ((y.reshape((-1,)) - target.reshape((-1,))) ** 2).mean()

    losses = []
    for loss in (squares, "mse_loss"):
        subject = ml.Trainer(Model(Linear(1)), ml.SGD(0.1), loss=loss, backend="numpy", progress=False, seed=0)
        losses.append(float(subject.step({"input": X, "target": SIZE})["loss"]))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
