"""Helpers shared by the operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Builder, Guard, Size, Value, dtype as as_dtype


def scalar(value: float, x: Any, is_wide: bool = False) -> Any:
    """Return a number as a scalar of the dtype of x; with ``wide``, a fraction compared with integers stays one."""
    kind = as_dtype(x.dtype)
    if kind.is_integer:
        value = float(value) if is_wide and value != int(value) else int(value)
        if isinstance(value, float):
            return value
        low, high = kind.limits
        value = min(max(value, low), high)
    return Builder.current().constant(bool(value) if kind.is_bool else value, kind)


def like(value: Any, x: Any) -> Any:
    """Return a number, an array or a value of one element as a scalar of the dtype of x; None stays None."""
    if value is None or isinstance(value, Value):
        return value
    array = np.asarray(value)
    if array.ndim:
        return array.astype(as_dtype(x.dtype).numpy)
    number = array.item()
    return scalar(number, x)


def float32_or_wider(x: Any) -> Any:
    return ops.cast(x, dtype="float32") if as_dtype(x.dtype).bits < 32 else x


def int64(x: Any) -> Any:
    return ops.cast(x, dtype="int64")


def require(left: Size, relation: str, right: Size, reason: str) -> None:
    """Record a condition on sizes, which each call checks."""
    Builder.current().guards[Guard(left, relation, right, reason)] = None


def axes_of(axes: Any, rank: int) -> tuple[int, ...]:
    """Return axes as non-negative ints."""
    from mithril.graph import normalize_axis

    return tuple(normalize_axis(int(a), rank) for a in axes)


def spatial(values: Any, count: int, default: int) -> tuple[int, ...]:
    """Return an attribute with one int per spatial axis."""
    from mithril.graph import OperationError

    if not values:
        return (default,) * count
    if len(values) != count:
        raise OperationError(f"an attribute has {len(values)} entries for {count} spatial axes")
    return tuple(int(v) for v in values)
