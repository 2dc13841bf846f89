"""Metrics of several classes, computed from the counts [actual, predicted] of all rows."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.graph import ModelError, Value, unknown
from mithril.models.layers.metrics import ConfusionMatrix, Metric, Statistics, count_of, expect_labels, to_float

AVERAGES = ("macro", "weighted", "micro", "none")


class _FromCounts(Metric):
    """Base class: logits [rows, classes] (or probabilities) and integer labels; subclasses define ``of_counts``."""

    inputs = ("logits", "labels")

    def __init__(self, classes: int) -> None:
        self.confusion = ConfusionMatrix(classes)
        self.classes = classes

    def statistics(self, logits: Value, labels: Value) -> Statistics:
        return self.confusion.statistics(logits, labels)

    def result(self, counts: Any) -> Any:
        return self.of_counts(counts)

    def of_counts(self, counts: Any) -> Any:
        """Return the metric from the counts [actual, predicted]."""
        raise ModelError(f"{type(self).__name__} has no method 'of_counts'")

    def parts(self, counts: Any) -> tuple[Any, Any, Any]:
        """Return for each class the correct rows, the actual rows and the predicted rows."""
        unit = ops.eye(n=self.classes, dtype=counts.dtype)
        return ops.sum(counts * unit, axis=1), ops.sum(counts, axis=1), ops.sum(counts, axis=0)


def _ratio(a: Any, b: Any) -> Any:
    """Return a / b, 0 where b is 0."""
    is_empty = ops.equal(b, 0.0)
    return ops.where(is_empty, 0.0, a / ops.where(is_empty, 1.0, b))


class _Averaged(_FromCounts):
    """Base class of ratios per class: the mean ("macro"), weighted by actual rows, of all rows ("micro"), or each."""

    def __init__(self, classes: int, average: str = "macro") -> None:
        super().__init__(classes)
        if average not in AVERAGES:
            message, facts, hint = unknown(f"average of {type(self).__name__}", average, AVERAGES)
            raise ModelError(message, facts=facts, hint=hint)
        self.average = average

    def of_counts(self, counts: Any) -> Any:
        correct, actual, predicted = self.parts(counts)
        if self.average == "micro":
            return self.ratio(ops.sum(correct), ops.sum(actual), ops.sum(predicted))
        ratios = self.ratio(correct, actual, predicted)
        if self.average == "none":
            return ratios
        if self.average == "weighted":
            return ops.sum(ratios * actual) / ops.sum(actual)
        # as scikit-learn: classes that neither occur nor are predicted do not count
        occurs = ops.cast(ops.greater(actual + predicted, 0.0), dtype=counts.dtype)
        return ops.sum(ratios * occurs) / ops.sum(occurs)

    def ratio(self, correct: Any, actual: Any, predicted: Any) -> Any:
        """Return the metric of one class."""
        raise ModelError(f"{type(self).__name__} has no method 'ratio'")


class ClassPrecision(_Averaged):
    """Correct rows / predicted rows of each class, averaged over the classes."""

    def ratio(self, correct: Any, actual: Any, predicted: Any) -> Any:
        return _ratio(correct, predicted)


class ClassRecall(_Averaged):
    """Correct rows / actual rows of each class, averaged over the classes."""

    def ratio(self, correct: Any, actual: Any, predicted: Any) -> Any:
        return _ratio(correct, actual)


class ClassF1Score(_Averaged):
    """The harmonic mean of precision and recall of each class, averaged over the classes."""

    def ratio(self, correct: Any, actual: Any, predicted: Any) -> Any:
        return _ratio(correct * 2.0, actual + predicted)


class MeanIoU(_Averaged):
    """Intersection over union of each class (the Jaccard index), averaged over the classes."""

    def ratio(self, correct: Any, actual: Any, predicted: Any) -> Any:
        return _ratio(correct, actual + predicted - correct)


class BalancedAccuracy(_FromCounts):
    """The mean of the recalls of the classes that occur."""

    def of_counts(self, counts: Any) -> Any:
        correct, actual, _ = self.parts(counts)
        occurs = ops.cast(ops.greater(actual, 0.0), dtype=counts.dtype)
        return ops.sum(_ratio(correct, actual)) / ops.sum(occurs)


class MatthewsCorrelation(_FromCounts):
    """The correlation of actual and predicted classes, from -1 to 1; 0 if one of them is constant."""

    def of_counts(self, counts: Any) -> Any:
        correct, actual, predicted = self.parts(counts)
        total = ops.sum(actual)
        shared = ops.sum(correct) * total - ops.sum(actual * predicted)
        spread = total * total - ops.sum(actual * actual)
        return _ratio(shared, ops.sqrt(spread * (total * total - ops.sum(predicted * predicted))))


class CohenKappa(_FromCounts):
    """The agreement of actual and predicted classes beyond that of chance."""

    def of_counts(self, counts: Any) -> Any:
        correct, actual, predicted = self.parts(counts)
        total = ops.sum(actual)
        chance = ops.sum(actual * predicted)
        return _ratio(ops.sum(correct) * total - chance, total * total - chance)


class LogLoss(Metric):
    """The mean cross entropy of probabilities [rows, classes] and integer labels."""

    inputs = ("probabilities", "labels")

    def __init__(self, eps: float = 1e-7) -> None:
        self.eps = eps

    def statistics(self, probabilities: Value, labels: Value) -> Statistics:
        expect_labels("LogLoss", probabilities, labels)
        p = ops.clip(to_float(probabilities), low=self.eps, high=1.0)
        losses = ops.nll_loss(ops.log(p), labels, reduction="none")
        return {"sum": ops.sum(losses), "count": count_of(losses)}

    def result(self, sum: Any, count: Any) -> Any:
        return sum / count
