"""Portable random draws of an array or of a region of it: the same numbers for a seed and a name on every platform."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from mithril.ops.random import threefry
from mithril.system import files

Array = np.ndarray[Any, Any]
Index = tuple[slice, ...]
Numbers = Callable[[Array, Array], tuple[Array, Array]]  # two floats of each pair of words
BLOCK = 1 << 15  # pairs of words per block, sized for the cache of a core


class Draws:
    """The random numbers of one array, by name; with ``index`` those of a region, and no memory for the others.

    The number of an element depends on its position in the complete array alone, so that devices draw their own parts.
    """

    def __init__(self, seed: int, name: str, shape: tuple[int, ...], index: Index | None = None) -> None:
        words = np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
        raw = files.utf8(name)
        mark = np.array([zlib.crc32(raw)], np.uint32), np.array([zlib.adler32(raw)], np.uint32)
        self.key: Array = np.concatenate(threefry(words, *mark))
        self.seed, self.shape = seed, shape
        self.ranges = [range(n)[s] for n, s in zip(shape, index or (slice(None),) * len(shape), strict=True)]
        self.part = tuple(len(r) for r in self.ranges)  # the shape of the region

    def next(self) -> Draws:
        """Return independent draws for the same region."""
        child = object.__new__(Draws)
        child.__dict__.update(self.__dict__)
        child.key = np.concatenate(threefry(self.key, np.full(1, 0xFFFFFFFF, np.uint32), np.zeros(1, np.uint32)))
        return child

    def complete(self) -> Draws:
        """Return the same draws for the complete array."""
        copy = self.next()
        copy.key, copy.ranges, copy.part = self.key, [range(n) for n in self.shape], self.shape
        return copy

    def cut(self, array: Array) -> Array:
        """Return the region of a complete array."""
        return array.reshape(self.shape)[tuple(slice(r.start, r.stop) for r in self.ranges)]

    def uniform(self) -> Array:
        """Return 24-bit floats in [0, 1)."""
        return self._drawn(_uniform)

    def normal(self) -> Array:
        """Return normal floats, two from each pair of words (Box-Muller)."""
        return self._drawn(_normal)

    def normal_at(self, elements: Array) -> Array:
        """Return the normal floats of some elements of the flattened region."""
        return self._elements(elements, _normal)

    def _drawn(self, numbers: Numbers) -> Array:
        if self.part != self.shape:
            out = np.empty(math.prod(self.part), np.float32)
            for start in range(0, out.size, BLOCK):
                stop = min(start + BLOCK, out.size)
                out[start:stop] = self._elements(np.arange(start, stop), numbers)
            return out
        n = math.prod(self.shape)
        pairs = (n + 1) // 2
        out = np.empty((2, pairs), np.float32)
        for start in range(0, pairs, BLOCK):
            stop = min(start + BLOCK, pairs)
            out[0, start:stop], out[1, start:stop] = numbers(*self._words(np.arange(start, stop, dtype=np.uint64)))
        return out.reshape(-1)[:n]

    def _elements(self, elements: Array, numbers: Numbers) -> Array:
        if not elements.size:
            return np.empty(0, np.float32)
        place = np.unravel_index(elements, self.part)
        shifted = tuple(k + r.start for k, r in zip(place, self.ranges, strict=True))
        positions = np.ravel_multi_index(shifted, self.shape).astype(np.uint64) if self.shape else elements
        pairs = np.uint64((math.prod(self.shape) + 1) // 2)
        is_second = positions >= pairs
        first, second = numbers(*self._words(np.where(is_second, positions - pairs, positions)))
        return np.where(is_second, second, first)

    def _words(self, counts: Array) -> tuple[Array, Array]:
        return threefry(self.key, (counts >> np.uint64(32)).astype(np.uint32), counts.astype(np.uint32))


def _uniform(a: Array, b: Array) -> tuple[Array, Array]:
    scale = np.float32(2.0**-24)
    return (a >> np.uint32(8)).astype(np.float32) * scale, (b >> np.uint32(8)).astype(np.float32) * scale


def _normal(a: Array, b: Array) -> tuple[Array, Array]:
    scale, turn = np.float32(2.0**-24), np.float32(2.0**-24 * 2 * math.pi)
    radius = np.sqrt(np.float32(-2) * np.log(((a >> np.uint32(8)) + np.uint32(1)).astype(np.float32) * scale))
    angle = (b >> np.uint32(8)).astype(np.float32) * turn
    return radius * np.cos(angle), radius * np.sin(angle)
