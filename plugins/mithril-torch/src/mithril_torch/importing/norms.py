"""ATen operators that normalize."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import product
from mithril.ops import size_value
from mithril_importing.arrays import as_value, reshape
from mithril_torch.importing.table import cast, row


@row("layer_norm")
def layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    return ops.layer_norm(x, weight, bias, axes=tuple(range(-len(shape), 0)), eps=eps)


@row("native_layer_norm")
def native_layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float, like: Any = None) -> Any:
    statistics = _statistics(cast(x, like[1].dtype), tuple(range(-len(shape), 0)), eps)
    return layer_norm(x, shape, weight, bias, eps), *statistics


def _statistics(x: Any, axes: tuple[int, ...], eps: float, keepdims: bool = True) -> tuple[Any, Any]:
    """Return the mean and the reciprocal standard deviation."""
    mean = ops.mean(x, axis=axes, keepdims=keepdims)
    return mean, ops.rsqrt(ops.add(ops.var(x, axis=axes, keepdims=keepdims), eps))


@row("rms_norm", "_fused_rms_norm")
def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    eps = float(np.finfo(np.dtype(str(x.dtype))).eps) if eps is None else eps
    if len(shape) == 1:
        return ops.rms_norm(x, weight, axis=-1, eps=eps)
    y = ops.mul(x, ops.rsqrt(ops.add(ops.mean(ops.square(x), axis=tuple(range(-len(shape), 0)), keepdims=True), eps)))
    return y if weight is None else ops.mul(y, weight)


@row("group_norm")
def group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    return ops.group_norm(x, weight, bias, groups=groups, eps=eps)


@row("native_group_norm")
def native_group_norm(
    x: Any, weight: Any, bias: Any, batch: Any, channels: Any, pixels: Any, groups: int, eps: float, like: Any = None
) -> Any:
    grouped = cast(reshape(x, (batch, groups, channels // groups * pixels)), like[1].dtype)
    return group_norm(x, groups, weight, bias, eps), *_statistics(grouped, (-1,), eps, keepdims=False)


# -- batch statistics ---------------------------------------------------------------------------------------------
def _scale_and_bias(x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    channels, kind = (x.shape[1],), np.dtype(str(x.dtype))
    return np.ones(channels, kind) if weight is None else weight, np.zeros(channels, kind) if bias is None else bias


@row("_native_batch_norm_legit_no_training")
def batch_norm_inference(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    scale, shift = _scale_and_bias(x, weight, bias)
    empty = np.zeros(0, np.dtype(str(mean.dtype)))  # PyTorch saves no statistics
    return ops.batch_norm(x, scale, shift, mean, var, eps=eps), empty, empty


@row("_native_batch_norm_legit_functional", "_native_batch_norm_legit")
def batch_norm_training(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    """Return the result, the mean and reciprocal deviation of the batch, and the new running mean and variance."""
    if not training:
        return (*batch_norm_inference(x, weight, bias, mean, var, momentum, eps), mean, var)
    y, average, variance = ops.batch_norm_training(x, *_scale_and_bias(x, weight, bias), eps=eps)
    pixels = product([x.shape[0], *x.shape[2:]])
    if isinstance(pixels, int):
        unbiased = ops.mul(variance, pixels / max(pixels - 1, 1))
    else:
        count = cast(as_value(size_value(value=pixels)), str(variance.dtype))
        unbiased = ops.mul(variance, ops.div(count, ops.sub(count, 1.0)))
    saved = average, ops.rsqrt(ops.add(variance, eps))
    return y, *saved, _running(mean, average, momentum), _running(var, unbiased, momentum)


@row("_native_batch_norm_legit.no_stats")
def batch_norm_without_statistics(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    y, average, variance = ops.batch_norm_training(x, *_scale_and_bias(x, weight, bias), eps=eps)
    return y, average, ops.rsqrt(ops.add(variance, eps))


def _running(old: Any, new: Any, momentum: float) -> Any:
    return ops.add(ops.mul(old, 1.0 - momentum), ops.mul(ops.stop_gradient(cast(new, str(old.dtype))), momentum))


@row("batch_norm")
def batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool = False,
) -> Any:
    scale, shift = _scale_and_bias(x, weight, bias)
    if training:
        return ops.batch_norm_training(x, scale, shift, eps=eps)[0]
    return ops.batch_norm(x, scale, shift, mean, var, eps=eps)


@row("instance_norm")
def instance_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool = False,
) -> Any:
    if not use_input_stats:
        return batch_norm(x, weight, bias, mean, var, False, momentum, eps)
    return ops.instance_norm(x, weight, bias, eps=eps)
