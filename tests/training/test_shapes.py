"""Predictions and targets of different shapes are an error, where NumPy would broadcast them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder
from mithril.models import Linear, Model

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
ELEMENTWISE = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "hinge_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "smooth_l1_loss",
]


def regression(loss, backend="numpy"):
    model = Model()
    model += Linear(1)(input="input")
    return ml.Trainer(model, ml.Adam(), loss=loss, backend=backend, progress=False)


@pytest.mark.parametrize("loss", ELEMENTWISE)
def test_loss_of_a_column_and_a_row_is_rejected(loss, backend):
    with pytest.raises(ml.ShapeError) as caught:
        regression(loss, backend).step((X, X[:, 0]))
    text = str(caught.value)
    assert f"'{loss}' requires" in text
    assert "got [16, 1] and [16]" in text
    assert "targets[:, None] in the data" in text
    regression(loss, backend).step((X, np.abs(X[:, :1]).clip(0, 1)))


@pytest.mark.parametrize("shapes", [((4, 1), (4,)), ((4,), (4, 1)), ((4, 3), (3,)), ((4, 3), (1, 3)), ((), (4,))])
@pytest.mark.parametrize("loss", ELEMENTWISE)
def test_no_loss_broadcasts(loss, shapes):
    a, b = shapes
    op = getattr(ops, loss)
    with Builder() as builder, pytest.raises(ml.ShapeError, match="losses and metrics do not broadcast"):
        op(builder.input("a", a), builder.input("b", b))
    with pytest.raises(ml.ShapeError, match="losses and metrics do not broadcast"):
        op(np.full(a, 0.5, np.float32), np.full(b, 0.5, np.float32))


def squared(output, target):
    return ops.mean((output - target) ** 2)


def scaled(output, target):
    return ops.mean(ops.abs(target * 2.0 - ops.cast(output, dtype="float32")))


@pytest.mark.parametrize("loss", [squared, scaled])
def test_loss_function_that_broadcasts_is_reported(loss, backend):
    with pytest.warns(ml.OptionWarning, match=r"broadcasts \[16(, 1)?\] and \[16(, 1)?\] to \[16, 16\]") as caught:
        trainer = regression(loss, backend)
        trainer.step((X, X[:, 0]))
        trainer.step((X, X[:, 0]))
    assert len([w for w in caught if "broadcasts" in str(w.message)]) == 1
    assert "targets[:, None] in the data" in str(trainer.compiled.decisions)


def aligned(output, target):
    return ops.mean((output[:, 0] - target) ** 2)


def pairwise(output, target):
    return ops.mean(ops.maximum(output - ops.reshape(target, shape=(1, 16)), 0.0))


def centered(output, target):
    return ops.mean((output - ops.mean(target, axis=0)) ** 2)


@pytest.mark.parametrize("loss", [aligned, pairwise, centered])
def test_loss_function_that_asks_for_its_shapes_is_not_reported(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regression(loss).step((X, X[:, 0]))
        regression(squared).step((X, X[:, :1]))


def test_target_may_be_one_number():
    np.testing.assert_allclose(ops.mse_loss(np.float32([1, 3]), 1.0), 2.0)


def test_symbolic_sizes_are_compared_at_the_call(backend):
    model = Model()
    model |= ml.models.MSELoss()(predictions="a", targets="b", output="loss")
    symbolic = ml.plugins.backend_class(backend)().capabilities.symbolic
    compiled = ml.compile(model, backend, shapes={"a": ["N"], "b": ["M"]} if symbolic else {})
    one = np.ones(4, np.float32)
    assert float(compiled.evaluate({}, {"a": one, "b": one * 3})["loss"]) == pytest.approx(4.0)
    with pytest.raises(ml.MithrilError):
        compiled.evaluate({}, {"a": one, "b": one[:1]})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros((16, 1), np.int32), "drop the last axis: labels[:, 0]"),
        (np.zeros((16, 3), np.int32), "one-hot labels"),
        (np.zeros(16, np.float32), "cast the labels to int"),
        (np.zeros((16, 1), np.float32), "got [16, 3] and [16, 1]"),
        (np.zeros(8, np.int32), "got [8]"),
        (np.zeros((), np.int32), "got []"),
    ],
)
def test_labels_that_do_not_pair_with_rows_are_rejected(labels, message):
    model = Model()
    model += Linear(3)(input="input")
    for loss in ("cross_entropy", "nll_loss") if labels.dtype.kind == "i" else ("cross_entropy",):
        trainer = ml.Trainer(model, ml.Adam(), loss=loss, backend="numpy", progress=False)
        with pytest.raises(ml.ShapeError) as caught:
            trainer.step((X, labels))
        assert message in str(caught.value)


def test_triplets_do_not_broadcast():
    with pytest.raises(ml.ShapeError, match="'triplet_loss' requires 'anchor' and 'negative'"):
        ops.triplet_loss(np.ones((4, 2), np.float32), np.ones((4, 2), np.float32), np.ones((1, 2), np.float32))


@pytest.mark.parametrize("kind", [ml.models.TransformerEncoder, ml.models.TransformerDecoder])
def test_transformers_take_eps(backend, kind):
    """Reach every norm with eps, which then decides the result."""
    x = (np.random.default_rng(0).normal(size=(1, 3, 8))).astype(np.float32)
    results = []
    for eps in (1.0, 1e-12):
        layer = kind(1, 8, 2, 16, dropout=0.0, norm=True, eps=eps, name="t")
        model = Model()
        model |= layer(**{n: n for n in kind.inputs}, output="y")
        shapes = {n: [1, 3, 8] for n in kind.inputs}
        compiled = ml.compile(model, backend, shapes=shapes)
        reference = ml.compile(model, "numpy", shapes=shapes)
        params = reference.randomize_params(seed=0)
        norms = [n for n in compiled.graph.nodes if n.op.name == "layer_norm"]
        assert norms and {n.attributes["eps"] for n in norms} == {eps}
        inputs = dict.fromkeys(kind.inputs, x)
        arrays = {n: compiled.backend.array(p) for n, p in params.items()}
        results.append(compiled.backend.to_numpy(compiled.evaluate(arrays, inputs)["y"]))
        np.testing.assert_allclose(results[-1], reference.evaluate(params, inputs)["y"], atol=2e-5)
    assert np.abs(results[0] - results[1]).max() > 1e-3


USES = {
    "fit": lambda trainer, x: trainer.fit(x, x[:, :1], epochs=1),
    "validation": lambda trainer, x: trainer.fit(X, X[:, :1], epochs=1, validation=(x, x[:, :1])),
    "evaluate": lambda trainer, x: trainer.evaluate(x, x[:, :1]),
    "find_learning_rate": lambda trainer, x: trainer.find_learning_rate(x, x[:, :1]),
}


class Scaled(ml.models.Layer):
    """A layer whose parameter broadcasts against any number of features."""

    def build(self, x):
        return x * self.param("scale", (x.shape[-1],), "ones")


@pytest.mark.parametrize("use", USES)
def test_batches_of_another_width_are_refused_before_they_run(use, backend):
    for model, name, trained, needed in ((Linear(1), "weight", "1, 3", "1, 2"), (Scaled(), "scale", "3", "1")):
        loss = "mse" if name == "weight" else squared
        trainer = ml.Trainer(model, ml.SGD(0.0), loss=loss, backend=backend, progress=False)
        trainer.step((X, X[:, :1] if name == "weight" else X))
        with pytest.raises(ml.InputError) as caught:
            USES[use](trainer, X[:, : 2 if name == "weight" else 1])
        assert str(caught.value) == (
            f"'{name}' has the shape [{trained}]; this batch requires [{needed}]\n"
            f"  the batch: 'input' [16, {2 if name == 'weight' else 1}]\n"
            "hint: pass batches of the sizes that training began with, or make a new Trainer"
        )
        trainer.begin((X[:, :2], X[:, :2] if name == "scale" else X[:, :1]))  # which starts from the beginning
