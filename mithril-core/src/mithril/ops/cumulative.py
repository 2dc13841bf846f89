"""Cumulative maxima, minima and log-sum-exps along an axis, in log2(size) steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mithril.graph import Axis, ShapeError, composite, exactly, ints, per_input, sample
from mithril.ops.basic import downcast, upcast
from mithril.ops.elementwise import abs, exp, isnan, log1p, maximum, minimum, where
from mithril.ops.shape import concat, flip
from mithril.ops.slicing import narrow

SAMPLES = (
    sample((3, 5)),
    sample((4, 2), axis=0, reverse=True, label="reverse"),
    sample((2, 1), label="one"),
    sample(exactly(1.0, float("-inf"), 3.0, float("nan"), 2.0), label="special", gradient=False),
)


def _doubled(combine: Callable[[Any, Any], Any], x: Any, axis: int, reverse: bool) -> Any:
    """Combine each element with all before it: step k adds the results of the elements 2^k before."""
    size = x.shape[axis]
    if not isinstance(size, int):
        raise ShapeError(f"the cumulative axis {axis} needs a static size, got {size}")
    y = flip(x, axis=(axis,)) if reverse else x
    step = 1
    while step < size:
        later = combine(narrow(y, axis, step, size), narrow(y, axis, 0, size - step))
        y = concat(narrow(y, axis, 0, step), later, axis=axis)
        step *= 2
    return flip(y, axis=(axis,)) if reverse else y


@composite(flops=per_input(4), samples=[*SAMPLES, sample(ints((3, 4), -3, 3), label="int")])
def cummax(x, *, axis: Axis = -1, reverse: bool = False):
    """Cumulative maximum along an axis, from the end with ``reverse``; nan is the largest."""
    return _doubled(maximum, x, axis, reverse)


@composite(flops=per_input(4), samples=[*SAMPLES, sample(ints((3, 4), -3, 3), label="int")])
def cummin(x, *, axis: Axis = -1, reverse: bool = False):
    """Cumulative minimum along an axis, from the end with ``reverse``; nan is the smallest."""
    return _doubled(minimum, x, axis, reverse)


def _logaddexp(a: Any, b: Any) -> Any:
    high = maximum(a, b)
    gap = abs(a - b)
    gap = where(isnan(gap) & ~isnan(high), 0.0, gap)  # two equal infinities
    total = high + log1p(exp(-gap))
    return where(high == float("-inf"), high, total)


@composite(promotes="float", flops=per_input(20), tolerance=4.0, samples=SAMPLES)
def logcumsumexp(x, *, axis: Axis = -1, reverse: bool = False):
    """Logarithm of the cumulative sum of exponentials along an axis, without overflow."""
    return downcast(_doubled(_logaddexp, upcast(x), axis, reverse), x)


__all__ = ["cummax", "cummin", "logcumsumexp"]
