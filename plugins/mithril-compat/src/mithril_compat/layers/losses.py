"""Losses per element or row, as the predecessor has them: a TrainModel reduces them."""

from __future__ import annotations

from typing import Any

from mithril import ModelError, ops
from mithril_compat.language.block import block
from mithril_compat.language.connection import TBD, Constant
from mithril_compat.layers.elementwise import robust_log

TINY = Constant.MIN_POSITIVE_NORMAL


@block()
def SquaredError(input: Any = TBD, target: Any = TBD) -> Any:
    return ops.square(input - target)


@block()
def AbsoluteError(input: Any = TBD, target: Any = TBD) -> Any:
    return abs(input - target)


@block()
def QuantileLoss(quantile: Any = 0.5, input: Any = TBD, target: Any = TBD) -> Any:
    error = target - input
    return ops.maximum(error * quantile, error * (quantile - 1.0))


@block()
def HingeLoss(input: Any = TBD, target: Any = TBD) -> Any:
    return ops.maximum(1.0 - target * input, 0.0)


@block()
def QuadHingeLoss(input: Any = TBD, target: Any = TBD) -> Any:
    return ops.square(ops.maximum(1.0 - target * input, 0.0))


@block()
def KLDivergence(input: Any = TBD, target: Any = TBD, threshold: Any = TINY) -> Any:
    return target * (robust_log(target, threshold) - robust_log(input, threshold))


@block(options="input_type")
def CrossEntropy(input_type: str = "logits", weights: Any = "", input: Any = TBD, target: Any = TBD,
                 robust: Any = False, threshold: Any = TINY, categorical: Any = True,
                 *, program: Any) -> Any:  # fmt: skip
    """Return the loss of each row; classes are on axis 1."""
    if input_type not in ("logits", "probs", "log_probs"):
        raise ModelError(f"input_type='{input_type}'", facts=["accepted: logits, probs, log_probs"])
    if weights is True or weights == "auto":
        raise ModelError("CrossEntropy with weights from the batch is not offered", hint="pass a list of weights")
    log_probs = (
        ops.log_softmax(input, axis=1)
        if input_type == "logits"
        else input
        if input_type == "log_probs"
        else robust_log(input, threshold)
        if robust
        else ops.log(input)
    )
    factors = None
    if isinstance(weights, (list, tuple)):
        factors = program.context.as_value(program.array(weights))
    if categorical:
        labels = ops.cast(target, dtype="int32")
        return ops.nll_loss(log_probs, labels, factors, axis=1, reduction="none")
    if factors is not None:
        log_probs = log_probs * ops.reshape(factors, shape=(1, -1, *(1,) * (input.ndim - 2)))
    return -ops.sum(target * log_probs, axis=1)


@block(options="input_type")
def BinaryCrossEntropy(input_type: str = "logits", pos_weight: Any = 1.0, input: Any = TBD, target: Any = TBD,
                       threshold: Any = TINY, robust: Any = False) -> Any:  # fmt: skip
    if input_type not in ("logits", "probs"):
        raise ModelError(f"input_type='{input_type}'", facts=["accepted: logits, probs"])
    if isinstance(pos_weight, bool):
        if pos_weight:
            raise ModelError("BinaryCrossEntropy with pos_weight from the batch is not offered", hint="pass a number")
        pos_weight = 1.0
    if input_type == "logits":
        return (1.0 - target) * ops.softplus(input) + pos_weight * target * ops.softplus(-input)
    probabilities = (input, 1.0 - input)
    true, false = (robust_log(x, threshold) if robust else ops.log(x) for x in probabilities)
    return -pos_weight * target * true - (1.0 - target) * false
