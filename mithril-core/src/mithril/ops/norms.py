"""Normalizations. Statistics of 16-bit floats are computed in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.graph import Axes, Axis, Builder, ShapeError, Size, composite, mod, per_input, positive, product, sample
from mithril.ops.basic import downcast, upcast
from mithril.ops.creation import full
from mithril.ops.elementwise import rsqrt, square
from mithril.ops.reduction import mean, size_as_divisor, sum
from mithril.ops.shape import reshape


def _leading(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that are not normalized."""
    return tuple(k for k in range(len(x.shape)) if k not in axes)


def _scaled(y: Any, scale: Any, bias: Any) -> Any:
    if scale is not None:
        y = y * upcast(scale)
    return y if bias is None else y + upcast(bias)


def _expect_parameter(name: str, parameter: Any, shape: tuple[Size, ...]) -> None:
    if parameter is not None and tuple(parameter.shape) != tuple(shape):
        raise ShapeError(f"'{name}' has shape {list(parameter.shape)}, expected {list(shape)}")


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
    """(x - mean) / sqrt(var + eps) * scale + bias over ``axes``; scale and bias have the sizes of these axes."""
    assert isinstance(axes, tuple)
    for name, parameter in (("scale", scale), ("bias", bias)):
        _expect_parameter(name, parameter, tuple(x.shape[k] for k in axes))
    z = upcast(x)
    center = z - mean(z, axis=axes, keepdims=True)
    spread = rsqrt(mean(square(center), axis=axes, keepdims=True) + eps)
    return downcast(
        _scaled(center * spread, _broadcast_parameter(scale, x, axes), _broadcast_parameter(bias, x, axes)), x
    )


def _broadcast_parameter(p: Any, x: Any, axes: Sequence[int]) -> Any:
    """Reshape a parameter with the sizes of ``axes`` to broadcast against x."""
    if p is None or tuple(axes) == tuple(range(len(x.shape) - len(axes), len(x.shape))):
        return p
    return reshape(p, shape=tuple(x.shape[k] if k in axes else 1 for k in range(len(x.shape))))


@layer_norm.vjp
def _(g, y, x, scale, bias, *, axes, eps):
    z, c = upcast(x), upcast(g)
    center = z - mean(z, axis=axes, keepdims=True)
    spread = rsqrt(mean(square(center), axis=axes, keepdims=True) + eps)
    normal = center * spread
    span = _broadcast_parameter(scale, x, axes)
    t = c if span is None else c * upcast(span)
    gx = spread * (t - mean(t, axis=axes, keepdims=True) - normal * mean(t * normal, axis=axes, keepdims=True))
    lead = _leading(x, axes)
    gs = None if scale is None else downcast(_total(c * normal, lead), scale)
    gb = None if bias is None else downcast(_total(c, lead), bias)
    return downcast(gx, x), gs, gb


def _total(x: Any, axes: tuple[int, ...]) -> Any:
    return sum(x, axis=axes) if axes else x


@composite(
    promotes="float",
    flops=per_input(5),
    tolerance=4.0,
    samples=[sample((3, 5), (5,)), sample((2, 3, 4), None, label="plain"), sample((3, 2), (3,), axis=0, label="axis")],
)
def rms_norm(x, scale=None, *, axis: Axis = -1, eps: float = 1e-6):
    """x / sqrt(mean(x^2) + eps) * scale along an axis."""
    _expect_parameter("scale", scale, (x.shape[axis],))
    z = upcast(x)
    y = z * rsqrt(mean(z * z, axis=axis, keepdims=True) + eps)
    return downcast(_scaled(y, _broadcast_parameter(scale, x, (axis,)), None), x)


@rms_norm.vjp
def _(g, y, x, scale, *, axis, eps):
    z, c = upcast(x), upcast(g)
    spread = rsqrt(mean(z * z, axis=axis, keepdims=True) + eps)
    normal = z * spread
    span = _broadcast_parameter(scale, x, (axis,))
    t = c if span is None else c * upcast(span)
    gx = spread * (t - normal * mean(t * normal, axis=axis, keepdims=True))
    gs = None if scale is None else downcast(_total(c * normal, _leading(x, (axis,))), scale)
    return downcast(gx, x), gs


# -- over the batch -----------------------------------------------------------------------------------------------
def _per_channel(p: Any, x: Any) -> Any:
    """Reshape a parameter with one entry per channel to broadcast against [batch, channels, ...]."""
    return p if p is None or len(x.shape) == 2 else reshape(p, shape=(p.shape[0], *[1] * (len(x.shape) - 2)))


def _channels(x: Any, **parameters: Any) -> None:
    if len(x.shape) < 2:
        raise ShapeError(f"the norm requires [batch, channels, ...], got rank {len(x.shape)}")
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
    """(x - mean) / sqrt(var + eps) * scale + bias with given statistics per channel (axis 1), for inference."""
    _channels(x, scale=scale, bias=bias, mean=mean, var=var)
    factor = upcast(scale) * rsqrt(upcast(var) + eps)
    shift = upcast(bias) - upcast(mean) * factor
    return downcast(upcast(x) * _per_channel(factor, x) + _per_channel(shift, x), x)


@composite(
    promotes="float",
    results=("y", "mean", "var"),
    flops=per_input(8),
    tolerance=4.0,
    samples=[sample((3, 2, 4), (2,), (2,)), sample((5, 3), (3,), (3,), label="2d")],
)
def batch_norm_training(x, scale, bias, *, eps: float = 1e-5):
    """``batch_norm`` with the statistics of the batch; also returns its mean and (population) variance."""
    _channels(x, scale=scale, bias=bias)
    axes = _leading(x, (1,))
    z = upcast(x)
    average = mean(z, axis=axes, keepdims=True)
    center = z - average
    variance = mean(square(center), axis=axes, keepdims=True)
    y = center * rsqrt(variance + eps) * upcast(_per_channel(scale, x)) + upcast(_per_channel(bias, x))
    channels = (x.shape[1],)
    return (
        downcast(y, x),
        downcast(reshape(average, shape=channels), scale),
        downcast(reshape(variance, shape=channels), scale),
    )


def _is_zero(c: Any) -> bool:
    """Whether a cotangent is the constant 0, as for a result that the outputs do not depend on."""
    node = next((n for n in reversed(Builder.current().nodes) if any(c is v for v in n.results)), None)
    return node is not None and node.op is full and node.attributes["value"] == 0


@batch_norm_training.vjp
def _(g, y, x, scale, bias, *, eps):
    """Add the cotangents of the statistics, which are results, to that of x."""
    gy, gm, gv = (upcast(c) for c in g)
    axes = _leading(x, (1,))
    z = upcast(x)
    center = z - mean(z, axis=axes, keepdims=True)
    spread = rsqrt(mean(square(center), axis=axes, keepdims=True) + eps)
    normal = center * spread
    t = gy * upcast(_per_channel(scale, x))
    gx = spread * (t - mean(t, axis=axes, keepdims=True) - normal * mean(t * normal, axis=axes, keepdims=True))
    if any(not _is_zero(c) for c in g[1:]):
        count = size_as_divisor(product(x.shape[k] for k in axes), z.dtype)
        gx = gx + (_per_channel(gm, x) + center * _per_channel(gv, x) * 2.0) / count
    return downcast(gx, x), downcast(sum(gy * normal, axis=axes), scale), downcast(sum(gy, axis=axes), bias)


@composite(
    promotes="float",
    flops=per_input(8),
    tolerance=4.0,
    samples=[sample((2, 4, 3), (4,), (4,), groups=2), sample((1, 6, 2, 2), (6,), (6,), groups=3, label="2d")],
)
def group_norm(x, scale=None, bias=None, *, groups: int, eps: float = 1e-5):
    """(x - mean) / sqrt(var + eps) * scale + bias, with statistics per sample and group of channels."""
    _channels(x, scale=scale, bias=bias)
    if groups < 1 or mod(x.shape[1], groups) != 0:
        raise ShapeError(f"cannot divide {x.shape[1]} channels into {groups} groups")
    rest = product((x.shape[1] // groups, *x.shape[2:]))
    z = reshape(upcast(x), shape=(x.shape[0], groups, rest))
    normal = reshape(layer_norm(z, eps=eps), shape=tuple(x.shape))
    return downcast(_scaled(normal, _per_channel(scale, x), _per_channel(bias, x)), x)


@composite(
    promotes="float",
    flops=per_input(8),
    tolerance=4.0,
    samples=[sample((2, 3, 5), (3,), (3,)), sample((2, 3, 2, 3), None, None, label="plain")],
)
def instance_norm(x, scale=None, bias=None, *, eps: float = 1e-5):
    """(x - mean) / sqrt(var + eps) * scale + bias, with statistics per sample and channel."""
    _channels(x, scale=scale, bias=bias)
    axes = tuple(range(2, len(x.shape)))
    if not axes:
        raise ShapeError("instance norm requires [batch, channels, positions ...], got rank 2")
    normal = layer_norm(upcast(x), axes=axes, eps=eps)
    return downcast(_scaled(normal, _per_channel(scale, x), _per_channel(bias, x)), x)


@composite(promotes="float", flops=per_input(4), samples=[sample((3, 4)), sample((3, 4), axis=0, label="axis")])
def normalize(x, *, axis: Axis = -1, eps: float = 1e-12):
    """x / max(|x|, eps), with the Euclidean norm along an axis."""
    from mithril.ops.elementwise import maximum, sqrt

    z = upcast(x)
    return downcast(z / maximum(sqrt(sum(z * z, axis=axis, keepdims=True)), eps), x)
