"""Sparse tensors of a file, with all their elements.

A level of the tree of elements is dense, or lists the positions that it has; levels behind the axes are blocks of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mithril.graph import InputError
from mithril_tflite.flatbuffer import Array, Table

INDEX_KINDS = {1: "i4", 2: "u2", 3: "u1"}


@dataclass(frozen=True, eq=False)
class Level:
    """A level: dense of a size, or the first index of each parent (``segments``) and the positions of all."""

    size: int
    segments: Array | None
    indices: Array | None


@dataclass(frozen=True, eq=False)
class Sparsity:
    """The order of levels by axis; axes from the rank on are blocks of the axes in ``blocks``."""

    order: tuple[int, ...]
    blocks: tuple[int, ...]
    levels: tuple[Level, ...]


def sparsity(table: Table) -> Sparsity:
    return Sparsity(table.numbers(0, "i4"), table.numbers(1, "i4"), tuple(_level(level) for level in table.tables(2)))


def _level(t: Table) -> Level:
    if not t.number(0, "b"):
        return Level(t.number(1, "i"), None, None)
    vectors = []
    for kind_slot in (2, 4):
        kind, values = t.number(kind_slot, "B"), t.table(kind_slot + 1)
        if kind not in INDEX_KINDS or values is None:
            raise t.reader.damaged(f"a sparse tensor has positions of the type {kind}")
        vectors.append(values.array(0, INDEX_KINDS[kind]).astype(np.int64))
    return Level(0, *vectors)


def dense(raw: Array, shape: Sequence[int], s: Sparsity, name: str) -> Array:
    """Return all elements of a sparse tensor, whose stored elements are ``raw``."""
    rank, count = len(shape), math.prod(shape)
    if sorted(s.order) != list(range(len(s.levels))) or len(s.levels) != rank + len(s.blocks):
        raise _damaged(name)
    sizes = {axis: level.size for axis, level in zip(s.order, s.levels, strict=True)}
    places, coordinates = np.zeros(1, np.int64), dict[int, Array]()
    for axis, level in zip(s.order, s.levels, strict=True):
        if level.segments is None or level.indices is None:
            if level.size < 0 or places.size * level.size > count:
                raise _damaged(name)
            counts = np.full(places.size, level.size)
            index = np.tile(np.arange(level.size), places.size)
            places = np.repeat(places * level.size, level.size) + index
        else:
            starts, counts = level.segments[places], np.diff(level.segments)[places]
            if counts.sum() > count or counts.min(initial=0) < 0:
                raise _damaged(name)
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            places = np.repeat(starts, counts) + within
            index = level.indices[places]
        coordinates = {a: np.repeat(c, counts) for a, c in coordinates.items()} | {axis: index}
    for block, axis in enumerate(s.blocks, rank):
        coordinates[axis] = coordinates[axis] * sizes[block] + coordinates.pop(block)
    out = np.zeros(tuple(shape), raw.dtype)
    out[tuple(coordinates[axis] for axis in range(rank))] = raw[places]
    return out


def _damaged(name: str) -> InputError:
    return InputError(f"the sparse tensor '{name}' is damaged", facts=["its levels do not fit its shape"])
