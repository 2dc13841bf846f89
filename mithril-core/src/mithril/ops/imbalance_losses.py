"""Losses for rare positives and for counts: focal, dice, Poisson and Gaussian negative log likelihood."""

from __future__ import annotations

import math

from mithril.graph import Arr, OperationError, composite, expect_paired, positive, product, sample
from mithril.ops.activations import sigmoid, softplus
from mithril.ops.basic import upcast
from mithril.ops.elementwise import exp, log, maximum
from mithril.ops.losses import reduced
from mithril.ops.reduction import sum
from mithril.ops.shape import reshape

UNIT = Arr((3, 4), low=0.0, high=1.0)


def _expect_fraction(op: str, name: str, value: float | None) -> None:
    if value is not None and not 0.0 <= value <= 1.0:
        raise OperationError(f"{op}: {name}={value} is not a fraction", facts=["accepted: 0 to 1"])


@composite(
    promotes="float",
    tolerance=2.0,
    samples=[sample((3, 4), UNIT), sample((3, 4), UNIT, alpha=None, gamma=1.0, reduction="sum", label="plain")],
    precision="full",
)
def focal_loss(logits, targets, *, alpha: float | None = 0.25, gamma: float = 2.0, reduction: str = "mean"):
    """Binary cross entropy times (1 - p)^gamma, where p is the probability of the target: easy elements count less.

    ``alpha`` weighs targets of 1, 1 - ``alpha`` those of 0.
    """
    expect_paired("focal_loss", {"logits": logits.shape, "targets": targets.shape})
    _expect_fraction("focal_loss", "alpha", alpha)
    z, t = upcast(logits), upcast(targets)
    p = sigmoid(z)
    missing = p + t - 2.0 * p * t  # 1 - probability of the target
    loss = (softplus(z) - z * t) * missing**gamma
    if alpha is not None:
        loss = loss * (t * alpha + (1.0 - t) * (1.0 - alpha))
    return reduced(loss, reduction, logits)


@composite(
    promotes="float",
    samples=[
        sample(UNIT, UNIT),
        sample(Arr((2, 2, 3), low=0.0, high=1.0), Arr((2, 2, 3), low=0.0, high=1.0), smooth=0.5, reduction="none",
               label="smooth"),
    ],
    precision="full",
)  # fmt: skip
def dice_loss(probabilities, targets, *, smooth: float = 1.0, reduction: str = "mean"):
    """1 - (2 sum(p t) + smooth) / (sum(p) + sum(t) + smooth) for each row of the batch: the overlap of two masks."""
    expect_paired("dice_loss", {"probabilities": probabilities.shape, "targets": targets.shape}, scalar=False)
    shape = (probabilities.shape[0], product(probabilities.shape[1:]))
    p, t = (reshape(upcast(x), shape=shape) for x in (probabilities, targets))
    overlap = 2.0 * sum(p * t, axis=1) + smooth
    return reduced(1.0 - overlap / (sum(p, axis=1) + sum(t, axis=1) + smooth), reduction, probabilities)


@composite(
    promotes="float",
    samples=[sample((3, 4), positive((3, 4))), sample(positive((3,)), positive((3,)), log_rate=False, label="rates")],
    precision="full",
)
def poisson_nll_loss(rates, targets, *, log_rate: bool = True, eps: float = 1e-8, reduction: str = "mean"):
    """rate - target * log(rate), the negative log likelihood of counts; ``rates`` are logarithms if ``log_rate``."""
    expect_paired("poisson_nll_loss", {"rates": rates.shape, "targets": targets.shape})
    r, t = upcast(rates), upcast(targets)
    return reduced(exp(r) - t * r if log_rate else r - t * log(r + eps), reduction, rates)


@composite(
    promotes="float",
    samples=[sample((3, 4), (3, 4), positive((3, 4))), sample((3,), (3,), positive((3,)), full=True, label="full")],
    precision="full",
)
def gaussian_nll_loss(
    predictions, targets, variances, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
):
    """(log(variance) + (prediction - target)^2 / variance) / 2, with variances of at least ``eps``."""
    shapes = {"predictions": predictions.shape, "targets": targets.shape, "variances": variances.shape}
    expect_paired("gaussian_nll_loss", shapes)
    d, v = upcast(predictions) - upcast(targets), maximum(upcast(variances), eps)
    loss = (log(v) + d * d / v) * 0.5
    return reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction, predictions)


__all__ = ["dice_loss", "focal_loss", "gaussian_nll_loss", "poisson_nll_loss"]
