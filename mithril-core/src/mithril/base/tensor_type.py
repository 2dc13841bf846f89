"""The type of a value: dtype and shape."""

from __future__ import annotations

from typing import Any

from mithril.base.dims import Shape, shape_text
from mithril.base.dtypes import DType


class TensorType:
    """The static type of a value: element type and shape (ints and dims)."""

    __slots__ = ("_hash", "dtype", "is_static", "shape")

    def __init__(self, dtype: DType, shape: Shape) -> None:
        self.dtype = dtype
        self.shape = shape
        self._hash = hash((id(dtype), shape))
        self.is_static = all(type(d) is int for d in shape)

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.dtype, self.shape)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, TensorType) and self.dtype is other.dtype and self.shape == other.shape

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"{self.dtype.short}{shape_text(self.shape)}"

    def __repr__(self) -> str:
        return f"TensorType({self})"
