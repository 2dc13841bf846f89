"""Pools over windows, to a fixed size, and over all positions."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril_keras.layers.convolution import padding_of
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor, channels_first, from_channels_first, pair
from mithril_keras.weights import Weights


def _pool(
    function: Any, weights: Weights, x: Tensor, size: Any, strides: Any, padding: str, data_format: Any
) -> Tensor:
    v = channels_first(x, data_format)
    count = len(v.shape) - 2
    kernel = pair(size, count)
    stride = kernel if strides is None else pair(strides, count)
    pads = padding_of(weights, padding, v, kernel, stride, (1,) * count)
    return from_channels_first(function(v, kernel=kernel, stride=stride, padding=pads), data_format)


@layer("MaxPooling1D", "MaxPooling2D", "MaxPooling3D")
def max_pooling(
    weights: Weights,
    x: Tensor,
    *,
    pool_size: Any = 2,
    strides: Any = None,
    padding: str = "valid",
    data_format: str | None = None,
) -> Tensor:
    """Return the maximum of each window."""
    return _pool(ops.max_pool, weights, x, pool_size, strides, padding, data_format)


def _mean(v: Any, *, kernel: Any, stride: Any, padding: Any) -> Any:
    return ops.avg_pool(v, kernel=kernel, stride=stride, padding=padding, count_include_pad=False)


@layer("AveragePooling1D", "AveragePooling2D", "AveragePooling3D")
def average_pooling(
    weights: Weights,
    x: Tensor,
    *,
    pool_size: Any = 2,
    strides: Any = None,
    padding: str = "valid",
    data_format: str | None = None,
) -> Tensor:
    """Return the mean of each window, without padding."""
    return _pool(_mean, weights, x, pool_size, strides, padding, data_format)


def _global(function: Any, x: Tensor, keepdims: bool, data_format: str | None) -> Tensor:
    v = channels_first(x, data_format)
    y = function(v, axis=tuple(range(2, len(v.shape))), keepdims=keepdims)
    return from_channels_first(y, data_format)


@layer("GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D")
def global_average_pooling(
    weights: Weights, x: Tensor, *, keepdims: bool = False, data_format: str | None = None, mask: Any = None
) -> Tensor:
    """Return the mean of all positions; of one axis, those that the mask selects."""
    del weights
    valid = x.mask if mask is None else mask.value
    if valid is None or x.rank != 3:
        return _global(ops.mean, x, keepdims, data_format)
    axis = 2 if data_format == "channels_first" else 1
    valid = ops.unsqueeze(valid, axis=3 - axis)
    total = ops.sum(ops.where(valid, x.value, 0.0), axis=axis, keepdims=keepdims)
    return Tensor(total / ops.sum(ops.cast(valid, dtype=x.dtype), axis=axis, keepdims=keepdims))


@layer("GlobalMaxPooling1D", "GlobalMaxPooling2D", "GlobalMaxPooling3D")
def global_max_pooling(
    weights: Weights, x: Tensor, *, keepdims: bool = False, data_format: str | None = None
) -> Tensor:
    """Return the maximum of all positions."""
    del weights
    return _global(ops.max, x, keepdims, data_format)


@layer("AdaptiveAveragePooling1D", "AdaptiveAveragePooling2D", "AdaptiveAveragePooling3D")
def adaptive_average_pooling(
    weights: Weights, x: Tensor, *, output_size: Any, data_format: str | None = None
) -> Tensor:
    """Return means of windows that yield the output size."""
    del weights
    v = channels_first(x, data_format)
    return from_channels_first(ops.adaptive_avg_pool(v, size=pair(output_size, len(v.shape) - 2)), data_format)


@layer("AdaptiveMaxPooling1D", "AdaptiveMaxPooling2D", "AdaptiveMaxPooling3D")
def adaptive_max_pooling(weights: Weights, x: Tensor, *, output_size: Any, data_format: str | None = None) -> Tensor:
    """Return maxima of windows that yield the output size."""
    del weights
    v = channels_first(x, data_format)
    return from_channels_first(ops.adaptive_max_pool(v, size=pair(output_size, len(v.shape) - 2)), data_format)
