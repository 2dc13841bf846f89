"""Weights that a process holds: of the caller, encoded, and embedded in programs; each buffer once."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from mithril.backend.arrays import EncodedWeight
from mithril.backend.memory_plan import format_bytes
from mithril.system import ArrayCache

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class HeldWeights:
    """Bytes of the buffers of weights, apart from those that are mapped from files."""

    in_memory: int
    mapped: int
    is_estimate: bool = False

    def __str__(self) -> str:
        files = f", {format_bytes(self.mapped)} mapped from files" if self.mapped else ""
        error = ", an estimate" if self.is_estimate else ""
        return f"weights {format_bytes(self.in_memory)} in memory{files}{error}"

    def with_copies(self, size: int) -> HeldWeights:
        """Return the sum with copies of weights in programs of a framework."""
        return HeldWeights(self.in_memory + size, self.mapped, True)


def held_weights(arrays: Iterable[Any]) -> HeldWeights:
    """Return the bytes of bound arrays and of constants of programs, with their quantized values and packed blocks."""
    pending = list(arrays)
    owners: dict[int, int] = {}
    mapped: dict[tuple[int, int], int] = {}
    seen: set[int] = set()
    while pending:
        x = pending.pop()
        if isinstance(x, EncodedWeight):
            pending.extend(x.parts.values())
            continue
        if id(x) in seen:
            continue
        seen.add(id(x))
        if not isinstance(x, np.ndarray):  # an array of a framework
            owners[id(x)] = x.nbytes
            continue
        pending.extend(array for result in ArrayCache.results_of(x) for array in _arrays(result))
        owner = _owner(x)
        if isinstance(owner, mmap.mmap):
            mapped[x.ctypes.data, x.nbytes] = x.nbytes
        else:
            owners[id(owner)] = owner.nbytes
    return HeldWeights(sum(owners.values()), sum(mapped.values()))


def _owner(x: Array) -> Any:
    """Return the array that owns the memory of a view, or the mapped file."""
    owner: Any = x
    while True:
        base = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
        if isinstance(base, mmap.mmap):
            return base
        if not isinstance(base, (np.ndarray, memoryview)):
            return owner
        owner = base


def _arrays(result: Any) -> Iterator[Array]:
    """Yield the arrays of a cached result: one, or the fields of a record."""
    if isinstance(result, np.ndarray):
        yield result
    elif is_dataclass(result):
        for part in fields(result):
            value = getattr(result, part.name)
            if isinstance(value, np.ndarray):
                yield value
