"""Normalizations. Statistics are formed in float32 whatever the dtype of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.base import ShapeError, Size, mod, product
from mithril.ir import Axes, Axis, composite, per_input, positive, sample
from mithril.ops.elementwise import rsqrt, square
from mithril.ops.reduction import mean, sized, sum
from mithril.ops.shape import reshape
from mithril.ops.upcast import down, up


def _leading(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """The axes that are not normalized over."""
    return tuple(k for k in range(len(x.shape)) if k not in axes)


def _scaled(y: Any, scale: Any, bias: Any) -> Any:
    if scale is not None:
        y = y * up(scale)
    return y if bias is None else y + up(bias)


def _expect_parameter(name: str, given: Any, shape: tuple[Size, ...]) -> None:
    if given is not None and tuple(given.shape) != tuple(shape):
        raise ShapeError(f"'{name}' has shape {list(given.shape)}, expected {list(shape)}")


@composite(
    promotes="float",
    flops=per_input(8),
    tolerance=4.0,
    samples=[
        sample((3, 5), (5,), (5,)),
        sample((2, 3, 4), (3, 4), (3, 4), axes=(1, 2), label="two axes"),
        sample((2, 3, 4), None, None, label="plain"),
        sample((2, 4), (4,), None, label="no bias"),
    ],
)
def layer_norm(x, scale=None, bias=None, *, axes: Axes = (-1,), eps: float = 1e-5):
    """x to mean 0 and variance 1 over axes, then scaled and shifted by parameters of those axes' shape."""
    assert isinstance(axes, tuple)
    for name, given in (("scale", scale), ("bias", bias)):
        _expect_parameter(name, given, tuple(x.shape[k] for k in axes))
    z = up(x)
    center = z - mean(z, axis=axes, keepdims=True)
    spread = rsqrt(mean(square(center), axis=axes, keepdims=True) + eps)
    return down(_scaled(center * spread, _spanning(scale, x, axes), _spanning(bias, x, axes)), x)


def _spanning(p: Any, x: Any, axes: Sequence[int]) -> Any:
    """A parameter of the axes' shape, shaped so that it broadcasts against x."""
    if p is None or tuple(axes) == tuple(range(len(x.shape) - len(axes), len(x.shape))):
        return p
    return reshape(p, shape=tuple(x.shape[k] if k in axes else 1 for k in range(len(x.shape))))


@layer_norm.vjp
def _(g, y, x, scale, bias, *, axes, eps):
    z, c = up(x), up(g)
    center = z - mean(z, axis=axes, keepdims=True)
    spread = rsqrt(mean(square(center), axis=axes, keepdims=True) + eps)
    normal = center * spread
    span = _spanning(scale, x, axes)
    t = c if span is None else c * up(span)
    gx = spread * (t - mean(t, axis=axes, keepdims=True) - normal * mean(t * normal, axis=axes, keepdims=True))
    lead = _leading(x, axes)
    gs = None if scale is None else down(_total(c * normal, lead), scale)
    gb = None if bias is None else down(_total(c, lead), bias)
    return down(gx, x), gs, gb


def _total(x: Any, axes: tuple[int, ...]) -> Any:
    return sum(x, axis=axes) if axes else x


@composite(
    promotes="float",
    flops=per_input(5),
    tolerance=4.0,
    samples=[sample((3, 5), (5,)), sample((2, 3, 4), None, label="plain"), sample((3, 2), (3,), axis=0, label="axis")],
)
def rms_norm(x, scale=None, *, axis: Axis = -1, eps: float = 1e-6):
    """x over its root mean square along an axis, then scaled."""
    _expect_parameter("scale", scale, (x.shape[axis],))
    z = up(x)
    y = z * rsqrt(mean(z * z, axis=axis, keepdims=True) + eps)
    return down(_scaled(y, _spanning(scale, x, (axis,)), None), x)


@rms_norm.vjp
def _(g, y, x, scale, *, axis, eps):
    z, c = up(x), up(g)
    spread = rsqrt(mean(z * z, axis=axis, keepdims=True) + eps)
    normal = z * spread
    span = _spanning(scale, x, (axis,))
    t = c if span is None else c * up(span)
    gx = spread * (t - normal * mean(t * normal, axis=axis, keepdims=True))
    gs = None if scale is None else down(_total(c * normal, _leading(x, (axis,))), scale)
    return down(gx, x), gs


# -- over the batch -----------------------------------------------------------------------------------------------
def _per_channel(p: Any, x: Any) -> Any:
    """A parameter of one number per channel, broadcasting against [batch, channels, ...]."""
    return p if p is None or len(x.shape) == 2 else reshape(p, shape=(p.shape[0], *[1] * (len(x.shape) - 2)))


def _channels(x: Any, **parameters: Any) -> None:
    if len(x.shape) < 2:
        raise ShapeError(f"batch norm needs [batch, channels, ...], got rank {len(x.shape)}")
    for name, p in parameters.items():
        _expect_parameter(name, p, (x.shape[1],))


@composite(
    promotes="float",
    flops=per_input(4),
    samples=[
        sample((2, 3, 4), (3,), (3,), (3,), positive((3,))),
        sample((4, 3), (3,), (3,), (3,), positive((3,)), label="2d"),
    ],
)
def batch_norm(x, scale, bias, mean, var, *, eps: float = 1e-5):
    """x by given statistics per channel (axis 1): what inference does."""
    _channels(x, scale=scale, bias=bias, mean=mean, var=var)
    factor = up(scale) * rsqrt(up(var) + eps)
    shift = up(bias) - up(mean) * factor
    return down(up(x) * _per_channel(factor, x) + _per_channel(shift, x), x)


@composite(
    promotes="float",
    results=("y", "mean", "var"),
    flops=per_input(8),
    tolerance=4.0,
    samples=[sample((3, 2, 4), (2,), (2,)), sample((5, 3), (3,), (3,), label="2d")],
)
def batch_norm_training(x, scale, bias, *, eps: float = 1e-5):
    """x to mean 0 and variance 1 per channel over the batch; also the batch's mean and (population) variance."""
    _channels(x, scale=scale, bias=bias)
    axes = _leading(x, (1,))
    z = up(x)
    average = mean(z, axis=axes, keepdims=True)
    center = z - average
    variance = mean(square(center), axis=axes, keepdims=True)
    y = center * rsqrt(variance + eps) * up(_per_channel(scale, x)) + up(_per_channel(bias, x))
    channels = (x.shape[1],)
    return down(y, x), down(reshape(average, shape=channels), scale), down(reshape(variance, shape=channels), scale)


@batch_norm_training.vjp
def _(g, y, x, scale, bias, *, eps):
    """The statistics are part of the graph: their cotangents flow into x as well."""
    gy, gm, gv = (up(c) for c in g)
    axes = _leading(x, (1,))
    z = up(x)
    center = z - mean(z, axis=axes, keepdims=True)
    spread = rsqrt(mean(square(center), axis=axes, keepdims=True) + eps)
    normal = center * spread
    t = gy * up(_per_channel(scale, x))
    gx = spread * (t - mean(t, axis=axes, keepdims=True) - normal * mean(t * normal, axis=axes, keepdims=True))
    count = sized(product(x.shape[k] for k in axes), z.dtype)
    gx = gx + (_per_channel(gm, x) + center * _per_channel(gv, x) * 2.0) / count
    return down(gx, x), down(sum(gy * normal, axis=axes), scale), down(sum(gy, axis=axes), bias)


@composite(
    promotes="float",
    flops=per_input(8),
    tolerance=4.0,
    samples=[sample((2, 4, 3), (4,), (4,), groups=2), sample((1, 6, 2, 2), (6,), (6,), groups=3, label="2d")],
)
def group_norm(x, scale=None, bias=None, *, groups: int, eps: float = 1e-5):
    """x to mean 0 and variance 1 over groups of channels of each sample."""
    _channels(x, scale=scale, bias=bias)
    if groups < 1 or mod(x.shape[1], groups) != 0:
        raise ShapeError(f"{x.shape[1]} channels do not divide into {groups} groups")
    rest = product((x.shape[1] // groups, *x.shape[2:]))
    z = reshape(up(x), shape=(x.shape[0], groups, rest))
    normal = reshape(layer_norm(z, eps=eps), shape=tuple(x.shape))
    return down(_scaled(normal, _per_channel(scale, x), _per_channel(bias, x)), x)


@composite(
    promotes="float",
    flops=per_input(8),
    tolerance=4.0,
    samples=[sample((2, 3, 5), (3,), (3,)), sample((2, 3, 2, 3), None, None, label="plain")],
)
def instance_norm(x, scale=None, bias=None, *, eps: float = 1e-5):
    """x to mean 0 and variance 1 over the positions of each sample and channel."""
    _channels(x, scale=scale, bias=bias)
    axes = tuple(range(2, len(x.shape)))
    if not axes:
        raise ShapeError("instance norm needs [batch, channels, positions ...], got rank 2")
    normal = layer_norm(up(x), axes=axes, eps=eps)
    return down(_scaled(normal, _per_channel(scale, x), _per_channel(bias, x)), x)


@composite(promotes="float", flops=per_input(4), samples=[sample((3, 4)), sample((3, 4), axis=0, label="axis")])
def normalize(x, *, axis: Axis = -1, eps: float = 1e-12):
    """x over its Euclidean length along an axis."""
    from mithril.ops.elementwise import maximum, sqrt

    z = up(x)
    return down(z / maximum(sqrt(sum(z * z, axis=axis, keepdims=True)), eps), x)
