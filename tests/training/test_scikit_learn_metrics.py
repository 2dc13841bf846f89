"""Metrics that scikit-learn has are those of scikit-learn, whatever the size of batches, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as reference

import mithril as ml
from mithril import ops
from mithril.models import (
    AveragePrecision,
    BalancedAccuracy,
    BinaryAccuracy,
    BrierScore,
    ClassF1Score,
    ClassPrecision,
    ClassRecall,
    CohenKappa,
    ExplainedVariance,
    Layer,
    LogLoss,
    MatthewsCorrelation,
    MaxError,
    MeanAbsolutePercentageError,
    MeanIoU,
    MeanSquaredLogError,
    Model,
    RootMeanSquaredError,
)

DRAW = np.random.default_rng(11)
COUNT, CLASSES = 61, 5  # one class occurs nowhere
LABELS = DRAW.integers(0, CLASSES - 1, COUNT).astype(np.int32)
LOGITS = DRAW.normal(size=(COUNT, CLASSES)).astype(np.float32) + 0.8 * np.eye(CLASSES, dtype=np.float32)[LABELS]
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
PREDICTED = LOGITS.argmax(1)
SCORES = np.round(DRAW.uniform(0, 1, COUNT), 1).astype(np.float32)  # rounded: equal scores
RARE = (SCORES + DRAW.normal(size=COUNT) > 1.2).astype(np.int32)
POSITIVE = DRAW.uniform(0.5, 9, COUNT).astype(np.float32)
GUESSES = np.abs(POSITIVE + DRAW.normal(size=COUNT)).astype(np.float32)


def macro(function: Callable[..., Any], average: str = "macro") -> float:
    return float(function(LABELS, PREDICTED, average=average, zero_division=0))


def of_classes() -> dict[str, Any]:
    return {
        "precision": (ClassPrecision(CLASSES), macro(reference.precision_score)),
        "recall": (ClassRecall(CLASSES, average="weighted"), macro(reference.recall_score, "weighted")),
        "f1": (ClassF1Score(CLASSES), macro(reference.f1_score)),
        "micro": (ClassF1Score(CLASSES, average="micro"), macro(reference.f1_score, "micro")),
        "iou": (MeanIoU(CLASSES), macro(reference.jaccard_score)),
        "balanced": (BalancedAccuracy(CLASSES), reference.balanced_accuracy_score(LABELS, PREDICTED)),
        "matthews": (MatthewsCorrelation(CLASSES), reference.matthews_corrcoef(LABELS, PREDICTED)),
        "kappa": (CohenKappa(CLASSES), reference.cohen_kappa_score(LABELS, PREDICTED)),
    }


def of_probabilities() -> dict[str, Any]:
    return {"log": (LogLoss(), reference.log_loss(LABELS, PROBABILITIES, labels=range(CLASSES)))}


def of_scores() -> dict[str, Any]:
    return {
        "precision": (AveragePrecision(), reference.average_precision_score(RARE, SCORES)),
        "accuracy": (BinaryAccuracy(0.5), reference.accuracy_score(RARE, SCORES > 0.5)),
        "brier": (BrierScore(), reference.brier_score_loss(RARE, SCORES)),
    }


def of_numbers() -> dict[str, Any]:
    pair = POSITIVE.astype(np.float64), GUESSES.astype(np.float64)
    return {
        "rmse": (RootMeanSquaredError(), reference.root_mean_squared_error(*pair)),
        "mape": (MeanAbsolutePercentageError(), reference.mean_absolute_percentage_error(*pair)),
        "msle": (MeanSquaredLogError(), reference.mean_squared_log_error(*pair)),
        "max": (MaxError(), reference.max_error(*pair)),
        "explained": (ExplainedVariance(), reference.explained_variance_score(*pair)),
    }


CASES = {
    "classes": (LOGITS, LABELS, of_classes),
    "probabilities": (PROBABILITIES, LABELS, of_probabilities),
    "scores": (SCORES, RARE, of_scores),
    "numbers": (GUESSES, POSITIVE, of_numbers),
}


class Same(Layer):
    def build(self, x: Any) -> Any:
        return x + self.param("shift", (1,))


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_scikit_learn_for_any_batch_size(backend: str, case: str) -> None:
    x, y, rows = CASES[case]
    table = rows()
    trainer = ml.Trainer(
        Model(Same()),
        ml.SGD(0.0),
        loss=lambda output, target: ops.mean(output) + 0.0 * ops.mean(ops.cast(target, dtype="float32")),
        metrics={name: metric for name, (metric, _) in table.items()},
        backend=backend,
        progress=False,
    )
    for size in (9, COUNT):
        shown = trainer.evaluate(ml.DataLoader((x, y), batch_size=size))
        for name, (_, expected) in table.items():
            assert shown[name] == pytest.approx(expected, rel=5e-5), f"{name}, batch size {size}"


def test_each_class_and_degenerate_counts() -> None:
    expected = reference.f1_score(LABELS, PREDICTED, average=None, labels=range(CLASSES), zero_division=0)
    np.testing.assert_allclose(ClassF1Score(CLASSES, average="none")(LOGITS, LABELS), expected, rtol=1e-5)
    constant = np.zeros((4, 2), np.float32)
    labels = np.zeros(4, np.int32)
    assert MatthewsCorrelation(2)(constant, labels) == 0
    with pytest.raises(ml.ModelError, match="unknown average of MeanIoU 'makro'|unknown average 'makro' of MeanIoU"):
        MeanIoU(3, average="makro")
