"""Panels of codes as NumPy arrays: packing and unpacking. ``group_tiles`` describes their layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril_cbackend.lowering.words.group_tiles import COLUMNS, GroupLayout
from mithril_tools.gguf.formats import Format, Scales

Array = np.ndarray[Any, Any]
STEP = 1 << 21  # codes that are packed at a time, so that copies stay small


@dataclass(frozen=True)
class Panels:
    """Panels as bytes, and the matrix [columns, n] that they hold."""

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
        """Return the attributes of operations of panels."""
        names = ("columns", "group", "has_offsets", "is_half", "bits", "nested")
        return {name: getattr(self, name) for name in names}

    @property
    def blocks(self) -> Array:
        """Return the bytes by panel and block of groups with the same factors."""
        layout, panels = self.layout, -(-self.columns // COLUMNS)
        return self.data.reshape(panels, -1, layout.block) if self.nested else self.data.reshape(panels, 1, -1)


def panels_of(codes: Array, scale: Array, offset: Array | None) -> Panels:
    """Pack codes [columns, n / 2], scales and offsets [columns, groups]; in float16 where that loses nothing."""
    group = codes.shape[1] * 2 // scale.shape[1]

    def read(rows: slice) -> Array:
        part = codes[rows]
        return np.stack([part & 15, part >> 4], -1).reshape(len(part), -1)

    return packed(read, group, 4, [Scales(x) for x in (scale, offset) if x is not None])


def panels_of_blocks(format: Format, data: Array, order: Array | None, unit: float) -> Panels:
    """Pack rows of blocks, perhaps in another order, for numbers that are divided by ``unit``."""
    blocks = format.blocks(data)

    def read(rows: slice) -> Array:
        return format.codes(blocks[rows if order is None else order[rows]]).reshape(-1, count)

    count = format.block * blocks.shape[1]
    heads = format.heads(blocks)
    if unit != 1.0:
        heads[0] = Scales(heads[0].numbers * np.float32(unit))
    if order is not None:
        heads = [Scales(h.codes[order], None if h.factor is None else h.factor[order]) for h in heads]
    return packed(read, format.group, format.bits, heads)


def packed(read: Callable[[slice], Array], group: int, bits: int, heads: Sequence[Scales]) -> Panels:
    """Pack the codes [rows, n] that ``read`` returns for some rows, with scales and perhaps offsets of all rows."""
    columns, count = heads[0].codes.shape
    factors = [h.factor for h in heads if h.factor is not None]
    nested = count // factors[0].shape[1] if factors else 0
    is_half = bool(nested) or all(is_exact(h.codes) for h in heads)
    layout = GroupLayout(group, len(heads) == 2, is_half, bits, nested)
    blocks = -(-columns // COLUMNS)
    result = np.zeros(blocks * layout.panel(count), np.uint8)
    panels = Panels(result, columns, group, len(heads) == 2, is_half, bits, nested)
    data = panels.blocks
    step = max(1, STEP // (COLUMNS * count * group))
    kind = np.dtype(np.int8 if nested else np.float16 if is_half else np.float32)
    for first in range(0, blocks, step):
        rows = slice(first * COLUMNS, min((first + step) * COLUMNS, columns))
        part = data[first : first + step]
        body = part[:, :, layout.factors :].reshape(len(part), part.shape[1], -1, layout.size)
        for k, head in enumerate(heads):
            if head.factor is not None:
                size = layout.factors // len(heads)
                part[:, :, k * size : (k + 1) * size] = _by_panel(head.factor[rows], len(part))
            numbers = _by_panel(head.codes[rows].astype(kind, copy=False), len(part))
            body[..., k * layout.numbers : (k + 1) * layout.numbers] = numbers.reshape(*body.shape[:3], -1)
        codes = padded(read(rows), len(part))
        if layout.upper:
            upper = upper_words(codes, layout).reshape(len(part), COLUMNS, *body.shape[1:3], 4)
            upper = upper.transpose(0, 2, 3, 1, 4).reshape(*body.shape[:3], -1)
            body[..., layout.head : layout.head + layout.upper] = upper
            codes = codes & 15
        words = in_words(codes, bits).reshape(len(part), COLUMNS, *body.shape[1:3], -1, 4).transpose(0, 2, 3, 4, 1, 5)
        body[..., layout.head + layout.upper :] = words.reshape(*body.shape[:3], -1)
    result.setflags(write=False)
    return panels


def is_exact(numbers: Array) -> bool:
    """Whether float16 represents all numbers."""
    if numbers.dtype == np.float16:
        return True
    with np.errstate(over="ignore"):
        return bool((numbers.astype(np.float16).astype(np.float32) == numbers.astype(np.float32)).all())


def padded(rows: Array, blocks: int) -> Array:
    """Append rows of zeros to complete the last panel."""
    if len(rows) == blocks * COLUMNS:
        return rows
    result = np.zeros((blocks * COLUMNS, *rows.shape[1:]), rows.dtype)
    result[: len(rows)] = rows
    return result


def _by_panel(numbers: Array, blocks: int) -> Array:
    """Return the bytes [panels, n, bytes] of numbers [columns, n], neighboring columns side by side."""
    lines = padded(numbers, blocks).reshape(blocks, COLUMNS, -1).transpose(0, 2, 1)
    return np.asarray(lines, order="C").view(np.uint8)


def in_words(codes: Array, bits: int) -> Array:
    """Return the bytes of words: codes of four bits at a distance of four, or codes plus 128."""
    if bits == 8:
        return codes.view(np.uint8) ^ np.uint8(128)
    eight = codes.reshape(len(codes), -1, 8)
    result: Array = (eight[..., :4] | eight[..., 4:] << 4).reshape(len(codes), -1)
    return result


def upper_words(codes: Array, layout: GroupLayout) -> Array:
    """Return the bytes of words of the bits after the lower four, for each group of rows of codes."""
    fours = (codes >> 4).reshape(len(codes), -1, layout.group // 4, 4)
    result: Array = np.bitwise_or.reduce(fours << _shifts(layout), axis=2)
    return result


def _shifts(layout: GroupLayout) -> Array:
    """Return the place of the upper bits of each four codes in the bytes of a word."""
    return np.arange(0, 8, layout.bits - 4, dtype=np.uint8)[:, None]


def unpacked(panels: Panels, table: Array) -> Array:
    """Return the matrix of numbers."""
    layout, part = panels.layout, panels.blocks
    body = part[:, :, layout.factors :].reshape(*part.shape[:2], -1, layout.size)
    kind = np.dtype(np.int8 if panels.nested else np.float16 if panels.is_half else np.float32)
    heads = []  # of shape [panels, blocks, groups, columns]
    for k in range(2 if panels.has_offsets else 1):
        head = body[..., k * layout.numbers : (k + 1) * layout.numbers]
        head = np.asarray(head, order="C").view(kind).astype(np.float32)
        if panels.nested:
            size = layout.factors // (2 if panels.has_offsets else 1)
            factor = np.asarray(part[:, :, k * size : (k + 1) * size], order="C").view(np.float16)
            head = head * factor[:, :, None].astype(np.float32)
        heads.append(np.moveaxis(head, -1, 1)[..., None])
    words = np.moveaxis(body[..., layout.head + layout.upper :].reshape(*body.shape[:3], -1, COLUMNS, 4), -2, 1)
    if panels.bits == 8:
        numbers = words.astype(np.float32) - 128
    else:
        numbers = table[np.stack([words & 15, words >> 4], -2)].astype(np.float32)  # in the order of the summed axis
        if table.dtype == np.uint8:
            numbers -= 128
    numbers = numbers.reshape(*words.shape[:4], -1)
    if layout.upper:
        upper = body[..., layout.head : layout.head + layout.upper].reshape(*body.shape[:3], COLUMNS, 1, 4)
        upper = np.moveaxis(upper >> _shifts(layout), -3, 1) & ((1 << layout.bits - 4) - 1)
        numbers += 16 * upper.reshape(numbers.shape)
    numbers = numbers * heads[0]
    if panels.has_offsets:
        numbers = numbers + heads[1]
    result: Array = numbers.reshape(len(part) * COLUMNS, -1)[: panels.columns]
    return result
