"""Losses. ``reduction`` is "mean", "sum" or "none"."""

from __future__ import annotations

import math
from typing import Any

from mithril.base import OperationError, ShapeError, assume, product, unknown
from mithril.ir import Arr, Axis, composite, exactly, expect_paired, ints, positive, sample, shape_text
from mithril.ops.activations import log_softmax, softplus
from mithril.ops.basic import cast
from mithril.ops.control_flow import stop_gradient
from mithril.ops.creation import iota
from mithril.ops.elementwise import abs as abs_, equal, exp, greater, less, log, maximum, minimum, sqrt, where
from mithril.ops.indexing import take, take_along_axis
from mithril.ops.reduction import mean, sized, sum
from mithril.ops.shape import broadcast_to, reshape, squeeze, unsqueeze
from mithril.ops.upcast import down, kind, up

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


def _reduced(x: Any, reduction: str, like: Any) -> Any:
    if reduction not in REDUCTIONS:
        what, facts, hint = unknown("reduction", reduction, REDUCTIONS)
        raise OperationError(what, facts=facts, hint=hint)
    made = mean(x) if reduction == "mean" else sum(x) if reduction == "sum" else x
    return down(made, like)


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
    """Negative log likelihood of labels (class numbers without the axis, or probabilities with it) under logits.

    ``weight`` has one factor for each class; the mean over class numbers then divides by the factors of its rows.
    """
    p = log_softmax(up(logits), axis=axis)
    if weight is not None:
        _expect_weight(weight.shape, logits.shape, axis)
        weight = cast(weight, dtype=kind(p))
    classes = p.shape[axis]
    if kind(labels).is_float:
        _expect_probabilities(logits.shape, labels.shape)
        target = up(labels)
        if label_smoothing:
            target = target * (1.0 - label_smoothing) + label_smoothing / _number(classes)
        if weight is not None:
            target = target * _along(weight, axis, p)
        return _reduced(-sum(p * target, axis=axis), reduction, logits)
    _expect_classes("cross_entropy", "logits", logits.shape, labels.shape, axis)
    kept = None if ignore_index is None else equal(labels, ignore_index) ^ True
    classed = labels if kept is None else where(kept, labels, 0)
    picked = squeeze(take_along_axis(p, unsqueeze(classed, axis=(axis,)), axis=axis), axis=(axis,))
    share = None if weight is None else take(weight, classed, axis=0)
    loss = -picked if share is None else -picked * share
    if label_smoothing:
        spread = p if weight is None else p * _along(weight, axis, p)
        loss = loss * (1.0 - label_smoothing) - mean(spread, axis=axis) * label_smoothing
    if kept is not None:
        loss = where(kept, loss, 0.0)
        share = cast(kept, dtype=kind(loss)) if share is None else where(kept, share, 0.0)
    if reduction == "mean" and share is not None:
        return down(sum(loss) / sum(share), logits)
    return _reduced(loss, reduction, logits)


def _expect_weight(weight: Any, logits: Any, axis: int) -> None:
    """Raise unless there is one factor for each class."""
    if len(weight) == 1 and assume(weight[0], "==", logits[axis], "the weight of 'cross_entropy'"):
        return
    raise ShapeError(
        f"'cross_entropy' expected weight {shape_text((logits[axis],))}, one for each class, got {shape_text(weight)}",
        facts=[f"logits {shape_text(logits)}"],
        hint='for one for each sample: ops.mean(ops.cross_entropy(logits, labels, reduction="none") * weight)',
    )


def _along(weight: Any, axis: int, like: Any) -> Any:
    """One number for each class, shaped so that it broadcasts against the logits."""
    return reshape(weight, shape=tuple(d if k == axis else 1 for k, d in enumerate(like.shape)))


def _expect_probabilities(logits: Any, labels: Any) -> None:
    if len(labels) != len(logits):
        raise ShapeError(
            f"'cross_entropy' got float labels {shape_text(labels)} for logits {shape_text(logits)}: "
            "float labels are probabilities, one for each class",
            hint="for class numbers cast the labels to int: labels.astype('int32')",
        )
    expect_paired("cross_entropy", {"logits": logits, "labels": labels}, scalar=False)


def _expect_classes(op: str, name: str, scores: Any, labels: Any, axis: int) -> None:
    """Raise unless there is one class number for each row of scores."""
    rows = tuple(d for k, d in enumerate(scores) if k != axis)
    if len(labels) == len(rows) and all(
        assume(a, "==", b, f"labels of '{op}'") for a, b in zip(rows, labels, strict=True)
    ):
        return
    hint = None
    if labels == (*rows, 1):
        hint = "drop the last axis: labels[:, 0] in the data, or ops.squeeze(labels, axis=(-1,))"
    elif len(labels) == len(scores):
        hint = "for one-hot labels use floats, labels.astype('float32'), or class numbers, labels.argmax(-1)"
    raise ShapeError(
        f"'{op}' expected labels {shape_text(rows)}, one class number for each row, got {shape_text(labels)}",
        facts=[f"{name} {shape_text(scores)}"],
        hint=hint,
    )


def _number(n: Any) -> float:
    if type(n) is not int:
        raise ShapeError(f"the number of classes must be known, got {n}")
    return float(n)


@cross_entropy.vjp
def _(g, y, logits, labels, weight, *, axis, reduction, label_smoothing, ignore_index):
    """softmax minus the target, scaled: one pass over the logits."""
    z = log_softmax(up(logits), axis=axis)
    p, cotangent = exp(z), up(g)
    span = None if weight is None else _along(cast(weight, dtype=z.dtype), axis, z)
    hot, kept = None, None
    if not labels.dtype.is_float:
        kept = None if ignore_index is None else equal(labels, ignore_index) ^ True
        hot = _one_hot(labels if kept is None else where(kept, labels, 0), axis, z)
    target = up(labels) if hot is None else hot
    if label_smoothing:
        target = target * (1.0 - label_smoothing) + label_smoothing / _number(z.shape[axis])
    weighed = target if span is None else target * span
    plain = hot is not None and span is None  # then the target adds up to one
    gz = (p if plain else p * sum(weighed, axis=axis, keepdims=True)) - weighed
    if reduction == "mean":
        cotangent = cotangent / _rows(z, hot, kept, span, axis)
    if reduction == "none":
        cotangent = unsqueeze(cotangent, axis=(axis,))
    if kept is not None:
        cotangent = cotangent * unsqueeze(cast(kept, dtype=z.dtype), axis=(axis,))
    gl, gw = None, None
    if hot is None:
        slope = z if span is None else z * span
        gl = down(-(cotangent * slope) * (1.0 - label_smoothing), labels)
        if gl.shape != labels.shape:
            gl = broadcast_to(gl, shape=labels.shape)
    if weight is not None and weight.dtype.is_float:
        each = -(target * z)
        if reduction == "mean" and hot is not None:
            each = each - hot * up(y)  # the divisor depends on the weight as well
        gw = down(sum(each * cotangent, axis=tuple(k for k in range(len(z.shape)) if k != axis)), weight)
    return down(gz * cotangent, logits), gl, gw


def _rows(z: Any, hot: Any, kept: Any, span: Any, axis: int) -> Any:
    """The divisor of the mean: the number of rows, or their weights together."""
    if hot is None or (kept is None and span is None):
        return sized(product(tuple(d for k, d in enumerate(z.shape) if k != axis)), z.dtype)
    if span is None:
        return sum(cast(kept, dtype=z.dtype))
    share = sum(hot * span, axis=axis)
    return sum(share if kept is None else where(kept, share, 0.0))


def _one_hot(labels: Any, axis: int, like: Any) -> Any:
    """Class numbers as rows of zeros and a one, along the axis."""
    rank = len(like.shape)
    numbers = iota(shape=tuple(like.shape[axis] if k == axis else 1 for k in range(rank)), axis=axis)
    return cast(equal(unsqueeze(cast(labels, dtype="int32"), axis=(axis,)), numbers), dtype=like.dtype)


@composite(
    promotes="float",
    promoted=("log_probabilities",),
    samples=[
        sample((4, 5), ints((4,), 0, 4)),
        sample((2, 3, 4), ints((2, 4), 0, 2), axis=1, reduction="sum", label="axis"),
    ],
    labels="labels",
)
def nll_loss(log_probabilities, labels, *, axis: Axis = -1, reduction: str = "mean"):
    """Negative log likelihood of class numbers, from log probabilities."""
    _expect_classes("nll_loss", "log_probabilities", log_probabilities.shape, labels.shape, axis)
    picked = take_along_axis(up(log_probabilities), unsqueeze(labels, axis=(axis,)), axis=axis)
    return _reduced(-squeeze(picked, axis=(axis,)), reduction, log_probabilities)


def _bounded_log(p: Any, eps: float) -> Any:
    """Return log(p), at least -100, with the derivatives of log above eps and the slope 1 / eps below.

    So a wrong prediction that is certain still learns.
    """
    steady = stop_gradient(p)
    is_inner = less(eps, steady)
    line = (p - eps) / where(less(steady, 0.0), math.nan, eps) + math.log(eps)
    extended = where(is_inner, log(where(is_inner, p, 1.0)), line)
    return extended + stop_gradient(maximum(log(steady), -100.0) - extended)


@composite(promotes="float", samples=[sample(Arr((3, 4), low=0.1, high=0.9), Arr((3, 4), low=0.0, high=1.0))])
def binary_cross_entropy(probabilities, targets, *, reduction: str = "mean", eps: float = 1e-12):
    """Of probabilities; a logarithm is cut off at -100, its slope at 1 / eps; nan outside of 0 to 1."""
    expect_paired("binary_cross_entropy", {"probabilities": probabilities.shape, "targets": targets.shape})
    p, t = up(probabilities), up(targets)
    loss = -(t * _bounded_log(p, eps) + (1.0 - t) * _bounded_log(1.0 - p, eps))
    return _reduced(loss, reduction, probabilities)


@composite(promotes="float", tolerance=2.0, samples=WITH_LOGITS)
def binary_cross_entropy_with_logits(logits, targets, pos_weight=None, *, reduction: str = "mean"):
    """Of logits: stable where the probability is 0 or 1.

    ``pos_weight`` is a factor of the loss where the target is 1: one number, or one for each of the last axes.
    """
    expect_paired("binary_cross_entropy_with_logits", {"logits": logits.shape, "targets": targets.shape})
    z, t = up(logits), up(targets)
    if pos_weight is None:
        return _reduced(softplus(z) - z * t, reduction, logits)
    _expect_trailing(pos_weight.shape, logits.shape)
    loss = t * up(pos_weight) * softplus(-z) + (1.0 - t) * softplus(z)
    return _reduced(loss, reduction, logits)


def _expect_trailing(weight: Any, logits: Any) -> None:
    """Raise unless the weight has the sizes of the last axes."""
    last = logits[len(logits) - len(weight) :]
    reason = "'pos_weight' has the last sizes of the logits"
    if len(weight) <= len(logits) and all(assume(a, "==", b, reason) for a, b in zip(last, weight, strict=True)):
        return
    raise ShapeError(
        f"'binary_cross_entropy_with_logits' got pos_weight {shape_text(weight)} for logits {shape_text(logits)}",
        facts=[f"accepted: one number, or the last sizes of the logits, such as {shape_text(logits[-1:])}"],
        hint="for one for each sample, use reduction='none' and multiply the losses",
    )


# -- distances ----------------------------------------------------------------------------------------------------
@composite(promotes="float", samples=PAIR, precision="full")
def mse_loss(predictions, targets, *, reduction: str = "mean"):
    """Squared difference."""
    expect_paired("mse_loss", {"predictions": predictions.shape, "targets": targets.shape})
    d = up(predictions) - up(targets)
    return _reduced(d * d, reduction, predictions)


@composite(promotes="float", samples=PAIR, precision="full")
def l1_loss(predictions, targets, *, reduction: str = "mean"):
    """Absolute difference."""
    expect_paired("l1_loss", {"predictions": predictions.shape, "targets": targets.shape})
    return _reduced(abs_(up(predictions) - up(targets)), reduction, predictions)


@composite(promotes="float", samples=PAIR, precision="full")
def huber_loss(predictions, targets, *, delta: float = 1.0, reduction: str = "mean"):
    """Half the squared difference up to delta, linear beyond."""
    expect_paired("huber_loss", {"predictions": predictions.shape, "targets": targets.shape})
    d = abs_(up(predictions) - up(targets))
    inside = minimum(d, delta)
    return _reduced(inside * inside * 0.5 + (d - inside) * delta, reduction, predictions)


@composite(promotes="float", samples=PAIR, precision="full")
def smooth_l1_loss(predictions, targets, *, beta: float = 1.0, reduction: str = "mean"):
    """Absolute difference, rounded off below beta."""
    expect_paired("smooth_l1_loss", {"predictions": predictions.shape, "targets": targets.shape})
    d = abs_(up(predictions) - up(targets))
    small = less(d, beta)
    return _reduced(where(small, d * d * (0.5 / beta), d - 0.5 * beta), reduction, predictions)


@composite(
    promotes="float",
    samples=[
        sample((3, 4), positive((3, 4), 0.1, 0.9)),
        sample((3, 4), positive((3, 4)), reduction="sum", label="sum"),
    ],
)
def kl_div(log_predictions, targets, *, reduction: str = "mean"):
    """Target times (log target minus the prediction, which is a logarithm); a target of 0 adds nothing."""
    expect_paired("kl_div", {"log_predictions": log_predictions.shape, "targets": targets.shape})
    t = up(targets)
    inside = greater(t, 0.0)
    loss = where(inside, t * (log(where(inside, t, 1.0)) - up(log_predictions)), 0.0)
    return _reduced(loss, reduction, log_predictions)


@composite(promotes="float", samples=[sample((3, 4), exactly(*(1.0, -1.0) * 6, shape=(3, 4)))])
def hinge_loss(predictions, targets, *, reduction: str = "mean"):
    """max(0, 1 - prediction * target) for targets of -1 and 1."""
    expect_paired("hinge_loss", {"predictions": predictions.shape, "targets": targets.shape})
    return _reduced(maximum(1.0 - up(predictions) * up(targets), 0.0), reduction, predictions)


@composite(promotes="float", samples=[sample((3, 4), (3, 4)), sample((4, 3), (4, 3), axis=0, label="axis")])
def cosine_similarity(a, b, *, axis: Axis = -1, eps: float = 1e-8):
    """The cosine of the angle between vectors along an axis."""
    u, v = up(a), up(b)
    lengths = maximum(sqrt(sum(u * u, axis=axis)), eps) * maximum(sqrt(sum(v * v, axis=axis)), eps)
    return down(sum(u * v, axis=axis) / lengths, a)


@composite(promotes="float", samples=[sample((3, 4), (3, 4), (3, 4))])
def triplet_loss(anchor, positive, negative, *, margin: float = 1.0, reduction: str = "mean"):
    """max(0, margin + distance to the positive - distance to the negative)."""
    shapes = {"anchor": anchor.shape, "positive": positive.shape, "negative": negative.shape}
    expect_paired("triplet_loss", shapes, scalar=False)
    a = up(anchor)
    near, far = a - up(positive), a - up(negative)
    d = sqrt(sum(near * near, axis=-1) + 1e-12) - sqrt(sum(far * far, axis=-1) + 1e-12)
    return _reduced(maximum(d + margin, 0.0), reduction, anchor)
