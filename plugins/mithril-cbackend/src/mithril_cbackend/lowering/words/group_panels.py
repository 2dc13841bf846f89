"""Panels of 4-bit codes as NumPy arrays: packing and unpacking. ``group_tiles`` describes their layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril_cbackend.lowering.words.group_tiles import COLUMNS

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Panels:
    """Panels as bytes, and the matrix [columns, n] that they hold."""

    data: Array
    columns: int
    group: int
    has_offsets: bool
    is_half: bool

    @property
    def numbers(self) -> np.dtype[Any]:
        return np.dtype(np.float16 if self.is_half else np.float32)

    @property
    def head(self) -> int:
        """Return the bytes of a group before its codes."""
        return COLUMNS * self.numbers.itemsize * (2 if self.has_offsets else 1)

    @property
    def groups(self) -> Array:
        """Return the bytes by panel and group."""
        return self.data.reshape(-(-self.columns // COLUMNS), -1, self.head + COLUMNS * self.group // 2)


def panels_of(codes: Array, scale: Array, offset: Array | None) -> Panels:
    """Pack codes [columns, n / 2], scales and offsets [columns, groups]; in float16 where that loses nothing."""
    columns, count = scale.shape
    group = codes.shape[1] * 2 // count
    heads = [scale] if offset is None else [scale, offset]
    is_half = all(is_exact(x) for x in heads)
    blocks = -(-columns // COLUMNS)
    empty = Panels(np.zeros(0, np.uint8), columns, group, offset is not None, is_half)
    result = np.zeros(blocks * count * (empty.head + COLUMNS * group // 2), np.uint8)
    data = result.reshape(blocks, count, -1)
    step = 64  # panels at a time, so that copies stay small
    for first in range(0, blocks, step):
        part = slice(first * COLUMNS, min((first + step) * COLUMNS, columns))
        target = data[first : first + step]
        for k, numbers in enumerate(heads):
            head = padded(numbers[part].astype(empty.numbers), len(target))
            head = np.asarray(head.reshape(-1, COLUMNS, count).transpose(0, 2, 1), order="C")
            size = COLUMNS * empty.numbers.itemsize
            target[:, :, k * size : (k + 1) * size] = head.view(np.uint8).reshape(len(target), count, size)
        words = padded(in_word_order(codes[part]), len(target)).reshape(-1, COLUMNS, count, group // 8, 4)
        target[:, :, empty.head :] = words.transpose(0, 2, 3, 1, 4).reshape(len(target), count, -1)
    result.setflags(write=False)
    return Panels(result, columns, group, offset is not None, is_half)


def is_exact(numbers: Array) -> bool:
    """Whether float16 represents all numbers."""
    with np.errstate(over="ignore"):
        return bool((numbers.astype(np.float16).astype(np.float32) == numbers.astype(np.float32)).all())


def padded(rows: Array, blocks: int) -> Array:
    """Append rows of zeros to complete the last panel."""
    result = np.zeros((blocks * COLUMNS, *rows.shape[1:]), rows.dtype)
    result[: len(rows)] = rows
    return result


def in_word_order(codes: Array) -> Array:
    """Return bytes of neighboring codes as bytes of codes at a distance of four."""
    low, high = (part.reshape(len(codes), -1, 4) for part in (codes & 15, codes >> 4))
    parts = [low[..., 0] | low[..., 2] << 4, high[..., 0] | high[..., 2] << 4,
             low[..., 1] | low[..., 3] << 4, high[..., 1] | high[..., 3] << 4]  # fmt: skip
    return np.stack(parts, -1).reshape(codes.shape)


def unpacked(panels: Panels, table: Array) -> Array:
    """Return the matrix of numbers."""
    groups = panels.groups
    blocks, count, _ = groups.shape
    size = COLUMNS * panels.numbers.itemsize
    heads = [
        np.asarray(groups[:, :, k * size : (k + 1) * size], order="C").view(panels.numbers).astype(np.float32)
        for k in range(2 if panels.has_offsets else 1)
    ]  # of shape [blocks, groups, columns]
    words = groups[:, :, panels.head :].reshape(blocks, count, panels.group // 8, COLUMNS, 4)
    codes = np.stack([words & 15, words >> 4], -2)  # in the order of the summed axis
    numbers = table[codes.transpose(0, 3, 1, 2, 4, 5).reshape(blocks, COLUMNS, count, panels.group)]
    if table.dtype == np.uint8:
        numbers = numbers.astype(np.float32) - 128
    numbers = numbers * heads[0].transpose(0, 2, 1)[..., None]
    if panels.has_offsets:
        numbers = numbers + heads[1].transpose(0, 2, 1)[..., None]
    result: Array = numbers.reshape(blocks * COLUMNS, -1)[: panels.columns]
    return result
