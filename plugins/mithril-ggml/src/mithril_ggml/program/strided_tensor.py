"""Where values live: pieces of memory, and strided views of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.graph import DType
from mithril_ggml.library.quant_types import QuantType

Shape = tuple[int, ...]
_NOTHING = np.empty(1, np.uint8)


@dataclass(eq=False)
class Storage:
    """A piece of memory. ``role``: planned (a place in the arena), given (by the caller), fixed (``array``),
    result (an array of its own that the caller gets)."""

    size: int
    role: str = "planned"
    name: str = ""
    array: np.ndarray[Any, Any] | None = None
    start: int = -1  # the step that first writes
    end: int = -1  # the last step that reads or writes
    offset: int = 0
    merged: Storage | None = None  # whose memory this took over
    address: int = 0

    @property
    def root(self) -> Storage:
        root = self
        while root.merged is not None:
            root = root.merged
        return root


@dataclass(eq=False)
class Tensor:
    """A strided view of a storage. ``scalar`` is its value where that is known when the program is made."""

    storage: Storage
    shape: Shape
    strides: Shape  # in bytes
    dtype: DType
    offset: int = 0
    scalar: float | int | bool | None = None
    packed: QuantType | None = None  # rows of a quantized kind instead of elements of the dtype
    repacked: bool = False  # interleaved for the processor

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def dense(self) -> bool:
        """Whether the elements are contiguous."""
        return (
            self.packed is not None
            or self.size == 0
            or all(n == 1 or s == w for n, s, w in zip(self.shape, self.strides, row_strides(self.shape, self.dtype)))
        )

    @property
    def covers_storage(self) -> bool:
        """Whether it is all of its storage."""
        return self.offset == 0 and self.dense and self.size * self.dtype.itemsize == self.storage.size

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for equal views of the same memory."""
        return (self.storage.root, self.offset, self.shape, self.strides, self.dtype, self.packed, self.repacked)

    def model(self) -> np.ndarray[Any, Any]:
        """Return an array with the same shape and strides, without usable elements."""
        return np.lib.stride_tricks.as_strided(_NOTHING.view(), self.shape, self.strides, writeable=False)

    def view(self, shape: Shape, strides: Shape, offset: int = 0) -> Tensor:
        return Tensor(self.storage, shape, strides, self.dtype, self.offset + offset)

    def transposed(self, perm: Shape) -> Tensor:
        return self.view(tuple(self.shape[k] for k in perm), tuple(self.strides[k] for k in perm))

    def in_memory_order(self) -> tuple[Tensor, Shape] | None:
        """Return the tensor with axes in memory order and the inverse order, or None if it is not dense."""
        order = tuple(sorted(range(self.rank), key=lambda k: (-self.strides[k], k)))
        reordered = self.transposed(order)
        if self.scalar is not None or not reordered.dense:
            return None
        return reordered, tuple(order.index(k) for k in range(self.rank))

    def reshaped(self, shape: Shape) -> Tensor | None:
        """Return a view with another shape, or None if that requires a copy."""
        if shape == self.shape:
            return self
        if self.dense:
            return self.view(shape, row_strides(shape, self.dtype))
        strides = _reshaped_strides(self, shape)
        return None if strides is None else self.view(shape, strides)

    def expanded(self, shape: Shape) -> Tensor:
        """Broadcast by strides of 0."""
        extra = len(shape) - self.rank
        axes = zip(self.shape, self.strides, shape[extra:])
        strides = (0,) * extra + tuple(0 if n == 1 and w != 1 else s for n, s, w in axes)
        return self.view(shape, strides)

    def core(self) -> Tensor:
        """Return the tensor with broadcast axes (stride 0) reduced to size 1."""
        shape = tuple(1 if s == 0 else n for n, s in zip(self.shape, self.strides))
        return self if shape == self.shape else self.view(shape, self.strides)


def row_strides(shape: Shape, dtype: DType) -> Shape:
    """Strides of a C array."""
    out, step = [], dtype.itemsize
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def _reshaped_strides(t: Tensor, shape: Shape) -> Shape | None:
    """NumPy knows when a view can be reshaped in place."""
    try:
        return np.reshape(t.model(), shape, copy=False).strides
    except (ValueError, TypeError):  # it cannot, or this NumPy does not know ``copy``
        return None


def simplified(*tensors: Tensor) -> list[Tensor]:
    """Merge adjacent axes where all views allow it; drop axes of size 1.

    The shapes must be equal, apart from axes where some have size 1.
    """
    rank = tensors[0].rank
    full = [max(t.shape[k] for t in tensors) for k in range(rank)]
    axes = [k for k in range(rank) if full[k] != 1]
    shapes: list[list[int]] = [[] for _ in tensors]
    strides: list[list[int]] = [[] for _ in tensors]
    for k in axes:
        mergeable = bool(shapes[0]) and all(
            (t.shape[k] == 1 and s[-1] == 1)
            or (t.shape[k] == full[k] and s[-1] > 1 and st[-1] == t.strides[k] * full[k])
            for t, s, st in zip(tensors, shapes, strides)
        )
        for t, s, st in zip(tensors, shapes, strides):
            if mergeable:
                s[-1] *= t.shape[k]
                st[-1] = t.strides[k]
            else:
                s.append(t.shape[k])
                st.append(t.strides[k])
    return [t.view(tuple(s), tuple(st)) for t, s, st in zip(tensors, shapes, strides)]
