# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""Two primitives and a composite."""

from __future__ import annotations

import numpy as np

from mithril import composite, op
from mithril.graph import Arr, Axis, broadcast, floating, int32, sample
from mithril.ops import mul, tanh


@op(
    name="alder.bump",
    shape=broadcast,
    dtype=floating,
    promotes="float",
    axes="... -> ...",
    flops=5.0,
    samples=[sample((2, 3)), sample(Arr((5,), low=0.5, high=3.0))],
)
def bump(x):
    """exp(-x * x)."""
    return np.exp(-x * x)


@bump.vjp
def _(g, y, x):
    return (mul(g, mul(mul(x, y), -2.0)),)


def two_like_x(x, *, axis):
    return x, x


def positions(dtypes, attributes):
    return int32


@op(
    name="alder.order",
    shape=two_like_x,
    dtype=positions,
    results=("order", "rank"),
    axes="*x -> *x, *x | x[axis] whole",
    samples=[sample((2, 3), axis=-1)],
)
def order(x, *, axis: Axis):
    """The order of the elements along an axis, and each element's place in it."""
    positions_of_x = np.argsort(x, axis, kind="stable")
    return positions_of_x.astype(np.int32), np.argsort(positions_of_x, axis).astype(np.int32)


order.no_vjp("its results are integers")


@composite(name="alder.soft_clip", samples=[sample((2, 3)), sample((4,), limit=0.5)])
def soft_clip(x, *, limit: float = 1.0):
    """Bend ``x`` to stay between ``-limit`` and ``limit``."""
    return tanh(x * (1.0 / limit)) * limit
