"""Constants and casts, which all other families use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import (
    DType,
    DTypeError,
    attribute_dtype,
    dtype as as_dtype,
    exactly,
    float32,
    number,
    op,
    same_shape,
    sample,
)


@op(shape=lambda **_: (), dtype=attribute_dtype, samples=[sample(value=2.5, dtype="float32")], axes="->", moves=True)
def constant(*, value: number, dtype: DType):
    """A scalar known at compile time."""
    return np.asarray(value, dtype=dtype.numpy)


constant.no_vjp("a constant does not depend on anything")


@op(
    flops=0,
    shape=same_shape,
    dtype=attribute_dtype,
    samples=[
        sample((2, 3), dtype="float16"),
        sample(exactly(300.0, 3e9, float("nan"), -1.5, -129.0), dtype="int8", gradient=False),
        sample(exactly(200, -129, -1, 2**31 - 1, dtype="int32"), dtype="int8", label="integers", dtypes=False),
        sample(exactly(200, -129, -1, 2**31 - 1, dtype="int32"), dtype="uint8", label="unsigned", dtypes=False),
    ],
    axes="... -> ...",
)
def cast(x, *, dtype: DType):
    """Conversion to another dtype.

    Floats to integers round towards zero and saturate; nan becomes 0. Integers wrap: high bits are discarded.
    """
    return cast_reference(x, dtype)


@cast.vjp
def _(g, y, x, *, dtype):
    return (cast(g, dtype=x.dtype) if x.dtype.is_float and dtype.is_float else None,)


def cast_reference(x: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    source = as_dtype(x.dtype)
    if dtype.is_bool:
        return np.asarray(x != 0)
    if not dtype.is_integer:
        return x.astype(dtype.numpy)
    if source.is_float:
        low, high = dtype.limits
        truncated = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
        clipped = np.clip(truncated, low, high)
        result = np.where(clipped >= float(high), 0, clipped).astype(dtype.numpy)  # float(high) may round above high
        return np.where(truncated >= float(high), np.asarray(high, dtype.numpy), result)
    return x.astype(dtype.numpy)


def _same_bits(dtypes: Sequence[DType | None], attributes: Mapping[str, Any]) -> DType:
    source, target = dtypes[0], attributes["dtype"]
    assert source is not None
    if source.bits != target.bits or source.is_bool or target.is_bool:
        raise DTypeError(f"cannot read the bits of {source} as {target}", facts=["both need the same number of bits"])
    return target


@op(
    flops=0,
    shape=same_shape,
    dtype=_same_bits,
    samples=[
        sample((2, 3), dtype="int32", dtypes=False),
        sample(exactly(1, -2, 0x3C00, dtype="int16"), dtype="float16", label="half", dtypes=False),
    ],
    axes="... -> ...",
)
def bitcast(x, *, dtype: DType):
    """The bits of the elements read as another dtype with the same number of bits."""
    return x.view(dtype.numpy)


bitcast.no_vjp("bits are not differentiable")


def dtype_of(x: Any) -> DType:
    """Return the dtype of a value or an array."""
    return as_dtype(x.dtype)


def upcast(x: Any) -> Any:
    """Cast 16-bit floats to float32; return any other value unchanged."""
    return cast(x, dtype=float32) if dtype_of(x).is_float and dtype_of(x).bits == 16 else x


def downcast(y: Any, like: Any) -> Any:
    """Cast a result to the dtype of ``like``, the operand that it was computed from."""
    dtype = like if isinstance(like, DType) else dtype_of(like)
    return y if dtype_of(y) is dtype else cast(y, dtype=dtype)


def to_float32(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert an array of 16-bit floats to float32, in which references accumulate."""
    return x.astype(np.float32) if dtype_of(x).is_float and dtype_of(x).bits == 16 else x
