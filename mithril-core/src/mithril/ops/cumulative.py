"""Cumulative maxima, minima and log-sum-exps along an axis, in log2(size) steps, or one by one for an open size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mithril.graph import Axis, composite, dtype as as_dtype, exactly, ints, per_input, sample
from mithril.ops.basic import downcast, upcast
from mithril.ops.control_flow import scan
from mithril.ops.creation import full
from mithril.ops.elementwise import abs, exp, isnan, log1p, maximum, minimum, where
from mithril.ops.shape import concat, flip, transpose
from mithril.ops.slicing import narrow

SAMPLES = (
    sample((3, 5)),
    sample((4, 2), axis=0, reverse=True, label="reverse"),
    sample((2, 1), label="one"),
    sample(exactly(1.0, float("-inf"), 3.0, float("nan"), 2.0), label="special", gradient=False),
)


def _extremes(x: Any) -> tuple[Any, Any]:
    """Return the lowest and the highest element of a dtype."""
    kind = as_dtype(x.dtype)
    if kind.is_float:
        return float("-inf"), float("inf")
    limits = np.iinfo(kind.numpy)
    return int(limits.min), int(limits.max)


def _one_by_one(combine: Callable[[Any, Any], Any], neutral: float, x: Any, axis: int, reverse: bool) -> Any:
    """Combine in a loop: the number of steps of doubling depends on the size."""
    front = (axis, *(k for k in range(x.ndim) if k != axis))
    rows = transpose(x, perm=front)
    first = full(shape=rows.shape[1:], value=neutral, dtype=x.dtype)
    _, results = scan(lambda before, row: (combine(before, row),) * 2, first, rows, reverse=reverse)
    return transpose(results, perm=tuple(front.index(k) for k in range(x.ndim)))


def _doubled(combine: Callable[[Any, Any], Any], neutral: float, x: Any, axis: int, reverse: bool) -> Any:
    """Combine each element with all before it: step k adds the results of the elements 2^k before."""
    size = x.shape[axis]
    if not isinstance(size, int):
        return _one_by_one(combine, neutral, x, axis, reverse)
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
    return _doubled(maximum, _extremes(x)[0], x, axis, reverse)


@composite(flops=per_input(4), samples=[*SAMPLES, sample(ints((3, 4), -3, 3), label="int")])
def cummin(x, *, axis: Axis = -1, reverse: bool = False):
    """Cumulative minimum along an axis, from the end with ``reverse``; nan is the smallest."""
    return _doubled(minimum, _extremes(x)[1], x, axis, reverse)


def _logaddexp(a: Any, b: Any) -> Any:
    high = maximum(a, b)
    gap = abs(a - b)
    gap = where(isnan(gap) & ~isnan(high), 0.0, gap)  # two equal infinities
    total = high + log1p(exp(-gap))
    return where(high == float("-inf"), high, total)


@composite(promotes="float", flops=per_input(20), tolerance=4.0, samples=SAMPLES)
def logcumsumexp(x, *, axis: Axis = -1, reverse: bool = False):
    """Logarithm of the cumulative sum of exponentials along an axis, without overflow."""
    return downcast(_doubled(_logaddexp, float("-inf"), upcast(x), axis, reverse), x)


__all__ = ["cummax", "cummin", "logcumsumexp"]
