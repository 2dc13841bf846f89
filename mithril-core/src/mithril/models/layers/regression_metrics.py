"""Metrics of regression beyond mean errors, and of probabilities and scores of binary labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril import ops
from mithril.graph import Value
from mithril.models.layers.metrics import (
    AUC,
    Array,
    DifferenceMetric,
    ErrorMetric,
    MeanSquaredError,
    R2Score,
    Statistics,
    to_float,
)


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of squared differences."""

    def result(self, sum: Any, count: Any) -> Any:
        return ops.sqrt(sum / count)


class MeanAbsolutePercentageError(ErrorMetric):
    """The mean of |difference| / |target|, as a fraction; targets of 0 count as ``eps``."""

    def __init__(self, eps: float = 1e-7) -> None:
        self.eps = eps

    def elements(self, predictions: Value, targets: Value) -> Any:
        difference = self.difference(predictions, targets)
        return ops.abs(difference) / ops.maximum(ops.abs(to_float(targets)), self.eps)


class MeanSquaredLogError(ErrorMetric):
    """The mean of squared differences of log(1 + x), for numbers above -1."""

    def elements(self, predictions: Value, targets: Value) -> Any:
        self.difference(predictions, targets)  # checks the shapes
        difference = ops.log1p(to_float(predictions)) - ops.log1p(to_float(targets))
        return difference * difference


class MaxError(DifferenceMetric):
    """The largest |difference|."""

    def statistics(self, predictions: Value, targets: Value) -> Statistics:
        return {"largest": ops.max(ops.abs(self.difference(predictions, targets)))}

    def merge(self, total: Mapping[str, Array], batch: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the larger of both."""
        return {"largest": ops.maximum(total["largest"], batch["largest"])}

    def result(self, largest: Any) -> Any:
        return largest * 1.0


class ExplainedVariance(DifferenceMetric):
    """1 - variance of the differences / variance of the targets."""

    def statistics(self, predictions: Value, targets: Value) -> Statistics:
        """Return the statistics of ``R2Score`` with the differences from their own mean."""
        difference = self.difference(predictions, targets)
        parts = R2Score().statistics(predictions, targets)
        shift = ops.mean(difference)
        deviation = difference - shift
        return {**parts, "error": ops.sum(deviation * deviation), "shift": shift}

    def merge(self, total: Mapping[str, Array], batch: Mapping[str, Array]) -> Mapping[str, Array]:
        """Combine the means and the squared deviations from them."""
        merged = R2Score().merge(total, batch)
        count = total["count"] + batch["count"]
        gap = batch["shift"] - total["shift"]
        extra = gap * gap * total["count"] * batch["count"] / count
        return {**merged, "error": merged["error"] + extra, "shift": total["shift"] + gap * batch["count"] / count}

    def result(self, error: Any, spread: Any, mean: Any, count: Any, shift: Any) -> Any:
        return 1.0 - error / spread


class BrierScore(MeanSquaredError):
    """The mean squared difference of probabilities and labels 0 and 1."""

    inputs = ("predictions", "labels")


class AveragePrecision(AUC):
    """The area under the precision-recall curve: the mean precision at the score of each positive.

    The result is exact, with equal scores in one step, so an epoch holds all scores in memory.
    """

    def result(self, scores: Any, labels: Any) -> Any:
        order = ops.argsort(scores, descending=True)
        ordered, ranked = ops.take(labels, order), ops.take(scores, order)
        if ordered.shape[0] == 0:
            return ops.sum(labels)
        last = ops.searchsorted(-ranked, -ranked, right=True) - 1  # the last row of the same score
        hits = ops.take(ops.cumsum(ordered), last)
        rows = ops.cast(last, dtype=hits.dtype) + 1.0
        return ops.sum(ordered * hits / rows) / ops.sum(labels)
