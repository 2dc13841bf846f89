"""Computing in float32 what comes in 16 bits."""

from __future__ import annotations

from typing import Any

from mithril.base import DType, dtype as as_dtype, float32
from mithril.ops.basic import cast


def kind(x: Any) -> DType:
    """The dtype of a value or an array."""
    return as_dtype(x.dtype)


def up(x: Any) -> Any:
    """16-bit floats as float32, anything else as it is."""
    return cast(x, dtype=float32) if kind(x).is_float and kind(x).bits == 16 else x


def down(y: Any, like: Any) -> Any:
    """y in the dtype of what it was computed from."""
    wanted = like if isinstance(like, DType) else kind(like)
    return y if kind(y) is wanted else cast(y, dtype=wanted)
