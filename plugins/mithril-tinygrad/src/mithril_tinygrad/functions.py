"""Operations that take several calls of tinygrad; parameters are named like operands and attributes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tinygrad import Tensor, dtypes

from mithril_tinygrad.arrays import of_numpy


def on_host(function: Callable[..., Any], types: Any, *operands: Tensor) -> list[Tensor]:
    """Call a function of NumPy arrays."""
    return [of_numpy(y) for y in function(*(x.numpy() for x in operands))]


# -- along axes -------------------------------------------------------------------------------------------------------
def reduced(x: Tensor, name: str, axis: tuple[int, ...], keepdims: bool, **settings: Any) -> Tensor:
    """Call a reduction, which tinygrad applies to all axes where none are given."""
    if axis:
        return getattr(x, name)(axis, keepdim=keepdims, **settings)
    return x != 0 if name in ("any", "all") else x.cast(settings.get("dtype", x.dtype))


def cumsum_(x: Tensor, axis: int, reverse: bool, exclusive: bool) -> Tensor:
    y = x.flip(axis) if reverse else x
    total = y.cumsum(axis).cast(x.dtype)
    if exclusive:
        ends = [(1, 0) if k == axis else (0, 0) for k in range(x.ndim)]
        total = total.pad(ends).shrink(tuple((0, n) for n in x.shape))
    return total.flip(axis) if reverse else total


def iota_(shape: tuple[int, ...], axis: int, dtype: Any) -> Tensor:
    row = Tensor.arange(shape[axis], dtype=dtypes.int64)
    return row.reshape([-1 if k == axis else 1 for k in range(len(shape))]).expand(shape).cast(dtype)


def take_(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    return x[(*[slice(None)] * axis, indices)]


# -- windows ----------------------------------------------------------------------------------------------------------
def conv_(x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    padded = x.pad(((0, 0), (0, 0), *padding)) if any(map(any, padding)) else x
    return padded.conv2d(w, None, groups, stride, dilation)


def conv_input_grad_(g: Tensor, w: Tensor, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    x = Tensor.zeros(shape, dtype=g.dtype, device="CPU").contiguous()
    return conv_(x, w, stride, padding, dilation, groups).gradient(x, gradient=g)[0]


def conv_weight_grad_(
    x: Tensor, g: Tensor, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    w = Tensor.zeros(shape, dtype=g.dtype, device="CPU").contiguous()
    return conv_(x, w, stride, padding, dilation, groups).gradient(w, gradient=g)[0]


def max_pool_(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    padded = x.pad(((0, 0), (0, 0), *padding), value=-math.inf) if any(map(any, padding)) else x
    return padded.max_pool2d(kernel, stride, dilation)
