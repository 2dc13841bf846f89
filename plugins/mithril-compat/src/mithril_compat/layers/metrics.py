"""Metrics of classification, computed in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mithril import ModelError, ops
from mithril_compat.language.block import block
from mithril_compat.language.connection import TBD

FORMAT = "threshold is_binary is_pred_one_hot is_label_one_hot"


def classes(
    pred: Any, label: Any, threshold: Any, is_binary: bool, is_pred_one_hot: bool, is_label_one_hot: bool
) -> tuple[Any, Any]:
    """Return predicted and true classes as integers."""
    if is_binary and threshold is None:
        raise ModelError("a binary metric needs threshold=", hint="pass threshold=0.5")
    truth = ops.argmax(label, axis=-1) if is_label_one_hot else ops.cast(label, dtype="int32")
    if is_pred_one_hot:
        predicted = ops.argmax(pred, axis=-1)
    elif is_binary:
        predicted = ops.cast(pred > threshold, dtype="int32")
    else:
        predicted = ops.cast(pred, dtype="int32")
    return ops.cast(predicted, dtype="int32"), ops.cast(truth, dtype="int32")


def count(mask: Any, program: Any) -> Any:
    return ops.sum(ops.cast(mask, dtype=program.float_dtype))


@block(options=FORMAT, outputs="pred_formatted label_formatted output", cins="pred")
def Metric(threshold: Any = None, is_binary: bool = False, is_pred_one_hot: bool = True,
           is_label_one_hot: bool = True, pred: Any = TBD, label: Any = TBD) -> Any:  # fmt: skip
    predicted, truth = classes(pred, label, threshold, is_binary, is_pred_one_hot, is_label_one_hot)
    return predicted, truth, predicted - truth


@block(options=FORMAT, cins="pred")
def Accuracy(threshold: Any = None, is_binary: bool = False, is_pred_one_hot: bool = True,
             is_label_one_hot: bool = True, pred: Any = TBD, label: Any = TBD, *, program: Any) -> Any:  # fmt: skip
    predicted, truth = classes(pred, label, threshold, is_binary, is_pred_one_hot, is_label_one_hot)
    return count(ops.equal(predicted, truth), program) / float(truth.shape[0])


Score = Callable[[Any, Any, Any], Any]


def averaged(average: str, n_classes: int | None, predicted: Any, truth: Any, score: Score, program: Any) -> Any:
    """Return a score of true positives, false positives and false negatives, for all rows or averaged over classes."""
    if average == "micro":
        right = count(ops.equal(predicted, truth), program)
        wrong = count(ops.not_equal(predicted, truth), program)
        return right / score(right, wrong, wrong)
    if average not in ("macro", "weighted"):
        raise ModelError(f"average='{average}'", facts=["accepted: micro, macro, weighted"])
    if n_classes is None:
        raise ModelError(f"average='{average}' needs n_classes=")
    total: Any = 0.0
    present: Any = 0.0
    for k in range(n_classes):
        of_class, predictions = ops.equal(truth, k), ops.equal(predicted, k)
        hits = count(ops.logical_and(predictions, of_class), program)
        false_positives = count(ops.logical_and(predictions, ops.logical_not(of_class)), program)
        members = count(of_class, program)
        denominator = score(hits, false_positives, members - hits)
        value = hits / ops.where(ops.equal(denominator, 0.0), 1.0, denominator)
        total = total + value * (members if average == "weighted" else 1.0)
        present = present + ops.cast(members > 0.0, dtype=program.float_dtype)
    return total / (float(truth.shape[0]) if average == "weighted" else present)


def _average(name: str, score: Score) -> Any:
    def compute(average: str = "micro", n_classes: Any = None, threshold: Any = None, is_binary: bool = False,
                is_pred_one_hot: bool = True, is_label_one_hot: bool = True, pred: Any = TBD, label: Any = TBD,
                *, program: Any) -> Any:  # fmt: skip
        predicted, truth = classes(pred, label, threshold, is_binary, is_pred_one_hot, is_label_one_hot)
        return averaged(average, n_classes, predicted, truth, score, program)

    compute.__name__ = name
    return block(options=f"average n_classes {FORMAT}", cins="pred")(compute)


Precision = _average("Precision", lambda hits, positives, negatives: hits + positives)
Recall = _average("Recall", lambda hits, positives, negatives: hits + negatives)
F1 = _average("F1", lambda hits, positives, negatives: hits + (positives + negatives) * 0.5)


def rates(pred: Any, label: Any, program: Any) -> tuple[Any, Any]:
    """Return the rates of true and of false positives for the thresholds at each prediction, highest first."""
    thresholds = ops.unsqueeze(ops.sort(pred, axis=0, descending=True), axis=1)
    predictions = ops.unsqueeze(pred, axis=0) >= thresholds
    positive = ops.unsqueeze(ops.equal(label, 1), axis=0)
    number = count(positive, program)

    def share(mask: Any, total: Any) -> Any:
        return ops.sum(ops.cast(mask, dtype=program.float_dtype), axis=1) / total

    true = share(ops.logical_and(predictions, positive), number)
    return true, share(ops.logical_and(predictions, ops.logical_not(positive)), float(pred.shape[0]) - number)


@block()
def AUCCore(input: Any = TBD, label: Any = TBD, *, program: Any) -> Any:
    return ops.stack(*rates(input, ops.cast(label, dtype="int32"), program), axis=0)


@block(options="n_classes is_label_one_hot", cins="pred")
def AUC(n_classes: Any, is_label_one_hot: bool = True, pred: Any = TBD, label: Any = TBD, *, program: Any) -> Any:
    truth = ops.argmax(label, axis=-1) if is_label_one_hot else label
    total: Any = 0.0
    for k in range(n_classes):
        of_class = ops.cast(ops.equal(ops.cast(truth, dtype="int32"), k), dtype="int32")
        true, false = rates(pred[:, k] if n_classes > 1 else pred, of_class, program)
        total = total + ops.sum((false[1:] - false[:-1]) * (true[1:] + true[:-1])) * 0.5
    return total / float(n_classes)
