"""JAX's products, convolutions and windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_jax.importing.table import cast, kind_of, row


@row("dot_general")
def dot_general(a: Any, b: Any, *, dimension_numbers: Any, preferred_element_type: Any = None, **_: Any) -> Any:
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    if preferred_element_type is not None and "float" in str(np.dtype(preferred_element_type)):
        a, b = cast(a, preferred_element_type), cast(b, preferred_element_type)
    y = ops.dot(
        a,
        b,
        contract_a=tuple(contract_a),
        contract_b=tuple(contract_b),
        batch_a=tuple(batch_a),
        batch_b=tuple(batch_b),
    )
    return y if preferred_element_type is None else cast(y, preferred_element_type)


@row("conv_general_dilated")
def conv(
    x: Any,
    w: Any,
    *,
    window_strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    **_: Any,
) -> Any:
    if batch_group_count != 1:
        raise UnsupportedError("convolutions with batch_group_count are not supported")
    x_axes, w_axes, y_axes = dimension_numbers
    x, w = ops.transpose(x, perm=tuple(x_axes)), ops.transpose(w, perm=tuple(w_axes))
    pairs = [tuple(p) for p in padding]
    if any(d != 1 for d in lhs_dilation):
        x = _spread(x, lhs_dilation)
    if any(p < 0 for pair in pairs for p in pair):
        index = [slice(None), slice(None)]
        index += [slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(pairs, x.shape[2:], strict=True)]
        x, pairs = x[tuple(index)], [(max(a, 0), max(b, 0)) for a, b in pairs]
    y = ops.conv(
        x,
        w,
        stride=tuple(window_strides),
        padding=tuple(pairs),
        dilation=tuple(rhs_dilation),
        groups=feature_group_count,
    )
    inverse = tuple(int(k) for k in np.argsort(y_axes))
    return y if inverse == tuple(range(len(inverse))) else ops.transpose(y, perm=inverse)


def _spread(x: Any, dilation: Any) -> Any:
    """Put zeros between the pixels."""
    from mithril_jax.importing.shapes import pad

    zero = np.zeros((), np.dtype(kind_of(x)))
    return pad(x, zero, [(0, 0, 0), (0, 0, 0), *((0, 0, d - 1) for d in dilation)])


# -- windows ------------------------------------------------------------------------------------------------------
def _window(
    x: Any, window_dimensions: Any, window_strides: Any, padding: Any, base_dilation: Any, window_dilation: Any
) -> Any:
    """Return the image as [rows, 1, *windowed axes], its settings, and the axes in order."""
    if any(d != 1 for d in base_dilation):
        raise UnsupportedError("pools with base_dilation are not supported")
    rank = len(x.shape)
    axes = [
        k for k in range(rank) if window_dimensions[k] != 1 or window_strides[k] != 1 or tuple(padding[k]) != (0, 0)
    ]
    axes = axes or [rank - 1]
    order = [*(k for k in range(rank) if k not in axes), *axes]
    settings = {
        "kernel": tuple(window_dimensions[k] for k in axes),
        "stride": tuple(window_strides[k] for k in axes),
        "padding": tuple(tuple(padding[k]) for k in axes),
    }
    dilation = tuple(window_dilation[k] for k in axes)
    transposed = ops.transpose(x, perm=tuple(order)) if order != list(range(rank)) else x
    lead = transposed.shape[: rank - len(axes)]
    rows: Any = 1
    for n in lead:
        rows = rows * n
    return ops.reshape(transposed, shape=(rows, 1, *transposed.shape[len(lead) :])), settings, dilation, lead, order


def _restored(y: Any, lead: Any, order: list[int]) -> Any:
    y = ops.reshape(y, shape=(*lead, *y.shape[2:]))
    inverse = tuple(order.index(k) for k in range(len(order)))
    return y if inverse == tuple(range(len(order))) else ops.transpose(y, perm=inverse)


@row("reduce_window_max")
def max_pool(x: Any, **parameters: Any) -> Any:
    image, settings, dilation, lead, order = _window(x, **parameters)
    return _restored(ops.max_pool(image, **settings, dilation=dilation), lead, order)


@row("reduce_window_min")
def min_pool(x: Any, **parameters: Any) -> Any:
    return ops.neg(max_pool(ops.neg(x), **parameters))


@row("reduce_window_sum")
def sum_pool(x: Any, **parameters: Any) -> Any:
    image, settings, dilation, lead, order = _window(x, **parameters)
    if any(d != 1 for d in dilation):
        raise UnsupportedError("sum pools with window_dilation are not supported")
    y = ops.mul(ops.avg_pool(image, **settings), float(math.prod(settings["kernel"])))
    return _restored(y, lead, order)
