"""Metrics are those of all samples, whatever the size of batches, on every backend."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import (
    AUC,
    Accuracy,
    F1Score,
    Linear,
    MeanAbsoluteError,
    MeanSquaredError,
    Metric,
    Model,
    Perplexity,
    Precision,
    R2Score,
    Recall,
    TopKAccuracy,
)

DRAW = np.random.default_rng(7)
SCORES = np.round(DRAW.normal(size=57), 1).astype(np.float32)  # rounded: ties for AUC
RARE = (SCORES + DRAW.normal(size=57) > 1.6).astype(np.int32)
TARGETS = (SCORES * 0.7 + 0.4 * DRAW.normal(size=57) + 1000.0).astype(np.float32)  # a mean that would cancel
LOGITS = DRAW.normal(size=(57, 4)).astype(np.float32)
LABELS = DRAW.integers(0, 4, 57).astype(np.int32)


def identity(name, shape):
    """Return a model with one parameter whose output is its input before training."""
    from mithril.models import Layer

    class Same(Layer):
        def build(self, x):
            return x + self.param("shift", (1,))

    model = Model()
    model |= Same()(input="input", output=name)
    return model


def auc(scores, labels):
    above = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return (above > 0).mean() + 0.5 * (above == 0).mean()


def binary():
    predicted, true = SCORES > 0.5, RARE == 1
    hits = (predicted & true).sum()
    return {
        "precision": hits / predicted.sum(),
        "recall": hits / true.sum(),
        "f1": 2 * hits / (predicted.sum() + true.sum()),
        "auc": auc(SCORES, RARE),
    }


def regression():
    predictions, targets = SCORES.astype(np.float64) + np.float64(1000.0), TARGETS.astype(np.float64)
    error = predictions - targets
    return {
        "mse": (error**2).mean(),
        "mae": abs(error).mean(),
        "r2": 1 - (error**2).sum() / ((targets - targets.mean()) ** 2).sum(),
    }


def classes():
    z = LOGITS.astype(np.float64)
    nll = np.log(np.exp(z).sum(1)) - z[np.arange(57), LABELS]
    top = np.argsort(-z, axis=1)[:, :2]
    return {
        "accuracy": (z.argmax(1) == LABELS).mean(),
        "top": (top == LABELS[:, None]).any(1).mean(),
        "perplexity": np.exp(nll.mean()),
    }


CASES = {
    "binary": (
        SCORES,
        RARE,
        lambda output, target: ops.mean(output) + 0.0 * ops.mean(ops.cast(target, dtype="float32")),
        {"precision": Precision(), "recall": Recall(), "f1": F1Score(), "auc": AUC()},
        binary,
    ),
    "regression": (
        SCORES + np.float32(1000.0),
        TARGETS,
        "mse_loss",
        {"mse": MeanSquaredError(), "mae": MeanAbsoluteError(), "r2": R2Score()},
        regression,
    ),
    "classes": (
        LOGITS,
        LABELS,
        "cross_entropy",
        {"accuracy": Accuracy(), "top": TopKAccuracy(2), "perplexity": Perplexity()},
        classes,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_all_samples_for_any_batch_size(backend, case):
    x, y, loss, metrics, truth = CASES[case]
    trainer = ml.Trainer(
        identity("output", x.shape), ml.SGD(0.0), loss=loss, metrics=metrics, backend=backend, progress=False
    )
    expected = truth()
    for size in (8, 57):
        shown = trainer.evaluate(ml.DataLoader((x, y), batch_size=size))
        assert {n: shown[n] for n in expected} == pytest.approx(expected, rel=2e-5), f"batch size {size}"
    trainer.fit(ml.DataLoader((x, y), batch_size=13), 1)
    assert {n: trainer.history[n][-1] for n in expected} == pytest.approx(expected, rel=2e-5)


def test_third_party_metric_merges_its_statistics(backend):
    class Largest(Metric):
        inputs = ("predictions", "targets")

        def statistics(self, predictions, targets):
            return {"error": ops.max(ops.abs(predictions - targets))}

        def merge(self, total, batch):
            return {"error": np.maximum(total["error"], batch["error"])}

        def result(self, error):
            return error

    trainer = ml.Trainer(
        identity("output", SCORES.shape), ml.SGD(0.0), loss="l1", metrics=Largest(), backend=backend, progress=False
    )
    x = SCORES + np.float32(1000.0)
    shown = trainer.evaluate(ml.DataLoader((x, TARGETS), batch_size=9))
    assert shown["largest"] == pytest.approx(abs(x - TARGETS).max(), rel=1e-5)


def test_step_reports_the_metrics_of_its_batch():
    trainer = ml.Trainer(
        _linear(),
        ml.SGD(0.1),
        loss="cross_entropy",
        metrics=["accuracy", Perplexity()],
        backend="numpy",
        progress=False,
    )
    report = trainer.step((LOGITS[:8], LABELS[:8]))
    assert set(report) == {"loss", "accuracy", "perplexity"}
    assert report["perplexity"] == pytest.approx(np.exp(report["loss"]), rel=1e-5)
    with pytest.raises(KeyError, match="reported: loss, accuracy, perplexity"):
        report["recall"]


def _linear():
    model = Model()
    model += Linear(4)(input="input")
    return model


def test_statistics_survive_a_resume_in_the_middle_of_an_epoch(tmp_path):
    def fresh():
        return ml.Trainer(
            _linear(),
            ml.SGD(0.1),
            loss="cross_entropy",
            metrics=[Perplexity(), "accuracy"],
            backend="numpy",
            progress=False,
        )

    def data():
        return ml.DataLoader((LOGITS, LABELS), batch_size=8, shuffle=True)

    class Cut(ml.Callback):
        def step_end(self, trainer, report):
            if trainer.steps == 3:
                trainer.save(tmp_path / "step-00000003.safetensors")
                trainer.stop("cut")

    full, first, second = fresh(), fresh(), fresh()
    full.fit(data(), 1)
    first.fit(data(), 1, callbacks=[Cut()])
    second.fit(data(), 1, resume=tmp_path)
    assert second.history.rows == full.history.rows


def _with_metric(metric):
    return ml.Trainer(_linear(), ml.SGD(0.1), loss="cross_entropy", metrics=metric, backend="numpy", progress=False)


def test_a_matrix_has_a_column_for_each_number():
    matrix = ml.models.ConfusionMatrix(4)
    trainer = _with_metric(matrix)
    history = trainer.fit((LOGITS, LABELS), 1, batch_size=4, validation=(LOGITS, LABELS))
    expected = np.asarray(matrix(np.asarray(trainer.predict(LOGITS)), LABELS))
    for i, j in np.ndindex(4, 4):
        assert history[f"val_confusion_matrix/{i}/{j}"] == [expected[i, j]]


def test_a_metric_of_many_numbers_is_rejected_before_the_first_step():
    trainer = _with_metric(ml.models.ConfusionMatrix(30))
    with pytest.raises(
        ml.OptionError, match=r"array of shape \[30, 30\](.|\n)*ConfusionMatrix\(30\)\(trainer.predict\("
    ):
        trainer.fit((LOGITS, LABELS), 1, batch_size=4)
    assert trainer.steps == 0


def test_a_metric_per_class_has_a_column_for_each_class(backend):
    recall = ml.models.ClassRecall(4, average="none")
    trainer = ml.Trainer(
        _linear(), ml.SGD(0.1), loss="cross_entropy", metrics={"recall": recall}, backend=backend, progress=False
    )
    seen = []
    history = trainer.fit((LOGITS, LABELS), 2, batch_size=4, callbacks=[Steps(seen)])
    logits = np.asarray(trainer.predict(LOGITS))
    rows = trainer.evaluate((LOGITS, LABELS), batch_size=3)
    for k in range(4):
        actual = LABELS == k
        hits = (logits.argmax(-1) == LABELS) & actual
        expected = hits.sum() / actual.sum() if actual.any() else 0.0
        assert rows[f"recall/{k}"] == pytest.approx(expected)
        assert len(history[f"recall/{k}"]) == 2
    assert set(seen[0]) >= {"loss", "recall/0", "recall/3"}


class Steps(ml.StepLogger):
    """Collects the values of each step."""

    def __init__(self, rows):
        self.every, self.rows = 1, rows

    def log(self, values, step):
        self.rows.append(values)


def test_thresholded_metrics_by_name_ask_for_the_threshold():
    with pytest.raises(ml.OptionError, match=r"ml.models.Recall\(threshold=0.5\) for probabilities, 0.0 for logits"):
        ml.Trainer(_linear(), ml.SGD(0.1), loss="cross_entropy", metrics="recall", backend="numpy")


@pytest.mark.parametrize("kind", [Precision, Recall, F1Score, AUC, MeanSquaredError, MeanAbsoluteError, R2Score])
def test_metrics_do_not_broadcast(kind):
    model = Model()
    model |= kind()(**{n: n for n in kind.inputs})
    with pytest.raises(ml.ShapeError, match=rf"'{kind.__name__}' requires .* of equal shape, got \[5, 1\] and \[5\]"):
        ml.compile(model, "numpy", shapes=dict(zip(kind.inputs, ([5, 1], [5]), strict=True)))


ONE = "ml.models.BinaryAccuracy(threshold=0.5) is for one probability"


@pytest.mark.parametrize(
    ("width", "labels", "text"),
    [
        (1, np.ones((8, 1), np.int32), ONE),
        (1, np.ones(8, np.int32), ONE),
        (3, np.eye(3, dtype=np.float32)[np.arange(8) % 3], "these are one-hot labels: pass their classes"),
        (3, np.ones((8, 1), np.int32), "drop the last axis: labels[:, 0]"),
    ],
)
def test_accuracy_of_labels_in_another_form_names_the_remedy(width, labels, text):
    def loss(output):
        return ops.mean(output)

    trainer = ml.Trainer(Linear(width), ml.SGD(0.1), loss=loss, metrics="accuracy", backend="numpy", progress=False)
    with pytest.raises(ml.ShapeError) as caught:
        trainer.step((np.ones((8, 2), np.float32), labels))
    assert text in str(caught.value)


def test_text_labels_name_the_remedy():
    trainer = ml.Trainer(Linear(3), ml.SGD(0.1), loss="cross_entropy", backend="numpy", progress=False)
    for labels in (np.array(["a", "b"] * 4), np.array(["a", "b"] * 4, object)):
        with pytest.raises(ml.InputError, match="number the classes: names, target = np.unique"):
            trainer.fit(np.ones((8, 2), np.float32), labels, epochs=1)


def test_binary_metrics_of_scores_of_classes_name_the_metric_of_classes():
    x, y = np.ones((4, 3), np.float32), np.array([0, 1, 1, 0], np.int32)
    options = {"loss": "cross_entropy", "metrics": ml.models.Recall(), "backend": "numpy", "progress": False}
    with pytest.raises(ml.ShapeError, match=r"for scores of classes ml.models.ClassRecall\(2\)"):
        ml.Trainer(ml.models.Linear(3, 2), ml.Adam(), **options).fit(x, y)
