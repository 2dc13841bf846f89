"""Losses. ``reduction`` is "mean", "sum" or "none"."""

from __future__ import annotations

import math
from typing import Any

from mithril.graph import (
    Arr,
    Axis,
    OperationError,
    ShapeError,
    assume,
    composite,
    exactly,
    expect_paired,
    ints,
    positive,
    product,
    sample,
    shape_text,
    unknown,
)
from mithril.ops.activations import log_softmax, softplus
from mithril.ops.along_axis import take_along_axis
from mithril.ops.basic import cast, downcast, dtype_of, upcast
from mithril.ops.control_flow import stop_gradient
from mithril.ops.creation import iota
from mithril.ops.elementwise import (
    abs as abs_,
    equal,
    exp,
    greater,
    less,
    log,
    maximum,
    minimum,
    not_equal,
    sqrt,
    where,
)
from mithril.ops.indexing import take
from mithril.ops.reduction import mean, size_as_divisor, sum
from mithril.ops.shape import broadcast_to, reshape, squeeze, unsqueeze

REDUCTIONS = ("mean", "sum", "none")
PAIR = (
    sample((3, 4), (3, 4)),
    sample((3, 4), (3, 4), reduction="sum", label="sum"),
    sample((5,), (5,), reduction="none", label="none"),
)
WITH_LOGITS = [
    sample((3, 4), Arr((3, 4), low=0.0, high=1.0)),
    *PAIR[1:],
    sample((3, 4), Arr((3, 4), low=0.0, high=1.0), positive((4,)), label="pos_weight"),
    sample((3, 4), Arr((3, 4), low=0.0, high=1.0), positive(()), reduction="none", label="pos_weight: a number"),
]


def reduced(x: Any, reduction: str, like: Any) -> Any:
    if reduction not in REDUCTIONS:
        message, facts, hint = unknown("reduction", reduction, REDUCTIONS)
        raise OperationError(message, facts=facts, hint=hint)
    reduced = mean(x) if reduction == "mean" else sum(x) if reduction == "sum" else x
    return downcast(reduced, like)


# -- classes ------------------------------------------------------------------------------------------------------
@composite(
    promotes="float",
    promoted=("logits",),
    tolerance=2.0,
    samples=[
        sample((4, 5), ints((4,), 0, 4)),
        sample((2, 3, 4), ints((2, 4), 0, 2), axis=1, label="axis"),
        sample((4, 5), ints((4,), 0, 4), label_smoothing=0.1, reduction="sum", label="smoothing"),
        sample((4, 3), exactly(0, 2, -100, 1, dtype="int32"), ignore_index=-100, label="ignored"),
        sample((4, 5), positive((4, 5), 0.1, 0.9), label="probabilities"),
        sample((4, 5), ints((4,), 0, 4), reduction="none", label="none"),
        sample((4, 5), ints((4,), 0, 4), positive((5,)), label="weight"),
        sample((2, 3, 4), ints((2, 4), 0, 2), positive((3,)), axis=1, reduction="none", label="weight, axis"),
        sample((4, 5), positive((4, 5), 0.1, 0.9), positive((5,)), label_smoothing=0.1, label="weight, probabilities"),
        sample(
            (4, 3),
            exactly(0, 2, -100, 1, dtype="int32"),
            positive((3,)),
            ignore_index=-100,
            label_smoothing=0.1,
            label="weight, ignored, smoothing",
        ),
    ],
    labels="labels",
)
def cross_entropy(
    logits,
    labels,
    weight=None,
    *,
    axis: Axis = -1,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
):
    """Negative log likelihood of labels: class indices, or probabilities of the shape of the logits.

    ``weight`` has one factor per class; for class indices the mean is then weighted by the factors of the labels.
    """
    p = log_softmax(upcast(logits), axis=axis)
    if weight is not None:
        _expect_weight("cross_entropy", weight.shape, logits.shape, axis)
        weight = cast(weight, dtype=dtype_of(p))
    classes = p.shape[axis]
    if dtype_of(labels).is_float:
        _expect_probabilities(logits.shape, labels.shape)
        target = upcast(labels)
        if label_smoothing:
            target = target * (1.0 - label_smoothing) + label_smoothing / _number(classes)
        if weight is not None:
            target = target * _broadcast_to_classes(weight, axis, p)
        return reduced(-sum(p * target, axis=axis), reduction, logits)
    _expect_classes("cross_entropy", "logits", logits.shape, labels.shape, axis)
    counted = None if ignore_index is None else equal(labels, ignore_index) ^ True
    classed = labels if counted is None else where(counted, labels, 0)
    picked = squeeze(take_along_axis(p, unsqueeze(classed, axis=(axis,)), axis=axis), axis=(axis,))
    factor = None if weight is None else take(weight, classed, axis=0)
    loss = -picked if factor is None else -picked * factor
    if label_smoothing:
        spread = p if weight is None else p * _broadcast_to_classes(weight, axis, p)
        loss = loss * (1.0 - label_smoothing) - mean(spread, axis=axis) * label_smoothing
    if counted is not None:
        loss = where(counted, loss, 0.0)
        factor = cast(counted, dtype=dtype_of(loss)) if factor is None else where(counted, factor, 0.0)
    if reduction == "mean" and factor is not None:
        return downcast(sum(loss) / sum(factor), logits)
    return reduced(loss, reduction, logits)


def _expect_weight(op: str, weight: Any, logits: Any, axis: int) -> None:
    """Raise ShapeError unless there is one weight per class."""
    if len(weight) == 1 and assume(weight[0], "==", logits[axis], f"the weight of '{op}'"):
        return
    raise ShapeError(
        f"'{op}' expected weight {shape_text((logits[axis],))}, one per class, got {shape_text(weight)}",
        facts=[f"logits {shape_text(logits)}"],
        hint=f'for weights per sample use ops.mean(ops.{op}(logits, labels, reduction="none") * weight)',
    )


def _broadcast_to_classes(weight: Any, axis: int, like: Any) -> Any:
    """Reshape a vector with one entry per class to broadcast against the logits."""
    return reshape(weight, shape=tuple(d if k == axis else 1 for k, d in enumerate(like.shape)))


def _expect_probabilities(logits: Any, labels: Any) -> None:
    if len(labels) != len(logits):
        raise ShapeError(
            f"'cross_entropy' got float labels {shape_text(labels)} for logits {shape_text(logits)}: "
            "float labels are probabilities, one per class",
            hint="for class indices cast the labels to int: labels.astype('int32')",
        )
    expect_paired("cross_entropy", {"logits": logits, "labels": labels}, scalar=False)


def _expect_classes(op: str, name: str, scores: Any, labels: Any, axis: int) -> None:
    """Raise ShapeError unless there is one class index per row of scores."""
    rows = tuple(d for k, d in enumerate(scores) if k != axis)
    if len(labels) == len(rows) and all(
        assume(a, "==", b, f"labels of '{op}'") for a, b in zip(rows, labels, strict=True)
    ):
        return
    hint = None
    if labels == (*rows, 1):
        hint = "drop the last axis: labels[:, 0] in the data, or ops.squeeze(labels, axis=(-1,))"
    elif len(labels) == len(scores):
        hint = "for one-hot labels pass floats, labels.astype('float32'), or class indices, labels.argmax(-1)"
    raise ShapeError(
        f"'{op}' expected labels {shape_text(rows)}, one class index per row, got {shape_text(labels)}",
        facts=[f"{name} {shape_text(scores)}"],
        hint=hint,
    )


def _number(n: Any) -> float:
    if type(n) is not int:
        raise ShapeError(f"the number of classes must be static, got '{n}'")
    return float(n)


@cross_entropy.vjp
def _(g, y, logits, labels, weight, *, axis, reduction, label_smoothing, ignore_index):
    """Return softmax minus target, scaled: one pass over the logits."""
    z = log_softmax(upcast(logits), axis=axis)
    p, cotangent = exp(z), upcast(g)
    span = None if weight is None else _broadcast_to_classes(cast(weight, dtype=z.dtype), axis, z)
    hot, counted = None, None
    if not labels.dtype.is_float:
        counted = None if ignore_index is None else equal(labels, ignore_index) ^ True
        hot = _one_hot(labels if counted is None else where(counted, labels, 0), axis, z)
    target = upcast(labels) if hot is None else hot
    if label_smoothing:
        target = target * (1.0 - label_smoothing) + label_smoothing / _number(z.shape[axis])
    weighed = target if span is None else target * span
    plain = hot is not None and span is None  # the target then sums to 1
    gz = (p if plain else p * sum(weighed, axis=axis, keepdims=True)) - weighed
    if reduction == "mean":
        cotangent = cotangent / _mean_divisor(z, hot, counted, span, axis)
    if reduction == "none":
        cotangent = unsqueeze(cotangent, axis=(axis,))
    if counted is not None:
        cotangent = cotangent * unsqueeze(cast(counted, dtype=z.dtype), axis=(axis,))
    gl, gw = None, None
    if hot is None:
        slope = z if span is None else z * span
        gl = downcast(-(cotangent * slope) * (1.0 - label_smoothing), labels)
        if gl.shape != labels.shape:
            gl = broadcast_to(gl, shape=labels.shape)
    if weight is not None and weight.dtype.is_float:
        terms = -(target * z)
        if reduction == "mean" and hot is not None:
            terms = terms - hot * upcast(y)  # the divisor of the mean depends on the weight as well
        gw = downcast(sum(terms * cotangent, axis=tuple(k for k in range(len(z.shape)) if k != axis)), weight)
    return downcast(gz * cotangent, logits), gl, gw


def _mean_divisor(z: Any, hot: Any, counted: Any, span: Any, axis: int) -> Any:
    """Return the divisor of the mean: the number of counted rows, or the sum of their weights."""
    if hot is None or (counted is None and span is None):
        return size_as_divisor(product(tuple(d for k, d in enumerate(z.shape) if k != axis)), z.dtype)
    if span is None:
        return sum(cast(counted, dtype=z.dtype))
    factor = sum(hot * span, axis=axis)
    return sum(factor if counted is None else where(counted, factor, 0.0))


def _one_hot(labels: Any, axis: int, like: Any) -> Any:
    """Convert class indices to one-hot vectors along an axis."""
    rank = len(like.shape)
    numbers = iota(shape=tuple(like.shape[axis] if k == axis else 1 for k in range(rank)), axis=axis)
    return cast(equal(unsqueeze(cast(labels, dtype="int32"), axis=(axis,)), numbers), dtype=like.dtype)


@composite(
    promotes="float",
    promoted=("log_probabilities",),
    samples=[
        sample((4, 5), ints((4,), 0, 4)),
        sample((2, 3, 4), ints((2, 4), 0, 2), axis=1, reduction="sum", label="axis"),
        sample((4, 5), ints((4,), 0, 4), positive((5,)), label="weight"),
        sample((4, 3), exactly(0, 2, -100, 1, dtype="int32"), ignore_index=-100, label="ignored"),
    ],
    labels="labels",
)
def nll_loss(
    log_probabilities, labels, weight=None, *, axis: Axis = -1, reduction: str = "mean", ignore_index: int | None = None
):
    """Negative log likelihood of class indices, from log probabilities.

    ``weight`` has one factor per class; the mean is then weighted by the factors of the labels.
    """
    _expect_classes("nll_loss", "log_probabilities", log_probabilities.shape, labels.shape, axis)
    counted = None if ignore_index is None else not_equal(labels, ignore_index)
    classed = labels if counted is None else where(counted, labels, 0)
    picked = take_along_axis(upcast(log_probabilities), unsqueeze(classed, axis=(axis,)), axis=axis)
    loss, factor = -squeeze(picked, axis=(axis,)), None
    if weight is not None:
        _expect_weight("nll_loss", weight.shape, log_probabilities.shape, axis)
        factor = take(cast(weight, dtype=dtype_of(loss)), classed, axis=0)
        loss = loss * factor
    if counted is not None:
        loss = where(counted, loss, 0.0)
        factor = cast(counted, dtype=dtype_of(loss)) if factor is None else where(counted, factor, 0.0)
    if reduction == "mean" and factor is not None:
        return downcast(sum(loss) / sum(factor), log_probabilities)
    return reduced(loss, reduction, log_probabilities)


def _bounded_log(p: Any, eps: float) -> Any:
    """Return log(p), at least -100, with the derivative of log above eps and 1 / eps below.

    A prediction that is certain but wrong thus still has a gradient.
    """
    steady = stop_gradient(p)
    is_inner = less(eps, steady)
    line = (p - eps) / where(less(steady, 0.0), math.nan, eps) + math.log(eps)
    # Both sides of a selection are differentiated: log(0) on the unselected side would give 0 * inf
    # in the gradient.
    extended = where(is_inner, log(where(is_inner, p, 1.0)), line)
    return extended + stop_gradient(maximum(log(steady), -100.0) - extended)


@composite(promotes="float", samples=[sample(Arr((3, 4), low=0.1, high=0.9), Arr((3, 4), low=0.0, high=1.0))])
def binary_cross_entropy(probabilities, targets, *, reduction: str = "mean", eps: float = 1e-12):
    """Binary cross entropy of probabilities, with logarithms of at least -100 and slope at most 1 / eps."""
    expect_paired("binary_cross_entropy", {"probabilities": probabilities.shape, "targets": targets.shape})
    p, t = upcast(probabilities), upcast(targets)
    loss = -(t * _bounded_log(p, eps) + (1.0 - t) * _bounded_log(1.0 - p, eps))
    return reduced(loss, reduction, probabilities)


@composite(promotes="float", tolerance=2.0, samples=WITH_LOGITS)
def binary_cross_entropy_with_logits(logits, targets, pos_weight=None, *, reduction: str = "mean"):
    """Binary cross entropy of logits, stable for probabilities close to 0 or 1.

    ``pos_weight`` is a factor for targets of 1: a scalar, or an array that matches the last axes of the logits.
    """
    expect_paired("binary_cross_entropy_with_logits", {"logits": logits.shape, "targets": targets.shape})
    z, t = upcast(logits), upcast(targets)
    if pos_weight is None:
        return reduced(softplus(z) - z * t, reduction, logits)
    _expect_trailing(pos_weight.shape, logits.shape)
    loss = t * upcast(pos_weight) * softplus(-z) + (1.0 - t) * softplus(z)
    return reduced(loss, reduction, logits)


def _expect_trailing(weight: Any, logits: Any) -> None:
    """Raise ShapeError unless the weight has the sizes of the last axes of the logits."""
    last = logits[len(logits) - len(weight) :]
    reason = "'pos_weight' has the last sizes of the logits"
    if len(weight) <= len(logits) and all(assume(a, "==", b, reason) for a, b in zip(last, weight, strict=True)):
        return
    raise ShapeError(
        f"'binary_cross_entropy_with_logits' got pos_weight {shape_text(weight)} for logits {shape_text(logits)}",
        facts=[f"accepted: a scalar, or the last sizes of the logits, such as {shape_text(logits[-1:])}"],
        hint="for weights per sample use reduction='none' and multiply the losses",
    )


# -- distances ----------------------------------------------------------------------------------------------------
@composite(promotes="float", samples=PAIR, precision="full")
def mse_loss(predictions, targets, *, reduction: str = "mean"):
    """(prediction - target)^2"""
    expect_paired("mse_loss", {"predictions": predictions.shape, "targets": targets.shape})
    d = upcast(predictions) - upcast(targets)
    return reduced(d * d, reduction, predictions)


@composite(promotes="float", samples=PAIR, precision="full")
def l1_loss(predictions, targets, *, reduction: str = "mean"):
    """|prediction - target|"""
    expect_paired("l1_loss", {"predictions": predictions.shape, "targets": targets.shape})
    return reduced(abs_(upcast(predictions) - upcast(targets)), reduction, predictions)


@composite(promotes="float", samples=PAIR, precision="full")
def huber_loss(predictions, targets, *, delta: float = 1.0, reduction: str = "mean"):
    """d^2 / 2 for differences d up to delta, delta * (|d| - delta / 2) beyond."""
    expect_paired("huber_loss", {"predictions": predictions.shape, "targets": targets.shape})
    d = abs_(upcast(predictions) - upcast(targets))
    clamped = minimum(d, delta)
    return reduced(clamped * clamped * 0.5 + (d - clamped) * delta, reduction, predictions)


@composite(promotes="float", samples=PAIR, precision="full")
def smooth_l1_loss(predictions, targets, *, beta: float = 1.0, reduction: str = "mean"):
    """d^2 / (2 * beta) for differences d below beta, |d| - beta / 2 beyond."""
    expect_paired("smooth_l1_loss", {"predictions": predictions.shape, "targets": targets.shape})
    d = abs_(upcast(predictions) - upcast(targets))
    small = less(d, beta)
    return reduced(where(small, d * d * (0.5 / beta), d - 0.5 * beta), reduction, predictions)


@composite(
    promotes="float",
    samples=[
        sample((3, 4), positive((3, 4), 0.1, 0.9)),
        sample((3, 4), positive((3, 4)), reduction="sum", label="sum"),
    ],
)
def kl_div(log_predictions, targets, *, reduction: str = "mean"):
    """target * (log(target) - log_prediction), 0 for targets of 0."""
    expect_paired("kl_div", {"log_predictions": log_predictions.shape, "targets": targets.shape})
    t = upcast(targets)
    is_positive = greater(t, 0.0)
    loss = where(is_positive, t * (log(where(is_positive, t, 1.0)) - upcast(log_predictions)), 0.0)
    return reduced(loss, reduction, log_predictions)


@composite(promotes="float", samples=[sample((3, 4), exactly(*(1.0, -1.0) * 6, shape=(3, 4)))])
def hinge_loss(predictions, targets, *, reduction: str = "mean"):
    """max(0, 1 - prediction * target) for targets of -1 and 1."""
    expect_paired("hinge_loss", {"predictions": predictions.shape, "targets": targets.shape})
    return reduced(maximum(1.0 - upcast(predictions) * upcast(targets), 0.0), reduction, predictions)


@composite(promotes="float", samples=[sample((3, 4), (3, 4)), sample((4, 3), (4, 3), axis=0, label="axis")])
def cosine_similarity(a, b, *, axis: Axis = -1, eps: float = 1e-8):
    """Cosine of the angle between vectors along an axis."""
    u, v = upcast(a), upcast(b)
    lengths = maximum(sqrt(sum(u * u, axis=axis)), eps) * maximum(sqrt(sum(v * v, axis=axis)), eps)
    return downcast(sum(u * v, axis=axis) / lengths, a)


@composite(promotes="float", samples=[sample((3, 4), (3, 4), (3, 4))])
def triplet_loss(anchor, positive, negative, *, margin: float = 1.0, reduction: str = "mean"):
    """max(0, margin + |anchor - positive| - |anchor - negative|), with Euclidean distances along the last axis."""
    shapes = {"anchor": anchor.shape, "positive": positive.shape, "negative": negative.shape}
    expect_paired("triplet_loss", shapes, scalar=False)
    a = upcast(anchor)
    to_positive, to_negative = a - upcast(positive), a - upcast(negative)
    d = sqrt(sum(to_positive * to_positive, axis=-1) + 1e-12) - sqrt(sum(to_negative * to_negative, axis=-1) + 1e-12)
    return reduced(maximum(d + margin, 0.0), reduction, anchor)
