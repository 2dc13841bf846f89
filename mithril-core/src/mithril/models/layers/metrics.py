"""Metrics as models: accuracy, top-k accuracy, precision, recall, F1, mean errors, R squared, perplexity, confusion."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.ir import Value
from mithril.models.language import arguments
from mithril.models.language.layer import Layer


def _mean_of(test: Any) -> Any:
    return ops.mean(ops.cast(test, dtype="float32"))


class Accuracy(Layer):
    """The share of rows whose largest logit is the label's."""

    inputs = ("logits", "labels")

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def build(self, logits: Value, labels: Value) -> Any:
        return _mean_of(ops.equal(ops.argmax(logits, axis=self.axis), ops.cast(labels, dtype="int32")))


class TopKAccuracy(Layer):
    """The share of rows whose label is among the k largest logits."""

    inputs = ("logits", "labels")

    def __init__(self, k: int = 5) -> None:
        self.k = arguments.positive("TopKAccuracy", "k", k)

    def build(self, logits: Value, labels: Value) -> Any:
        _, indices = ops.top_k(logits, k=self.k, axis=-1)
        hit = ops.equal(indices, ops.unsqueeze(ops.cast(labels, dtype="int32"), axis=(-1,)))
        return _mean_of(ops.any(hit, axis=-1))


class _Counts(Layer):
    """Of binary predictions: probabilities or logits against ``threshold``, labels 0 and 1."""

    inputs = ("predictions", "labels")

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold

    def counts(self, predictions: Value, labels: Value) -> tuple[Any, Any, Any]:
        """True positives, predicted positives, actual positives."""
        said = ops.cast(ops.greater(predictions, self.threshold), dtype="float32")
        true = ops.cast(
            ops.greater(labels, 0.5) if labels.dtype.is_float else ops.not_equal(labels, 0), dtype="float32"
        )
        return ops.sum(said * true), ops.sum(said), ops.sum(true)


class Precision(_Counts):
    """Of those predicted positive, the share that is; 0 where none is predicted."""

    def build(self, predictions: Value, labels: Value) -> Any:
        hits, said, _ = self.counts(predictions, labels)
        return hits / ops.maximum(said, 1.0)


class Recall(_Counts):
    """Of those positive, the share that is predicted; 0 where there is none."""

    def build(self, predictions: Value, labels: Value) -> Any:
        hits, _, true = self.counts(predictions, labels)
        return hits / ops.maximum(true, 1.0)


class F1Score(_Counts):
    """The harmonic mean of precision and recall."""

    def build(self, predictions: Value, labels: Value) -> Any:
        hits, said, true = self.counts(predictions, labels)
        return hits * 2.0 / ops.maximum(said + true, 1.0)


class MeanSquaredError(Layer):
    """The mean of squared differences."""

    inputs = ("predictions", "targets")

    def build(self, predictions: Value, targets: Value) -> Any:
        difference = predictions - targets
        return ops.mean(difference * difference)


class MeanAbsoluteError(Layer):
    """The mean of absolute differences."""

    inputs = ("predictions", "targets")

    def build(self, predictions: Value, targets: Value) -> Any:
        return ops.mean(ops.abs(predictions - targets))


class R2Score(Layer):
    """One minus the squared error over the targets' variance."""

    inputs = ("predictions", "targets")

    def build(self, predictions: Value, targets: Value) -> Any:
        error, spread = predictions - targets, targets - ops.mean(targets)
        return 1.0 - ops.sum(error * error) / ops.sum(spread * spread)


class Perplexity(Layer):
    """exp of the mean cross entropy of logits [..., classes] with integer labels."""

    inputs = ("logits", "labels")

    def build(self, logits: Value, labels: Value) -> Any:
        return ops.exp(ops.cross_entropy(logits, labels))


class ConfusionMatrix(Layer):
    """Counts [actual, predicted] for labels and largest logits."""

    inputs = ("logits", "labels")

    def __init__(self, classes: int) -> None:
        self.classes = arguments.positive("ConfusionMatrix", "classes", classes)

    def build(self, logits: Value, labels: Value) -> Any:
        said = ops.reshape(ops.argmax(logits, axis=-1), shape=(-1,))
        true = ops.reshape(ops.cast(labels, dtype="int32"), shape=(-1,))
        rows = ops.one_hot(true, depth=self.classes)
        columns = ops.one_hot(said, depth=self.classes)
        return ops.cast(ops.matmul(ops.transpose(rows, perm=(1, 0)), columns), dtype="int32")
