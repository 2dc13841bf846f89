"""Upcasts: 16-bit floats computed in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril.base import DType, dtype as as_dtype, float32
from mithril.ops.basic import cast


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
