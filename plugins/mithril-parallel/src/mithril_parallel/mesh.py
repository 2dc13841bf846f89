"""A mesh of devices with named axes, and the split of one tensor over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

DATA, MODEL, PIPELINE, CONTEXT = "data", "model", "pipeline", "context"
Split = tuple[str | None, ...]  # for each axis of a tensor the mesh axis that divides it

# When a reshape merges axes, an inner one may be split: "data%6" divides each of six blocks of the axis over ``data``.
BLOCKS = "%"


def base(axis: str) -> str:
    """Return the mesh axis of an entry of a split."""
    return axis.partition(BLOCKS)[0]


def blocks(axis: str) -> int:
    """Return the number of blocks that are divided separately; 1 if the axis is divided directly."""
    return int(axis.partition(BLOCKS)[2] or 1)


def in_blocks(axis: str, count: int) -> str:
    """Return the entry of a split for an axis of ``count`` times as many blocks."""
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
        """Return the number of devices along an axis; 1 for None and for an axis that the mesh does not have."""
        return 1 if axis is None else self.axes.get(base(axis), 1)

    def divides(self, axis: str | None, length: int) -> bool:
        return length % self.size(axis) == 0

    def local(self, shape: Iterable[int], split: Split) -> tuple[int, ...]:
        """Return the shape of one device's part."""
        return tuple(-(-n // self.size(a)) for n, a in zip(shape, split, strict=True))

    @property
    def description(self) -> str:
        """The mesh with its number of devices, for messages: ``data=4 x model=2 (8 devices)``."""
        return f"{self} ({self.devices} device{'' if self.devices == 1 else 's'})"

    def __str__(self) -> str:
        return " x ".join(f"{axis}={n}" for axis, n in self.axes.items())


def replicated(rank: int) -> Split:
    """Return the split of a tensor that every device holds completely."""
    return (None,) * rank
