"""Reductions, positions of extremes, and normalizations."""

from __future__ import annotations

import functools

from mithril import ops
from mithril.graph import OperationError
from mithril_tflite.operators.elementwise import number
from mithril_tflite.table import Known, Sizes, operator


def _reduction(name, function):
    def compute(x, axes: Sizes, *, keep_dims):
        return function(x, axis=axes, keepdims=keep_dims)

    operator(compute, name=name)


_reduction("MEAN", ops.mean)
_reduction("SUM", ops.sum)
_reduction("REDUCE_PROD", ops.prod)
_reduction("REDUCE_MAX", ops.max)
_reduction("REDUCE_MIN", ops.min)
_reduction("REDUCE_ANY", ops.any)
_reduction("REDUCE_ALL", ops.all)


def only(x):
    """Return the only element of an array."""
    if x.size != 1:
        raise OperationError(f"an operand has the shape {list(x.shape)}, expected one number")
    return int(x.reshape(-1)[0])


@operator
def ARG_MAX(x, axis: Known, *, context):
    return ops.cast(ops.argmax(x, axis=only(axis)), dtype=context.dtype())


@operator
def ARG_MIN(x, axis: Known, *, context):
    return ops.cast(ops.argmin(x, axis=only(axis)), dtype=context.dtype())


@operator(moves=True)
def TOPK_V2(x, k: Known):
    return ops.top_k(x, k=only(k))


@operator
def CUMSUM(x, axis: Known, *, exclusive, reverse):
    return ops.cumsum(x, axis=only(axis), exclusive=exclusive, reverse=reverse)


@operator
def L2_NORMALIZATION(x):
    return x * ops.rsqrt(ops.maximum(ops.sum(x * x, axis=-1, keepdims=True), number(1e-6, x)))


@operator
def LOCAL_RESPONSE_NORMALIZATION(x, *, radius, bias, alpha, beta):
    axis, channels = x.ndim - 1, x.shape[-1]
    squares = ops.pad(x * x, widths=((0, 0),) * axis + ((radius, radius),))
    parts = [
        ops.slice(squares, starts=(start,), stops=(start + channels,), steps=(1,), axes=(axis,))
        for start in range(2 * radius + 1)
    ]
    return x * ops.pow(bias + alpha * functools.reduce(ops.add, parts), -beta)
