"""Labels outside of the classes, negative ones included, are an error in training and in checked inference."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import CrossEntropy, Linear, Model, NLLLoss

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
UNLABELED = np.array([0, 1, -1, 2, 1, 0], np.int32)


def classifier():
    model = Model()
    model += Linear(3, name="head")(input="input")
    return model


def containers(labels):
    yield labels
    yield labels.tolist()
    if "torch" in ml.plugins.backends():
        import torch

        yield torch.from_numpy(labels)
    if "jax" in ml.plugins.backends():
        import jax.numpy as jnp

        yield jnp.asarray(labels)
    if "mlx" in ml.plugins.backends():
        mx = pytest.importorskip("mlx.core")
        yield mx.array(labels)


@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("wrong", [-1, -100, 3])
def test_label_outside_of_the_classes_ends_training(backend, loss, wrong):
    labels = np.where(UNLABELED == -1, wrong, UNLABELED).astype(np.int32)
    for column in containers(labels):
        trainer = ml.Trainer(classifier(), ml.Adam(), loss=loss, backend=backend, progress=False)
        for use in (trainer.step, trainer.evaluate):
            with pytest.raises(ml.InputError) as caught:
                use((X, column) if use == trainer.step else [(X, column)])
            text = str(caught.value)
            assert f"label {wrong} of '{loss}' is out of range for 3 classes" in text
            assert "accepted: 0 to 2" in text
            assert ("ignore_index=" in text) == (wrong < 0 and loss == "cross_entropy")


@pytest.mark.parametrize("ignored", [-1, -100])
def test_ignored_labels_do_not_train(backend, ignored):
    labels = np.where(UNLABELED == -1, ignored, UNLABELED).astype(np.int32)

    def loss(output, target):
        return ops.cross_entropy(output, target, ignore_index=ignored)

    def losses(x, y):
        trainer = ml.Trainer(classifier(), ml.SGD(0.1), loss=loss, backend=backend, progress=False, seed=1)
        return [trainer.step((x, y))["loss"] for _ in range(2)]

    rest = labels != ignored
    assert losses(X, labels) == pytest.approx(losses(X[rest], labels[rest]), rel=1e-5)


@pytest.mark.parametrize("kind", [CrossEntropy, NLLLoss])
def test_negative_label_is_rejected_by_checks(backend, kind):
    scores = "logits" if kind is CrossEntropy else "log_probabilities"
    model = Model()
    model |= Linear(3, name="head")(input="x", output="scores")
    model |= kind()(**{scores: "scores", "labels": "labels", "output": "loss"})
    compiled = ml.compile(model, backend, shapes={"x": [6, 3], "labels": [6]}, types={"labels": "int32"}, checks=True)
    params = compiled.randomize_params(seed=0)
    compiled.evaluate(params, {"x": X, "labels": np.abs(UNLABELED)})
    with pytest.raises(ml.InputError, match="label -1 of .* is out of range for 3 classes"):
        compiled.evaluate(params, {"x": X, "labels": UNLABELED})
    with pytest.raises(ml.InputError, match="label -1 of .* is out of range for 3 classes"):
        compiled.evaluate(params, {"x": X, "labels": UNLABELED}, "loss")


def test_float_labels_of_a_wrong_rank_say_how_to_cast():
    trainer = ml.Trainer(classifier(), ml.Adam(), loss="cross_entropy", backend="numpy", progress=False)
    with pytest.raises(ml.ShapeError, match=r"labels.astype\('int32'\)"):
        trainer.step((X, np.abs(UNLABELED).astype(np.float32)))
