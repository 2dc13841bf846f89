"""Class weights and weights of positives: values and gradients are those of the formulas, and of PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder
from mithril.graph.parser import parse
from mithril.graph.text import to_text
from mithril.models import BinaryCrossEntropyWithLogits, CrossEntropy, Linear, Model

DRAW = np.random.default_rng(0)
LOGITS = DRAW.normal(size=(6, 3)).astype(np.float32)
LABELS = np.array([0, 2, 1, -100, 2, 0], np.int32)
SHARES = DRAW.dirichlet(np.ones(3), 6).astype(np.float32)
TARGETS = (DRAW.random((6, 3)) > 0.5).astype(np.float32)
WEIGHT = np.array([1.0, 0.25, 3.0], np.float32)


def cross_entropy(logits, labels, weight, smoothing, reduction):
    """Return the loss by its definition, row by row, in float64."""
    logits, weight = logits.astype(np.float64), weight.astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses, divisor = [], 0.0
    for row, label in zip(scores, labels, strict=True):
        if np.ndim(label) == 0 and label == -100:
            losses.append(0.0)
            continue
        share = np.eye(3)[label] if np.ndim(label) == 0 else label
        losses.append(-float((((1 - smoothing) * share + smoothing / 3) * weight * row).sum()))
        divisor += weight[label] if np.ndim(label) == 0 else 1.0
    return np.array(losses) if reduction == "none" else sum(losses) / (divisor if reduction == "mean" else 1.0)


def slope(function, x, step=1e-4):
    """Return the gradient by differences, in float64."""
    gradient = np.zeros(x.shape)
    for k in np.ndindex(x.shape):
        up, low = x.astype(np.float64), x.astype(np.float64)
        up[k] += step
        low[k] -= step
        gradient[k] = (np.sum(function(up)) - np.sum(function(low))) / (2 * step)
    return gradient


def compiled(layer, backend, types, **shapes):
    model = Model()
    model |= layer(**{n: n for n in shapes}, output="loss")
    return ml.compile(model, backend, shapes=shapes, types=types)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_class_weights_follow_the_definition(backend, kind, reduction, smoothing):
    """Compare values and the gradients of logits and weight."""
    labels = LABELS if kind == "classes" else SHARES
    layer = CrossEntropy(ignore_index=-100, label_smoothing=smoothing, reduction=reduction)
    model = compiled(
        layer, backend, {"labels": labels.dtype.name}, logits=[6, 3], labels=list(labels.shape), weight=[3]
    )
    seed = np.ones(6 if reduction == "none" else (), np.float32)
    arrays = {"logits": LOGITS, "labels": labels, "weight": WEIGHT}
    results, slopes = model.evaluate({}, arrays, output_gradients={"loss": seed}, wrt=("logits", "weight"))
    read = model.backend.to_numpy
    arguments = (LOGITS, labels, WEIGHT, smoothing, reduction)
    np.testing.assert_allclose(read(results["loss"]), cross_entropy(*arguments), rtol=2e-5, atol=1e-6)
    for k, name in ((0, "logits"), (2, "weight")):
        expected = slope(lambda x, k=k: cross_entropy(*arguments[:k], x, *arguments[k + 1 :]), arguments[k])
        np.testing.assert_allclose(read(slopes[name]), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("weight", [WEIGHT, np.float32(2.5)], ids=["classes", "number"])
def test_weights_of_positives_follow_the_definition(backend, weight):
    def loss(z, t, w):
        return np.mean(w * t * np.log1p(np.exp(-z)) + (1 - t) * np.log1p(np.exp(z)))

    shapes = {"logits": [6, 3], "targets": [6, 3], "pos_weight": list(weight.shape)}
    model = compiled(BinaryCrossEntropyWithLogits(), backend, {}, **shapes)
    arrays = {"logits": LOGITS, "targets": TARGETS, "pos_weight": np.asarray(weight)}
    one = np.ones((), np.float32)
    results, slopes = model.evaluate({}, arrays, output_gradients={"loss": one}, wrt=("logits",))
    read = model.backend.to_numpy
    np.testing.assert_allclose(read(results["loss"]), loss(LOGITS, TARGETS, weight), rtol=1e-5)
    expected = slope(lambda z: loss(z, TARGETS, weight), LOGITS)
    np.testing.assert_allclose(read(slopes["logits"]), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_equal_those_of_torch(reduction, smoothing):
    torch = pytest.importorskip("torch")
    loss = torch.nn.CrossEntropyLoss(torch.tensor(WEIGHT), reduction=reduction, label_smoothing=smoothing)
    settings = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": -100}
    for labels in (LABELS, SHARES):
        theirs = torch.tensor(labels).long() if labels is LABELS else torch.tensor(labels)
        expected = loss(torch.tensor(LOGITS), theirs)
        np.testing.assert_allclose(ops.cross_entropy(LOGITS, labels, WEIGHT, **settings), expected, rtol=1e-5)
    binary = torch.nn.functional.binary_cross_entropy_with_logits
    expected = binary(*map(torch.tensor, (LOGITS, TARGETS)), pos_weight=torch.tensor(WEIGHT), reduction=reduction)
    losses = ops.binary_cross_entropy_with_logits(LOGITS, TARGETS, WEIGHT, reduction=reduction)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def trainer(loss, backend="numpy"):
    model = Model()
    model += Linear(3, name="head")(input="input")
    return ml.Trainer(model, ml.SGD(0.0), loss=loss, backend=backend, progress=False)


def test_weights_are_arguments_of_the_layers_in_a_trainer(backend):
    X = LOGITS
    weighted = trainer(CrossEntropy(weight=[1.0, 0.25, 3.0], ignore_index=-100), backend)
    step = weighted.step((X, LABELS))["loss"]
    outputs = weighted.predict(X)
    assert step == pytest.approx(cross_entropy(outputs, LABELS, WEIGHT, 0.0, "mean"), rel=1e-5)
    binary = trainer(BinaryCrossEntropyWithLogits(pos_weight=WEIGHT), backend)
    step = binary.step((X, TARGETS))["loss"]
    z = binary.predict(X)
    losses = WEIGHT * TARGETS * np.log1p(np.exp(-z)) + (1 - TARGETS) * np.log1p(np.exp(z))
    assert step == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (CrossEntropy(weight=[1.0, 2.0]), r"expected weight \[3\], one per class, got \[2\]"),
        (CrossEntropy(weight=np.ones((6, 3))), r"expected weight \[3\], one per class, got \[6, 3\]"),
        (BinaryCrossEntropyWithLogits(pos_weight=np.ones((6, 1))), r"got pos_weight \[6, 1\] for logits \[6, 3\]"),
    ],
)
def test_weights_of_other_shapes_are_rejected(loss, message):
    labels = LABELS.clip(0) if isinstance(loss, CrossEntropy) else TARGETS
    with pytest.raises(ml.ShapeError, match=message):
        trainer(loss).step((LOGITS, labels))


def test_weights_that_are_not_numbers_are_rejected():
    with pytest.raises(ml.ModelError, match=r"weight=\['a'\] is not a number or an array of numbers"):
        CrossEntropy(weight=["a"])
    unweighted = trainer(CrossEntropy(weight=None)).step((LOGITS, LABELS.clip(0)))["loss"]
    assert unweighted == trainer("cross_entropy").step((LOGITS, LABELS.clip(0)))["loss"]


def test_graphs_written_before_there_were_weights_are_read():
    with Builder() as builder:
        loss = ops.cross_entropy(builder.input("logits", (6, 3)), builder.input("labels", (6,), "int32"))
    text = to_text(builder.build({"loss": loss}))
    assert text.count(", none") == 1
    assert to_text(parse(text.replace(", none", ""))) == text
