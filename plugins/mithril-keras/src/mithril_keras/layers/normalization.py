"""Batch, layer, group, RMS and unit normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril import ops
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor
from mithril_keras.weights import Weights


@layer("BatchNormalization", masks="pass")
def batch_normalization(
    weights: Weights,
    x: Tensor,
    *,
    axis: int | Sequence[int] = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    renorm: bool = False,
    renorm_momentum: float = 0.99,
    mask: Any = None,
) -> Tensor:
    """Return batch norm; the statistics are states, updated in training unless the layer is frozen."""
    del renorm_momentum
    if renorm or (weights.training and (mask is not None or x.mask is not None)):
        raise weights.unsupported("renorm=True, or a mask in training")
    rank = x.rank
    axis = (axis if isinstance(axis, int) else axis[0]) % rank
    last = axis == rank - 1 and rank > 2
    v = weights.cast(x.first if last else x.value)
    order = (0, axis, *(k for k in range(1, rank) if k != axis))
    transposed = not last and axis != 1
    v = ops.transpose(v, perm=order) if transposed else v
    shape = (v.shape[1],)
    gamma = weights.param("gamma", shape) if scale else ops.full(shape=shape, value=1.0, dtype=weights.dtype)
    beta = weights.param("beta", shape) if center else ops.full(shape=shape, value=0.0, dtype=weights.dtype)
    mean, var = weights.state("moving_mean", shape), weights.state("moving_variance", shape)
    if weights.training and weights.trainable:
        y, batch_mean, batch_var = ops.batch_norm_training(v, gamma, beta, eps=epsilon)
        for name, old, new in (("moving_mean", mean, batch_mean), ("moving_variance", var, batch_var)):
            average = old * momentum + ops.cast(new, dtype=old.dtype) * (1.0 - momentum)
            weights.update(name, ops.cast(average, dtype=old.dtype))
    else:
        y = ops.batch_norm(v, gamma, beta, weights.cast(mean), weights.cast(var), eps=epsilon)
    if transposed:
        y = ops.transpose(y, perm=tuple(order.index(k) for k in range(rank)))
    return Tensor(first=y) if last else Tensor(y)


def _axes(axis: int | Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(sorted((a % rank) for a in ([axis] if isinstance(axis, int) else axis)))


def _broadcast(p: Any, axes: tuple[int, ...], rank: int) -> Any:
    """Return a parameter of these axes with ones for the others, unless the axes are the last."""
    if axes == tuple(range(rank - len(axes), rank)):
        return p
    sizes = iter(p.shape)
    return ops.reshape(p, shape=tuple(next(sizes) if k in axes else 1 for k in range(rank)))


@layer("LayerNormalization", masks="pass")
def layer_normalization(
    weights: Weights,
    x: Tensor,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    rms_scaling: bool = False,
) -> Tensor:
    """Return layer norm over axes."""
    v = weights.cast(x.value)
    rank = len(v.shape)
    axes = _axes(axis, rank)
    shape = tuple(v.shape[a] for a in axes)
    gamma = weights.param("gamma", shape) if scale else None
    beta = weights.param("beta", shape) if center and not rms_scaling else None
    if rms_scaling:
        variance = ops.mean(ops.square(v), axis=axes, keepdims=True)
        y = v * ops.rsqrt(variance + epsilon)
        return Tensor(y if gamma is None else y * _broadcast(gamma, axes, rank))
    if axes == tuple(range(rank - len(axes), rank)):
        return Tensor(ops.layer_norm(v, gamma, beta, axes=axes, eps=epsilon))
    y = ops.layer_norm(v, axes=axes, eps=epsilon)
    y = y if gamma is None else y * _broadcast(gamma, axes, rank)
    return Tensor(y if beta is None else y + _broadcast(beta, axes, rank))


@layer("RMSNormalization")
def rms_normalization(weights: Weights, x: Tensor, *, axis: int | Sequence[int] = -1, epsilon: float = 1e-6) -> Tensor:
    """Return division by the root mean square over axes."""
    v = weights.cast(x.value)
    rank = len(v.shape)
    axes = _axes(axis, rank)
    w = weights.param("scale", tuple(v.shape[a] for a in axes))
    if axes == (rank - 1,):
        return Tensor(ops.rms_norm(v, w, eps=epsilon))
    y = v * ops.rsqrt(ops.mean(ops.square(v), axis=axes, keepdims=True) + epsilon)
    return Tensor(y * _broadcast(w, axes, rank))


@layer("GroupNormalization", masks="pass")
def group_normalization(
    weights: Weights,
    x: Tensor,
    *,
    groups: int = 32,
    axis: int = -1,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
) -> Tensor:
    """Return norm over groups of channels, the last axis or the first after the batch."""
    axis %= x.rank
    if axis not in (1, x.rank - 1):
        raise weights.unsupported(f"axis={axis}", "use the last axis, or the first after the batch")
    last = axis == x.rank - 1
    v = weights.cast(x.first if last else x.value)
    channels = v.shape[1]
    gamma = weights.param("gamma", (channels,)) if scale else None
    beta = weights.param("beta", (channels,)) if center else None
    y = ops.group_norm(v, gamma, beta, groups=channels if groups == -1 else groups, eps=epsilon)
    return Tensor(first=y) if last else Tensor(y)


@layer("UnitNormalization", masks="pass")
def unit_normalization(weights: Weights, x: Tensor, *, axis: int | Sequence[int] = -1) -> Tensor:
    """Return division by the Euclidean norm over axes."""
    v = weights.cast(x.value)
    total = ops.sum(ops.square(v), axis=_axes(axis, len(v.shape)), keepdims=True)
    return Tensor(v * ops.rsqrt(ops.maximum(total, 1e-24)))


@layer("LayerScale")
def layer_scale(weights: Weights, x: Tensor, *, projection_dim: int, init_values: float = 0.0) -> Tensor:
    """Return the product with a factor per channel, of ConvNeXt."""
    del init_values
    return Tensor(x.value * weights.param("gamma", (projection_dim,)))
