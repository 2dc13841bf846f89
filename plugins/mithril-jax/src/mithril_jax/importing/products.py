"""JAX's products, convolutions and windows."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import UnsupportedError, is_static
from mithril_jax.importing.shapes import pad, part
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
    x_axes, w_axes, y_axes = dimension_numbers
    x, w = ops.transpose(x, perm=tuple(x_axes)), ops.transpose(w, perm=tuple(w_axes))
    # The batch is [groups, batch], and a group of output channels reads its part.
    if batch_group_count != 1:
        size = x.shape[0] // batch_group_count
        x = ops.reshape(x, shape=(batch_group_count, size, *x.shape[1:]))
        x = ops.transpose(x, perm=(1, 0, *range(2, len(x.shape))))
        x = ops.reshape(x, shape=(size, batch_group_count * x.shape[2], *x.shape[3:]))
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
        groups=feature_group_count * batch_group_count,
    )
    inverse = tuple(int(k) for k in np.argsort(y_axes))
    return y if inverse == tuple(range(len(inverse))) else ops.transpose(y, perm=inverse)


def _spread(x: Any, dilation: Any) -> Any:
    """Put zeros between the pixels."""
    zero = np.zeros((), np.dtype(kind_of(x)))
    return pad(x, zero, [(0, 0, 0), (0, 0, 0), *((0, 0, d - 1) for d in dilation)])


# -- windows ------------------------------------------------------------------------------------------------------
def _window(
    x: Any, window_dimensions: Any, window_strides: Any, padding: Any, base_dilation: Any, window_dilation: Any
) -> Any:
    """Return the image as [rows, 1, *windowed axes], its settings, and the axes in order."""
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


def _is_pool(x: Any, base_dilation: Any, **_: Any) -> bool:
    return "float" in kind_of(x) and all(d == 1 for d in base_dilation)


@row("reduce_window_max")
def max_pool(x: Any, **parameters: Any) -> Any:
    if not _is_pool(x, **parameters):
        return reduce(ops.maximum, elements_of_windows(x, least(kind_of(x)), **parameters))
    image, settings, dilation, lead, order = _window(x, **parameters)
    return _restored(ops.max_pool(image, **settings, dilation=dilation), lead, order)


@row("reduce_window_min")
def min_pool(x: Any, **parameters: Any) -> Any:
    if not _is_pool(x, **parameters):
        return reduce(ops.minimum, elements_of_windows(x, largest(kind_of(x)), **parameters))
    return ops.neg(max_pool(ops.neg(x), **parameters))


@row("reduce_window_sum")
def sum_pool(x: Any, **parameters: Any) -> Any:
    if not _is_pool(x, **parameters) or any(d != 1 for d in parameters["window_dilation"]):
        return reduce(ops.add, elements_of_windows(x, 0, **parameters))
    image, settings, _, lead, order = _window(x, **parameters)
    y = ops.mul(ops.avg_pool(image, **settings), float(math.prod(settings["kernel"])))
    return _restored(y, lead, order)


def least(kind: str) -> Any:
    """Return the neutral element of the maximum."""
    if kind == "bool":
        return False
    return float("-inf") if "float" in kind else np.iinfo(kind).min


def largest(kind: str) -> Any:
    """Return the neutral element of the minimum."""
    if kind == "bool":
        return True
    return float("inf") if "float" in kind else np.iinfo(kind).max


def elements_of_windows(
    x: Any,
    border: Any,
    window_dimensions: Any,
    window_strides: Any,
    padding: Any,
    base_dilation: Any = None,
    window_dilation: Any = None,
) -> list[Any]:
    """Return one tensor for each position in a window: its elements in all windows."""
    if not is_static(tuple(x.shape)):
        raise UnsupportedError("these windows require static sizes")
    ones = (1,) * len(x.shape)
    widths = [(*p, d - 1) for p, d in zip(padding, base_dilation or ones, strict=True)]
    x = pad(x, np.asarray(border, np.dtype(kind_of(x))) if not hasattr(border, "dtype") else border, widths)
    elements = []
    for place in np.ndindex(*window_dimensions):
        starts = [k * d for k, d in zip(place, window_dilation or ones, strict=True)]
        elements.append(_every(x, starts, window_dimensions, window_strides, window_dilation or ones))
    return elements


def _every(x: Any, starts: Any, window: Any, strides: Any, dilation: Any) -> Any:
    for axis, (start, size, stride, step) in enumerate(zip(starts, window, strides, dilation, strict=True)):
        last = x.shape[axis] - (size - 1) * step  # the elements at which a window can begin
        x = part(x, axis, start, start + max(last, 0), stride)
    return x


@row("select_and_gather_add")
def gather_selected(tangents: Any, operand: Any, select_prim: Any, **windows: Any) -> Any:
    """Return the element of each window whose key is the largest or least."""
    is_largest = str(select_prim) == "ge"
    border = (least if is_largest else largest)(kind_of(operand))
    keys, values = elements_of_windows(operand, border, **windows), elements_of_windows(tangents, 0, **windows)
    key, value = keys[0], values[0]
    for other, element in zip(keys[1:], values[1:], strict=True):
        stays = (ops.greater_equal if is_largest else ops.less_equal)(key, other)
        key, value = ops.where(stays, key, other), ops.where(stays, value, element)
    return value


@row("select_and_scatter_add")
def scatter_selected(source: Any, operand: Any, select_prim: Any, **windows: Any) -> Any:
    """Add each element of the source to the first extreme element of its window."""
    is_largest = str(select_prim) == "ge"
    keys = elements_of_windows(operand, (least if is_largest else largest)(kind_of(operand)), **windows)
    key, place = keys[0], np.zeros((), np.int32)
    for number, other in enumerate(keys[1:], start=1):
        stays = (ops.greater_equal if is_largest else ops.less_equal)(key, other)
        key, place = ops.where(stays, key, other), ops.where(stays, place, np.int32(number))
    total: Any = None
    strides, padding = windows["window_strides"], windows["padding"]
    for number, starts in enumerate(np.ndindex(*windows["window_dimensions"])):
        selected = ops.where(ops.equal(place, np.int32(number)), source, np.zeros((), np.dtype(kind_of(source))))
        widths = []
        for n, m, start, stride, (low, _) in zip(operand.shape, source.shape, starts, strides, padding, strict=True):
            before = start - low
            widths.append((before, n - before - ((m - 1) * stride + 1), stride - 1))
        spread = pad(selected, np.zeros((), np.dtype(kind_of(source))), widths)
        total = spread if total is None else ops.add(total, spread)
    return total
