"""The operation of this distribution: ternary weights, for any backend; it imports no framework."""

from __future__ import annotations

from typing import Any

import mithril as ml
from mithril.graph import exactly, operation, sample

# Weights of zeros have a mean of 0, by which they are divided.
EPS = 1e-8


@ml.composite(
    samples=[
        sample((3, 4)),
        sample((2, 3, 2), label="rank 3"),
        sample(exactly(0.0, 0.0, 0.0), label="zeros", gradient=False),
    ],
)
def ternarize(w):  # type: ignore[no-untyped-def]
    """w as -s, 0 or s, where s is the mean of its absolute values; the gradient passes straight through."""
    op = operation
    s = op("maximum")(op("mean")(op("abs")(w)), EPS)
    return op("clip")(op("round")(w / s), low=-1.0, high=1.0) * s


@ternarize.surrogate_vjp  # type: ignore[untyped-decorator]
def _(g: Any, y: Any, w: Any) -> tuple[Any]:
    return (g,)
