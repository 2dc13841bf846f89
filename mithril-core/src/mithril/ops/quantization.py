"""Quantization: quantize, dequantize, groups of 4-bit values, and fake_quantize for quantization-aware training."""

from __future__ import annotations

from typing import Any

from mithril.graph import (
    Arr,
    Axis,
    DType,
    OperationError,
    ShapeError,
    Size,
    composite,
    exactly,
    int8,
    ints,
    positive,
    sample,
    shape_text,
    uint8,
)
from mithril.ops.basic import cast, downcast, dtype_of, upcast
from mithril.ops.elementwise import bitwise_and, clip, greater, less, logical_or, round, shift_right, where
from mithril.ops.indexing import take
from mithril.ops.reduction import sum
from mithril.ops.shape import reshape, spread, stack, unsqueeze


def _broadcast_along(p: Any, x: Any, axis: int | None) -> Any:
    """Reshape scales or zero points along an axis to broadcast against x."""
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
    """round(x / scale) + zero_point, saturating, halves to even; one scale, or one per element of an axis."""
    if not dtype.is_integer:
        raise OperationError(f"quantize requires an integer dtype, got {dtype}", hint="pass dtype='int8'")
    q = round(upcast(x) / upcast(_broadcast_along(scale, x, axis)))
    if zero_point is not None:
        q = q + cast(_broadcast_along(zero_point, x, axis), dtype=dtype_of(q))
    return cast(q, dtype=dtype)


quantize.no_vjp("its results are integers; fake_quantize has a gradient")


@composite(
    samples=[
        sample(Arr((3, 4), "int8", -128, 127), exactly(0.02, shape=())),
        sample(Arr((3, 4), "int8", -128, 127), positive((3,), 0.01, 0.1), ints((3,), -3, 3), axis=0, label="axis"),
    ]
)
def dequantize(x, scale, zero_point=None, *, axis: Axis | None = None):
    """(x - zero_point) * scale, in the dtype of the scale."""
    s = upcast(_broadcast_along(scale, x, axis))
    q = cast(x, dtype=dtype_of(s))
    if zero_point is not None:
        q = q - cast(_broadcast_along(zero_point, x, axis), dtype=dtype_of(s))
    return downcast(q * s, scale)


@composite(
    samples=[
        sample(ints((3, 4), 0, 255, "uint8"), (16,), (3, 2)),
        sample(ints((2, 8), 0, 255, "uint8"), (16,), (2, 1), (2, 1), label="offset"),
    ]
)
def dequantize_groups(packed, table, scale, offset=None):
    """table[value] * scale + offset of 4-bit values, two per byte, the lower half first; groups share a scale.

    ``packed`` [..., n / 2] are uint8 and ``table`` has 16 numbers. ``scale`` and ``offset`` are [..., groups], of equal
    parts of the last axis. The result [..., n] has the dtype of the table.
    """
    if dtype_of(packed) is not uint8 or tuple(table.shape) != (16,):
        message = (
            f"dequantize_groups requires uint8 packed values and a table of 16, got {packed.dtype} and {table.shape}"
        )
        raise OperationError(message, hint="two values are one byte, the lower half first")
    groups, length = scale.shape[-1], packed.shape[-1]
    if tuple(scale.shape[:-1]) != tuple(packed.shape[:-1]) or length % groups:
        raise ShapeError(
            f"dequantize_groups got packed values {shape_text(packed.shape)} and scales {shape_text(scale.shape)}",
            hint="scales have the axes of the packed values, the last one divided by half the size of a group",
        )
    halves = stack(bitwise_and(packed, 15), shift_right(packed, 4), axis=-1)
    by_group = reshape(halves, shape=(*scale.shape, length // groups * 2))
    numbers = upcast(take(table, cast(by_group, dtype="int32"))) * upcast(unsqueeze(scale, axis=(-1,)))
    if offset is not None:
        numbers = numbers + upcast(unsqueeze(offset, axis=(-1,)))
    return downcast(reshape(numbers, shape=(*packed.shape[:-1], length * 2)), table)


@composite(
    tolerance=64.0,  # cancellation: the gradient of the scale is a sum of rounding errors
    samples=[
        sample((3, 4), exactly(0.02, shape=())),
        sample((3, 4), positive((4,), 0.01, 0.02), axis=1, bits=4, label="axis"),
    ],
)
def fake_quantize(x, scale, *, bits: int = 8, axis: Axis | None = None):
    """x rounded to signed ``bits``-bit integers times scale; the gradient in range is a straight-through estimator."""
    if not 2 <= bits <= 16:
        raise OperationError(f"fake_quantize requires 2 to 16 bits, got {bits}")
    low, high = _range(bits)
    s = upcast(_broadcast_along(scale, x, axis))
    return downcast(clip(round(upcast(x) / s), low=low, high=high) * s, x)


def _range(bits: int) -> tuple[float, float]:
    return -float(1 << (bits - 1)), float((1 << (bits - 1)) - 1)


@fake_quantize.surrogate_vjp
def _(g, y, x, scale, *, bits, axis):
    """Return g in range, 0 outside for x; the derivative of the scale is the rounding error, or the bound outside."""
    low, high = _range(bits)
    s = upcast(_broadcast_along(scale, x, axis))
    q = upcast(x) / s
    # The largest number of a block may be a little above its scale times the largest integer.
    nearest = round(q)
    saturated = logical_or(less(nearest, low), greater(nearest, high))
    gx = where(saturated, 0.0, upcast(g))
    slope = where(saturated, clip(nearest, low=low, high=high), nearest - q)
    terms = upcast(g) * slope
    if axis is None or len(scale.shape) == 0:
        gs = reshape(sum(terms), shape=scale.shape)
    else:
        gs = sum(terms, axis=tuple(k for k in range(len(x.shape)) if k != axis))
    return downcast(gx, x), downcast(gs, scale)


@fake_quantize.vmap
def _(rows, has_rows, x, scale, *, bits, axis):
    """Use one scale per row as one scale per element of axis 0."""
    if not has_rows[1] or scale.ndim > 1:
        return NotImplemented
    return fake_quantize(x if has_rows[0] else spread(x, rows), scale, bits=bits, axis=0)
