"""Metrics of classification (accuracy, precision, recall, F1, AUC, perplexity) and regression (mean errors, R squared).

A ratio over a data set is not the mean of the ratios of its batches. A metric therefore has two stages: mergeable
statistics of a batch, and the result, computed once from the merged statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import ModelError, ShapeError, Value, expect_paired, normalize_axis, product, shape_text
from mithril.models.language import arguments
from mithril.models.language.layer import Layer
from mithril.ops import size_value

Array = np.ndarray[Any, Any]
Statistics = Mapping[str, Any]


class Metric(Layer):
    """Base class of metrics that are exact for any batch size. Subclasses define ``statistics`` and ``result``.

    Both are written with operations and operators. ``statistics`` becomes part of the step; ``merge`` and ``result``
    also run on float64 NumPy arrays, over all batches of an epoch. As a layer of a model, a metric measures one batch.
    """

    def build(self, *inputs: Value) -> Any:
        return self.result(**self.statistics(*inputs))

    def statistics(self, *inputs: Any) -> Statistics:
        """Return the statistics of one batch by name, such as sums and counts."""
        raise ModelError(
            f"{type(self).__name__} has no method 'statistics'",
            hint="define statistics(self, predictions, labels), which returns sums and counts in a dictionary",
        )

    def result(self, *args: Any, **statistics: Any) -> Any:
        """Return the metric, a scalar, from the merged statistics."""
        raise ModelError(
            f"{type(self).__name__} has no method 'result'",
            hint="define result(self, **statistics), with one parameter for each name that statistics returns",
        )

    def merge(self, total: Mapping[str, Array], batch: Mapping[str, Array]) -> Mapping[str, Array]:
        """Combine the statistics of previous batches and the next one; the default adds them."""
        return {name: total[name] + x for name, x in batch.items()}


class _Mean(Metric):
    """The mean over all elements of the data set; subclasses define ``elements``."""

    def elements(self, *inputs: Any) -> Any:
        raise ModelError(f"{type(self).__name__} has no method 'elements'")

    def statistics(self, *inputs: Any) -> Statistics:
        x = to_float(self.elements(*inputs))
        return {"sum": ops.sum(x), "count": count_of(x)}

    def result(self, sum: Any, count: Any) -> Any:
        return sum / count


def to_float(x: Any) -> Any:
    """Cast values with fewer than 32 bits to float32, so that sums do not overflow."""
    return x if x.dtype.is_float and x.dtype.bits >= 32 else ops.cast(x, dtype="float32")


def count_of(x: Any) -> Any:
    count = product(x.shape)
    if isinstance(count, int):
        return ops.full(shape=(), value=float(count))
    return ops.cast(size_value(value=count), dtype="float32")


ONE_SCORE = "ml.models.BinaryAccuracy(threshold=0.5) is for one probability, threshold=0.0 for one logit per row"


def expect_labels(metric: str, logits: Value, labels: Value, axis: int = -1) -> None:
    """Raise unless there is one label for each row of logits."""
    axis = normalize_axis(axis, max(logits.ndim, 1))
    rows = tuple(d for k, d in enumerate(logits.shape) if k != axis)
    if len(rows) != len(labels.shape):
        hint = "drop the last axis: labels[:, 0]" if labels.shape == (*rows, 1) else ""
        if labels.shape == logits.shape and labels.ndim:
            hint = f"these are one-hot labels: pass their classes, labels.argmax({axis})"
        raise ShapeError(
            f"{metric} expected labels {shape_text(rows)}, one for each row of logits, got {shape_text(labels.shape)}",
            facts=[f"logits {shape_text(logits.shape)}"],
            hint=ONE_SCORE if logits.shape[axis : axis + 1] == (1,) else hint,
        )
    if logits.shape[axis : axis + 1] == (1,):  # the largest of one logit is always class 0
        raise ShapeError(f"{metric} compares the logits of classes, and there is one", hint=ONE_SCORE)
    expect_paired(metric, {"rows of logits": rows, "labels": labels.shape}, scalar=False)


class Accuracy(_Mean):
    """The fraction of rows whose largest logit is that of the label."""

    inputs = ("logits", "labels")

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def elements(self, logits: Value, labels: Value) -> Any:
        expect_labels("Accuracy", logits, labels, self.axis)
        return ops.equal(ops.argmax(logits, axis=self.axis), ops.cast(labels, dtype="int32"))


class BinaryAccuracy(_Mean):
    """The fraction of scores on the side of ``threshold`` that their labels, 0 and 1, say."""

    inputs = ("predictions", "labels")

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold

    def elements(self, predictions: Value, labels: Value) -> Any:
        expect_paired("BinaryAccuracy", {"predictions": predictions.shape, "labels": labels.shape}, scalar=False)
        return ops.equal(ops.cast(ops.greater(predictions, self.threshold), dtype="float32"), _positive(labels))


class TopKAccuracy(_Mean):
    """The fraction of rows whose label is among the k largest logits."""

    inputs = ("logits", "labels")

    def __init__(self, k: int = 5) -> None:
        self.k = arguments.positive("TopKAccuracy", "k", k)

    def elements(self, logits: Value, labels: Value) -> Any:
        expect_labels("TopKAccuracy", logits, labels)
        _, indices = ops.top_k(logits, k=self.k, axis=-1)
        hit = ops.equal(indices, ops.unsqueeze(ops.cast(labels, dtype="int32"), axis=(-1,)))
        return ops.any(hit, axis=-1)


def _positive(labels: Value) -> Any:
    """Convert labels, 0 and 1 or bools, to float32."""
    test = (
        ops.greater(labels, 0.5)
        if labels.dtype.is_float
        else labels
        if labels.dtype.is_bool
        else ops.not_equal(labels, 0)
    )
    return ops.cast(test, dtype="float32")


class _Counts(Metric):
    """Base class of metrics of binary predictions: scores compared with ``threshold``, labels 0 and 1."""

    inputs = ("predictions", "labels")

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold

    def statistics(self, predictions: Value, labels: Value) -> Statistics:
        """Count true positives, predicted positives and actual positives."""
        name = type(self).__name__
        try:
            expect_paired(name, {"predictions": predictions.shape, "labels": labels.shape}, scalar=False)
        except ShapeError as error:
            if predictions.ndim == labels.ndim + 1 and predictions.shape[-1] != 1:
                classes = f"ml.models.Class{name}({predictions.shape[-1]})"
                raise error.with_hint(f"'{name}' is for one score per label; for scores of classes {classes}") from None
            raise
        predicted = ops.cast(ops.greater(predictions, self.threshold), dtype="float32")
        actual = _positive(labels)
        return {"hits": ops.sum(predicted * actual), "predicted": ops.sum(predicted), "actual": ops.sum(actual)}


class Precision(_Counts):
    """True positives / predicted positives; 0 if no prediction is positive."""

    def result(self, hits: Any, predicted: Any, actual: Any) -> Any:
        return hits / ops.maximum(predicted, 1.0)


class Recall(_Counts):
    """True positives / actual positives; 0 if no label is positive."""

    def result(self, hits: Any, predicted: Any, actual: Any) -> Any:
        return hits / ops.maximum(actual, 1.0)


class F1Score(_Counts):
    """The harmonic mean of precision and recall."""

    def result(self, hits: Any, predicted: Any, actual: Any) -> Any:
        return hits * 2.0 / ops.maximum(predicted + actual, 1.0)


class AUC(Metric):
    """The area under the ROC curve: the fraction of (positive, negative) pairs in which the positive scores higher.

    The result is exact and counts ties as one half, so an epoch holds all scores in memory. It is nan if one of the
    classes is missing.
    """

    inputs = ("predictions", "labels")

    def statistics(self, predictions: Value, labels: Value) -> Statistics:
        expect_paired("AUC", {"predictions": predictions.shape, "labels": labels.shape}, scalar=False)
        return {
            "scores": ops.reshape(to_float(predictions), shape=(-1,)),
            "labels": ops.reshape(_positive(labels), shape=(-1,)),
        }

    def merge(self, total: Mapping[str, Array], batch: Mapping[str, Array]) -> Mapping[str, Array]:
        return {name: np.concatenate([total[name], x]) for name, x in batch.items()}

    def result(self, scores: Any, labels: Any) -> Any:
        positive = ops.sum(labels)
        pairs = positive * (ops.sum(1.0 - labels))
        ordered = self._ordered(scores, labels, False) + self._ordered(scores, labels, True)
        return ordered * 0.5 / pairs

    def _ordered(self, scores: Any, labels: Any, last: bool) -> Any:
        """Count pairs with the negative before the positive; ``last`` sorts negatives last among equal scores."""
        by_label = ops.argsort(labels, descending=last)
        by_score = ops.argsort(ops.take(scores, by_label))  # stable: equal scores stay ordered by label
        ordered = ops.take(ops.take(labels, by_label), by_score)
        return ops.sum(ordered * ops.cumsum(1.0 - ordered))


class DifferenceMetric(Metric):
    """Base class of metrics of the differences of predictions and targets."""

    inputs = ("predictions", "targets")

    def difference(self, predictions: Value, targets: Value) -> Any:
        expect_paired(type(self).__name__, {"predictions": predictions.shape, "targets": targets.shape}, scalar=False)
        return to_float(predictions) - to_float(targets)


class ErrorMetric(DifferenceMetric, _Mean):
    """Base class of means of functions of the differences."""


class MeanSquaredError(ErrorMetric):
    """The mean of squared differences."""

    def elements(self, predictions: Value, targets: Value) -> Any:
        difference = self.difference(predictions, targets)
        return difference * difference


class MeanAbsoluteError(ErrorMetric):
    """The mean of absolute differences."""

    def elements(self, predictions: Value, targets: Value) -> Any:
        return ops.abs(self.difference(predictions, targets))


class R2Score(Metric):
    """1 - (squared error / variance of the targets)."""

    inputs = ("predictions", "targets")

    def statistics(self, predictions: Value, targets: Value) -> Statistics:
        """Return the squared error, and the mean and squared deviation of the targets.

        Sums of squared targets could be merged too, but suffer from cancellation if the mean is large.
        """
        expect_paired("R2Score", {"predictions": predictions.shape, "targets": targets.shape}, scalar=False)
        targets = to_float(targets)
        error, mean = to_float(predictions) - targets, ops.mean(targets)
        spread = targets - mean
        return {
            "error": ops.sum(error * error),
            "spread": ops.sum(spread * spread),
            "mean": mean,
            "count": count_of(targets),
        }

    def merge(self, total: Mapping[str, Array], batch: Mapping[str, Array]) -> Mapping[str, Array]:
        """Combine the means and the squared deviations from them."""
        count = total["count"] + batch["count"]
        shift = batch["mean"] - total["mean"]
        return {
            "error": total["error"] + batch["error"],
            "spread": total["spread"] + batch["spread"] + shift * shift * total["count"] * batch["count"] / count,
            "mean": total["mean"] + shift * batch["count"] / count,
            "count": count,
        }

    def result(self, error: Any, spread: Any, mean: Any, count: Any) -> Any:
        return 1.0 - error / spread


class Perplexity(_Mean):
    """exp(mean cross entropy) of logits [..., classes] and integer labels, except labels equal to ``ignore_index``."""

    inputs = ("logits", "labels")

    def __init__(self, ignore_index: int | None = None) -> None:
        self.ignore_index = ignore_index

    def statistics(self, logits: Value, labels: Value) -> Statistics:
        ignored = self.ignore_index
        losses = ops.cross_entropy(to_float(logits), labels, reduction="none", ignore_index=ignored)
        count = (
            count_of(losses) if ignored is None else ops.sum(ops.cast(ops.not_equal(labels, ignored), dtype="float32"))
        )
        return {"sum": ops.sum(losses), "count": count}

    def result(self, sum: Any, count: Any) -> Any:
        return ops.exp(sum / count)


class ConfusionMatrix(Metric):
    """Counts [actual, predicted] of label and largest logit."""

    inputs = ("logits", "labels")

    def __init__(self, classes: int) -> None:
        self.classes = arguments.positive("ConfusionMatrix", "classes", classes)

    def statistics(self, logits: Value, labels: Value) -> Statistics:
        expect_labels("ConfusionMatrix", logits, labels)
        predicted = ops.reshape(ops.argmax(logits, axis=-1), shape=(-1,))
        actual = ops.reshape(ops.cast(labels, dtype="int32"), shape=(-1,))
        rows = ops.one_hot(actual, depth=self.classes)
        columns = ops.one_hot(predicted, depth=self.classes)
        return {"counts": ops.matmul(ops.transpose(rows, perm=(1, 0)), columns)}

    def result(self, counts: Any) -> Any:
        return ops.cast(counts, dtype="int32")
