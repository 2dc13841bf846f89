"""Negative log likelihood and softmax cross entropy."""

from __future__ import annotations

from mithril import ops
from mithril.graph import OperationError
from mithril_onnx.operators.common import scalar
from mithril_onnx.table import operator


def _loss(log_p, labels, weight, ignore_index, reduction):
    if reduction not in ("none", "mean", "sum"):
        raise OperationError(f"unknown reduction '{reduction}'")
    safe = labels
    counted = None
    if ignore_index is not None:
        counted = ops.not_equal(labels, scalar(ignore_index, labels))
        safe = ops.where(counted, labels, scalar(0, labels))
    picked = ops.take_along_axis(log_p, ops.unsqueeze(safe, axis=(1,)), axis=1)
    loss = -ops.squeeze(picked, axis=(1,))
    weights = None if weight is None else ops.take(weight, safe, axis=0)
    if counted is not None:
        mask = ops.cast(counted, dtype=log_p.dtype)
        weights = mask if weights is None else weights * mask
    if weights is not None:
        loss = ops.where(ops.equal(weights, 0.0), scalar(0.0, loss), loss * weights)
    if reduction == "none":
        return loss
    total = ops.sum(loss)
    if reduction == "sum":
        return total
    return total / ops.sum(weights) if weights is not None else ops.mean(loss)


@operator
def NegativeLogLikelihoodLoss(x, target, weight=None, *, ignore_index=None, reduction="mean"):
    return _loss(x, target, weight, ignore_index, reduction)


@operator
def SoftmaxCrossEntropyLoss(x, labels, weights=None, *, ignore_index=None, reduction="mean"):
    log_p = ops.log_softmax(x, axis=1)
    return _loss(log_p, labels, weights, ignore_index, reduction), log_p
