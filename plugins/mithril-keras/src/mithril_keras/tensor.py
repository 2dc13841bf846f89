"""Values of an import: a tensor in the layout of Keras, or with the channels first, and its mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mithril import ops
from mithril.graph import Size


class Tensor:
    """A value whose channels are the last axis for Keras, stored in one or both of two layouts.

    Convolutions and pools read and return tensors with the channels first, and elementwise layers keep the layout of
    their input, so a network of them transposes images once.
    """

    def __init__(self, last: Any = None, *, first: Any = None, mask: Any = None) -> None:
        self._last, self._first, self.mask = last, first, mask

    @property
    def rank(self) -> int:
        return len((self._first if self._last is None else self._last).shape)

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape in the layout of Keras."""
        if self._last is not None:
            return tuple(self._last.shape)
        batch, channels, *sizes = self._first.shape
        return (batch, *sizes, channels)

    @property
    def dtype(self) -> Any:
        return (self._first if self._last is None else self._last).dtype

    @property
    def value(self) -> Any:
        """The value in the layout of Keras."""
        if self._last is None:
            rank = self.rank
            self._last = ops.transpose(self._first, perm=(0, *range(2, rank), 1)) if rank > 2 else self._first
        return self._last

    @property
    def first(self) -> Any:
        """The value with the channels before the other axes."""
        if self._first is None:
            rank = self.rank
            self._first = ops.transpose(self._last, perm=(0, rank - 1, *range(1, rank - 1))) if rank > 2 else self._last
        return self._first

    def with_mask(self, mask: Any) -> Tensor:
        """Return the tensor with another mask."""
        return Tensor(self._last, first=self._first, mask=mask)

    def stored(self, first: bool) -> bool:
        """Whether the value exists in this layout."""
        return (self._first if first else self._last) is not None


def elementwise(function: Callable[..., Any], *xs: Tensor) -> Tensor:
    """Apply a function of values that treats all axes the same way, in a layout that all of them have."""
    equal_ranks = len({x.rank for x in xs}) == 1
    if equal_ranks and (all(x.stored(True) for x in xs) or any(not x.stored(False) for x in xs)):
        return Tensor(first=function(*(x.first for x in xs)))
    return Tensor(function(*(x.value for x in xs)))


def channels_first(x: Tensor, data_format: str | None) -> Any:
    """Return the value with the channels first, for an operation on images."""
    return x.value if data_format == "channels_first" else x.first


def from_channels_first(y: Any, data_format: str | None) -> Tensor:
    """Return the tensor of a value with the channels first."""
    return Tensor(y) if data_format == "channels_first" else Tensor(first=y)


def pair(value: Any, count: int) -> tuple[int, ...]:
    """Return one number per axis."""
    if isinstance(value, Sequence):
        numbers = tuple(int(n) for n in value)
        if len(numbers) != count:
            raise ValueError(f"{list(numbers)} has {len(numbers)} numbers, expected {count}")
        return numbers
    return (int(value),) * count
