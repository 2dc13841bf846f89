"""A mesh of devices with named axes, and the layout of one tensor on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

DATA, MODEL = "data", "model"
Split = tuple[str | None, ...]  # for each axis of a tensor the mesh axis that divides it

# Of axes that became one, an inner one may be split: "data%6" divides each of six blocks of an axis over ``data``.
BLOCKS = "%"


def base(axis: str) -> str:
    """The mesh axis of an entry of a split."""
    return axis.partition(BLOCKS)[0]


def blocks(axis: str) -> int:
    """How many blocks of a tensor's axis are divided one by one; 1 where the axis is divided as it is."""
    return int(axis.partition(BLOCKS)[2] or 1)


def in_blocks(axis: str, count: int) -> str:
    """The entry of a split for an axis of ``count`` times as many blocks."""
    count *= blocks(axis)
    return f"{base(axis)}{BLOCKS}{count}" if count > 1 else base(axis)


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, outermost first."""

    axes: Mapping[str, int]

    @property
    def devices(self) -> int:
        return prod(self.axes.values())

    def size(self, axis: str | None) -> int:
        """Devices along an axis; 1 for None and for an axis that the mesh does not have."""
        return 1 if axis is None else self.axes.get(base(axis), 1)

    def divides(self, axis: str | None, length: int) -> bool:
        return length % self.size(axis) == 0

    def local(self, shape: Iterable[int], split: Split) -> tuple[int, ...]:
        """The shape of one device's part."""
        return tuple(-(-n // self.size(a)) for n, a in zip(shape, split, strict=True))

    @property
    def description(self) -> str:
        """For messages: ``data=4 x model=2 (8 devices)``."""
        return f"{self} ({self.devices} device{'' if self.devices == 1 else 's'})"

    def __str__(self) -> str:
        return " x ".join(f"{axis}={n}" for axis, n in self.axes.items())


def replicated(rank: int) -> Split:
    """Every device has all of it."""
    return (None,) * rank
