"""Packed blocks of quantized values as NumPy arrays: packing and unpacking. ``group_tiles`` describes their layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril_cbackend.lowering.int8x4.group_tiles import COLUMNS, GroupLayout
from mithril_gguf.formats import Format, Scales

Array = np.ndarray[Any, Any]
STEP = 1 << 21  # quantized values that are packed at a time, so that copies stay small


@dataclass(frozen=True)
class PackedBlocks:
    """Packed blocks as bytes, and the matrix [columns, n] that they hold."""

    data: Array
    columns: int
    group: int
    has_offsets: bool
    is_half: bool
    bits: int = 4
    nested: int = 0

    @property
    def layout(self) -> GroupLayout:
        return GroupLayout(self.group, self.has_offsets, self.is_half, self.bits, self.nested)

    @property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes of operations of packed blocks."""
        names = ("columns", "group", "has_offsets", "is_half", "bits", "nested")
        return {name: getattr(self, name) for name in names}

    @property
    def blocks(self) -> Array:
        """Return the bytes by packed block and block of groups with the same factors."""
        layout, packed_blocks = self.layout, -(-self.columns // COLUMNS)
        return (
            self.data.reshape(packed_blocks, -1, layout.block)
            if self.nested
            else self.data.reshape(packed_blocks, 1, -1)
        )


def packed_blocks_of(quantized: Array, scale: Array, offset: Array | None) -> PackedBlocks:
    """Pack quantized values [columns, n / 2], scales and offsets [columns, groups]; as float16 if that is exact."""
    group = quantized.shape[1] * 2 // scale.shape[1]

    def read(rows: slice) -> Array:
        part = quantized[rows]
        return np.stack([part & 15, part >> 4], -1).reshape(len(part), -1)

    return packed(read, group, 4, [Scales(x) for x in (scale, offset) if x is not None])


def packed_blocks_of_blocks(format: Format, data: Array, order: Array | None, unit: float) -> PackedBlocks:
    """Pack rows of blocks, perhaps in another order, for numbers that are divided by ``unit``."""
    blocks = format.blocks(data)

    def read(rows: slice) -> Array:
        return format.quantized(blocks[rows if order is None else order[rows]]).reshape(-1, count)

    count = format.block * blocks.shape[1]
    heads = format.heads(blocks)
    if unit != 1.0:
        heads[0] = Scales(heads[0].numbers * np.float32(unit))
    if order is not None:
        heads = [Scales(h.quantized[order], None if h.factor is None else h.factor[order]) for h in heads]
    return packed(read, format.group, format.bits, heads)


def packed(read: Callable[[slice], Array], group: int, bits: int, heads: Sequence[Scales]) -> PackedBlocks:
    """Pack the quantized values [rows, n] that ``read`` returns for some rows, with scales and offsets of all rows."""
    columns, count = heads[0].quantized.shape
    factors = [h.factor for h in heads if h.factor is not None]
    nested = count // factors[0].shape[1] if factors else 0
    is_half = bool(nested) or all(is_exact(h.quantized) for h in heads)
    layout = GroupLayout(group, len(heads) == 2, is_half, bits, nested)
    blocks = -(-columns // COLUMNS)
    result = np.zeros(blocks * layout.packed_block(count), np.uint8)
    packed_blocks = PackedBlocks(result, columns, group, len(heads) == 2, is_half, bits, nested)
    data = packed_blocks.blocks
    step = max(1, STEP // (COLUMNS * count * group))
    kind = np.dtype(np.int8 if nested else np.float16 if is_half else np.float32)
    for first in range(0, blocks, step):
        rows = slice(first * COLUMNS, min((first + step) * COLUMNS, columns))
        part = data[first : first + step]
        body = part[:, :, layout.factors :].reshape(len(part), part.shape[1], -1, layout.size)
        for k, head in enumerate(heads):
            if head.factor is not None:
                size = layout.factors // len(heads)
                part[:, :, k * size : (k + 1) * size] = _by_packed_block(head.factor[rows], len(part))
            numbers = _by_packed_block(head.quantized[rows].astype(kind, copy=False), len(part))
            body[..., k * layout.numbers : (k + 1) * layout.numbers] = numbers.reshape(*body.shape[:3], -1)
        quantized = padded(read(rows), len(part))
        if layout.upper:
            upper = upper_int8x4(quantized, layout).reshape(len(part), COLUMNS, *body.shape[1:3], 4)
            upper = upper.transpose(0, 2, 3, 1, 4).reshape(*body.shape[:3], -1)
            body[..., layout.head : layout.head + layout.upper] = upper
            quantized = quantized & 15
        int8x4s = (
            in_int8x4(quantized, bits).reshape(len(part), COLUMNS, *body.shape[1:3], -1, 4).transpose(0, 2, 3, 4, 1, 5)
        )
        body[..., layout.head + layout.upper :] = int8x4s.reshape(*body.shape[:3], -1)
    result.setflags(write=False)
    return packed_blocks


def is_exact(numbers: Array) -> bool:
    """Whether float16 represents all numbers."""
    if numbers.dtype == np.float16:
        return True
    # Numbers beyond float16 become infinite, which the comparison notices.
    with np.errstate(over="ignore"):
        return bool((numbers.astype(np.float16).astype(np.float32) == numbers.astype(np.float32)).all())


def padded(rows: Array, blocks: int) -> Array:
    """Append rows of zeros to complete the last packed block."""
    if len(rows) == blocks * COLUMNS:
        return rows
    result = np.zeros((blocks * COLUMNS, *rows.shape[1:]), rows.dtype)
    result[: len(rows)] = rows
    return result


def _by_packed_block(numbers: Array, blocks: int) -> Array:
    """Return the bytes [packed blocks, n, bytes] of numbers [columns, n], neighboring columns side by side."""
    lines = padded(numbers, blocks).reshape(blocks, COLUMNS, -1).transpose(0, 2, 1)
    return np.asarray(lines, order="C").view(np.uint8)


def in_int8x4(quantized: Array, bits: int) -> Array:
    """Return the bytes of int8x4 groups: values of four bits at a distance of four, or quantized values plus 128."""
    if bits == 8:
        return quantized.view(np.uint8) ^ np.uint8(128)
    eight = quantized.reshape(len(quantized), -1, 8)
    result: Array = (eight[..., :4] | eight[..., 4:] << 4).reshape(len(quantized), -1)
    return result


def upper_int8x4(quantized: Array, layout: GroupLayout) -> Array:
    """Return the bytes of int8x4 groups of the bits after the lower four, for each group of rows."""
    fours = (quantized >> 4).reshape(len(quantized), -1, layout.group // 4, 4)
    result: Array = np.bitwise_or.reduce(fours << _shifts(layout), axis=2)
    return result


def _shifts(layout: GroupLayout) -> Array:
    """Return the place of the upper bits of each four quantized values in the bytes of an int8x4 group."""
    return np.arange(0, 8, layout.bits - 4, dtype=np.uint8)[:, None]


def unpacked(packed_blocks: PackedBlocks, table: Array) -> Array:
    """Return the matrix of numbers."""
    layout, part = packed_blocks.layout, packed_blocks.blocks
    body = part[:, :, layout.factors :].reshape(*part.shape[:2], -1, layout.size)
    kind = np.dtype(np.int8 if packed_blocks.nested else np.float16 if packed_blocks.is_half else np.float32)
    heads = []  # of shape [packed blocks, blocks, groups, columns]
    for k in range(2 if packed_blocks.has_offsets else 1):
        head = body[..., k * layout.numbers : (k + 1) * layout.numbers]
        head = np.asarray(head, order="C").view(kind).astype(np.float32)
        if packed_blocks.nested:
            size = layout.factors // (2 if packed_blocks.has_offsets else 1)
            factor = np.asarray(part[:, :, k * size : (k + 1) * size], order="C").view(np.float16)
            head = head * factor[:, :, None].astype(np.float32)
        heads.append(np.moveaxis(head, -1, 1)[..., None])
    int8x4s = np.moveaxis(body[..., layout.head + layout.upper :].reshape(*body.shape[:3], -1, COLUMNS, 4), -2, 1)
    if packed_blocks.bits == 8:
        numbers = int8x4s.astype(np.float32) - 128
    else:
        numbers = table[np.stack([int8x4s & 15, int8x4s >> 4], -2)].astype(
            np.float32
        )  # in the order of the summed axis
        if table.dtype == np.uint8:
            numbers -= 128
    numbers = numbers.reshape(*int8x4s.shape[:4], -1)
    if layout.upper:
        upper = body[..., layout.head : layout.head + layout.upper].reshape(*body.shape[:3], COLUMNS, 1, 4)
        upper = np.moveaxis(upper >> _shifts(layout), -3, 1) & ((1 << layout.bits - 4) - 1)
        numbers += 16 * upper.reshape(numbers.shape)
    numbers = numbers * heads[0]
    if packed_blocks.has_offsets:
        numbers = numbers + heads[1]
    result: Array = numbers.reshape(len(part) * COLUMNS, -1)[: packed_blocks.columns]
    return result
