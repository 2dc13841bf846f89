"""Integers for floats: quantize, dequantize, and the pair of them that training can pass through."""

from __future__ import annotations

from typing import Any

from mithril.base import DType, OperationError, Size, int8
from mithril.ir import Arr, Axis, composite, exactly, ints, positive, sample
from mithril.ops.basic import cast
from mithril.ops.elementwise import clip, greater, less, logical_or, round, where
from mithril.ops.reduction import sum
from mithril.ops.shape import reshape, spread
from mithril.ops.upcast import down, kind, up


def _along(p: Any, x: Any, axis: int | None) -> Any:
    """A scale or zero point per element of an axis, broadcasting against x."""
    if p is None or axis is None or len(p.shape) == 0:
        return p
    shape: tuple[Size, ...] = tuple(x.shape[k] if k == axis else 1 for k in range(len(x.shape)))
    return reshape(p, shape=shape)


@composite(
    samples=[
        sample((3, 4), exactly(0.02, shape=())),
        sample((3, 4), positive((4,), 0.01, 0.1), ints((4,), -3, 3), axis=1, label="axis"),
        sample((3, 4), exactly(0.02, shape=()), exactly(128, dtype="int32", shape=()), dtype="uint8", label="uint8"),
    ]
)
def quantize(x, scale, zero_point=None, *, dtype: DType = int8, axis: Axis | None = None):
    """round(x / scale) + zero_point, halves to even, saturating; one scale, or one per element of an axis."""
    if not dtype.is_integer:
        raise OperationError(f"quantize gives integers, not {dtype}")
    q = round(up(x) / up(_along(scale, x, axis)))
    if zero_point is not None:
        q = q + cast(_along(zero_point, x, axis), dtype=kind(q))
    return cast(q, dtype=dtype)


quantize.no_vjp("integers have no gradient; fake_quantize has")


@composite(
    samples=[
        sample(Arr((3, 4), "int8", -128, 127), exactly(0.02, shape=())),
        sample(Arr((3, 4), "int8", -128, 127), positive((3,), 0.01, 0.1), ints((3,), -3, 3), axis=0, label="axis"),
    ]
)
def dequantize(x, scale, zero_point=None, *, axis: Axis | None = None):
    """(x - zero_point) * scale, in the scale's dtype."""
    wide = up(_along(scale, x, axis))
    q = cast(x, dtype=kind(wide))
    if zero_point is not None:
        q = q - cast(_along(zero_point, x, axis), dtype=kind(wide))
    return down(q * wide, scale)


@composite(
    tolerance=64.0,  # the gradient of the scale is a sum of rounding errors, which cancel
    samples=[
        sample((3, 4), exactly(0.02, shape=())),
        sample((3, 4), positive((4,), 0.01, 0.02), axis=1, bits=4, label="axis"),
    ],
)
def fake_quantize(x, scale, *, bits: int = 8, axis: Axis | None = None):
    """x on the grid of signed integers of so many bits times scale; the gradient passes straight through inside."""
    if not 2 <= bits <= 16:
        raise OperationError(f"fake_quantize takes 2 to 16 bits, got {bits}")
    low, high = _range(bits)
    wide = up(_along(scale, x, axis))
    return down(clip(round(up(x) / wide), low=low, high=high) * wide, x)


def _range(bits: int) -> tuple[float, float]:
    return -float(1 << (bits - 1)), float((1 << (bits - 1)) - 1)


@fake_quantize.surrogate_vjp
def _(g, y, x, scale, *, bits, axis):
    """x: the cotangent inside the range, 0 outside. scale: the rounding error inside, the bound outside."""
    low, high = _range(bits)
    wide = up(_along(scale, x, axis))
    q = up(x) / wide
    outside = logical_or(less(q, low), greater(q, high))
    gx = where(outside, 0.0, up(g))
    slope = where(outside, clip(q, low=low, high=high), round(q) - q)
    share = up(g) * slope
    if axis is None or len(scale.shape) == 0:
        gs = reshape(sum(share), shape=scale.shape)
    else:
        gs = sum(share, axis=tuple(k for k in range(len(x.shape)) if k != axis))
    return down(gx, x), down(gs, scale)


@fake_quantize.vmap
def _(rows, has_rows, x, scale, *, bits, axis):
    """Use one scale for each row as a scale for each element of the rows' axis."""
    if not has_rows[1] or scale.ndim > 1:
        return NotImplemented
    return fake_quantize(x if has_rows[0] else spread(x, rows), scale, bits=bits, axis=0)
