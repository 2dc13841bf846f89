"""Formats of blocks in GGUF files: quantized values of a few bits, and the scales of their groups.

A block has quantized values of 32 or 256 neighboring elements of a row. An element is ``numbers[value] * scale +
offset`` of its group, where scales and offsets of large blocks are quantized values as well, with a factor for the
block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SMALL, LARGE = 32, 256  # elements of a block

SIXTEEN, THIRTY_TWO, SIXTY_FOUR = (np.arange(count, dtype=np.float32) for count in (16, 32, 64))
# ggml's codebook of iq4_nl and iq4_xs, and FP4 E2M1 of the OCP Microscaling specification
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
MICROSCALING = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Scales:
    """Numbers [rows, groups]: float16 or float32, or int8 quantized values with a float16 factor for each block."""

    quantized: Array
    factor: Array | None = None  # [rows, blocks]

    @property
    def numbers(self) -> Array:
        """Return them as float32."""
        if self.factor is None:
            return self.quantized.astype(np.float32)
        factor = self.factor.astype(np.float32)
        return self.quantized * np.repeat(factor, self.quantized.shape[1] // factor.shape[1], axis=1)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.quantized if self.factor is None else self.factor).all())


@dataclass(frozen=True)
class Format:
    """A format of blocks. Its functions take the bytes of blocks, [..., bytes]."""

    name: str
    code: int  # in files
    block: int  # elements
    bytes: int
    group: int  # elements with one scale
    table: Array | None  # of numbers, consecutive integers for more than 4 bits; None: quantized values are
    quantized: Callable[[Array], Array]  # uint8, or int8 without a table; [..., elements]
    scale: Callable[[Array], Scales]
    offset: Callable[[Array], Scales] | None = None

    @property
    def bits(self) -> int:
        """Return the bits of a quantized value."""
        return 8 if self.table is None else len(self.table).bit_length() - 1

    def row(self, elements: int) -> int:
        """Return the bytes of a row."""
        return elements // self.block * self.bytes

    def blocks(self, data: Array) -> Array:
        """Return the rows [rows, bytes] by block."""
        return data.reshape(len(data), -1, self.bytes)

    def heads(self, blocks: Array) -> list[Scales]:
        """Return the scales, and the offsets if there are any."""
        return [self.scale(blocks)] + ([] if self.offset is None else [self.offset(blocks)])

    def decoded(self, data: Array) -> Array:
        """Return the float32 numbers of rows [rows, bytes]; scales of damaged files may be infinite."""
        if not data.size:
            return np.empty((len(data), data.shape[1] // self.bytes * self.block), np.float32)
        blocks = self.blocks(data)
        quantized = self.quantized(blocks).reshape(len(data), -1, self.group)
        numbers = quantized.astype(np.float32) if self.table is None else self.table[quantized]
        with np.errstate(over="ignore", invalid="ignore"):
            scale, *offset = (head.numbers[..., None] for head in self.heads(blocks))
            numbers *= scale
            for number in offset:
                numbers += number
        return numbers.reshape(len(data), -1)


def _half(start: int, sign: int = 1) -> Callable[[Array], Array]:
    """Return a function for the float16 numbers at a byte of each block."""

    def read(blocks: Array) -> Array:
        numbers = np.asarray(blocks[..., start : start + 2], order="C").view(np.float16)[..., 0]
        return numbers if sign > 0 else -numbers

    return read


def _plain(start: int) -> Callable[[Array], Scales]:
    read = _half(start)
    return lambda blocks: Scales(read(blocks))


def _factored(quantized: Callable[[Array], Array], start: int, sign: int = 1) -> Callable[[Array], Scales]:
    read = _half(start, sign)

    def scales(blocks: Array) -> Scales:
        return Scales(quantized(blocks).astype(np.int8).reshape(len(blocks), -1), read(blocks))

    return scales


def _halves(start: int) -> Callable[[Array], Array]:
    """Return a function for 4-bit quantized values, the lower halves of 16 bytes before the upper ones."""

    def read(blocks: Array) -> Array:
        q = blocks[..., start : start + 16]
        return np.concatenate([q & 15, q >> 4], -1)

    return read


def _fives(start: int) -> Callable[[Array], Array]:
    """Return a function for 5-bit quantized values, whose highest bits precede the others."""

    def read(blocks: Array) -> Array:
        high = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
        quantized: Array = _halves(start + 4)(blocks) | high << 4
        return quantized

    return read


def _powers(blocks: Array) -> Scales:
    """Return the powers of two of a byte, or nan for 255; in float16 where that holds them all."""
    exponents = blocks[..., 0].astype(np.int32) - 127
    fits = bool((exponents >= -24).all() and (exponents <= 15).all())
    powers = np.where(exponents == 128, np.float32(np.nan), np.ldexp(np.float32(1), np.minimum(exponents, 127)))
    return Scales(powers.astype(np.float16 if fits else np.float32))


def _large_halves(start: int) -> Callable[[Array], Array]:
    """Return a function for 4-bit quantized values of large blocks: 32 bytes have 64 of them."""

    def read(blocks: Array) -> Array:
        q = blocks[..., start : start + 128].reshape(*blocks.shape[:-1], 4, 32)
        quantized: Array = np.stack([q & 15, q >> 4], -2).reshape(*blocks.shape[:-1], LARGE)
        return quantized

    return read


def _q5_k(blocks: Array) -> Array:
    bits = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[..., None, 16:48] >> bits & 1).reshape(*blocks.shape[:-1], LARGE)
    quantized: Array = _large_halves(48)(blocks) | high << 4
    return quantized


def _sixes(blocks: Array, start: int) -> Array:
    """Return eight pairs of 6-bit quantized values, scales before offsets, of 12 bytes."""
    s = blocks[..., start : start + 12]
    scale = np.concatenate([s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4], -1)
    offset = np.concatenate([s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4], -1)
    quantized: Array = np.stack([scale, offset], -2)
    return quantized


def _q6_k(blocks: Array) -> Array:
    lead = blocks.shape[:-1]
    q = blocks[..., :128].reshape(*lead, 2, 64)
    low: Array = np.concatenate([q & 15, q >> 4], -1)
    high = _two_bits(blocks[..., 128:192])
    quantized: Array = low.reshape(*lead, LARGE) | high << 4
    return quantized


def _two_bits(q: Array) -> Array:
    """Return 2-bit quantized values of 64 bytes: 32 bytes have 128 of them."""
    parts = q.reshape(*q.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    quantized: Array = parts.reshape(*q.shape[:-1], LARGE)
    return quantized


def _q3_k(blocks: Array) -> Array:
    bits = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[..., None, :32] >> bits & 1).reshape(*blocks.shape[:-1], LARGE)
    quantized: Array = _two_bits(blocks[..., 32:96]) | high << 2
    return quantized


def _q3_k_scales(blocks: Array) -> Array:
    s = blocks[..., 96:108]
    low = np.concatenate([s[..., :8] & 15, s[..., :8] >> 4], -1)
    high = (s[..., None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(low.shape)
    quantized: Array = (low | high << 4).astype(np.int8) - np.int8(32)
    return quantized


def _iq4_xs(blocks: Array) -> Array:
    q = blocks[..., 8:136].reshape(*blocks.shape[:-1], 8, 16)
    return np.concatenate([q & 15, q >> 4], -1).reshape(*blocks.shape[:-1], LARGE)


def _iq4_xs_scales(blocks: Array) -> Array:
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).reshape(*blocks.shape[:-1], 8)
    high = (blocks[..., 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(low.shape)
    quantized: Array = (low | high << 4).astype(np.int8) - np.int8(32)
    return quantized


_FORMATS = [
    Format("q4_0", 2, SMALL, 18, 32, SIXTEEN - 8, _halves(2), _plain(0)),
    Format("q4_1", 3, SMALL, 20, 32, SIXTEEN, _halves(4), _plain(0), _plain(2)),
    Format("q5_0", 6, SMALL, 22, 32, THIRTY_TWO - 16, _fives(2), _plain(0)),
    Format("q5_1", 7, SMALL, 24, 32, THIRTY_TWO, _fives(4), _plain(0), _plain(2)),
    Format("q8_0", 8, SMALL, 34, 32, None, lambda b: b[..., 2:].view(np.int8), _plain(0)),
    Format("iq4_nl", 20, SMALL, 18, 32, NONLINEAR, _halves(2), _plain(0)),
    Format("mxfp4", 39, SMALL, 17, 32, MICROSCALING, _halves(1), _powers),
    Format("q2_k", 10, LARGE, 84, 16, SIXTEEN, lambda b: _two_bits(b[..., 16:80]),
           _factored(lambda b: b[..., :16] & 15, 80), _factored(lambda b: b[..., :16] >> 4, 82, -1)),
    Format("q3_k", 11, LARGE, 110, 16, SIXTEEN - 4, _q3_k, _factored(_q3_k_scales, 108)),
    Format("q4_k", 12, LARGE, 144, 32, SIXTEEN, _large_halves(16),
           _factored(lambda b: _sixes(b, 4)[..., 0, :], 0), _factored(lambda b: _sixes(b, 4)[..., 1, :], 2, -1)),
    Format("q5_k", 13, LARGE, 176, 32, THIRTY_TWO, _q5_k,
           _factored(lambda b: _sixes(b, 4)[..., 0, :], 0), _factored(lambda b: _sixes(b, 4)[..., 1, :], 2, -1)),
    Format("q6_k", 14, LARGE, 210, 16, SIXTY_FOUR - 32, _q6_k,
           _factored(lambda b: b[..., 192:208].view(np.int8), 208)),
    Format("iq4_xs", 23, LARGE, 136, 32, NONLINEAR, _iq4_xs, _factored(_iq4_xs_scales, 0)),
]  # fmt: skip
FORMATS = {f.name: f for f in _FORMATS}
BY_CODE = {f.code: f for f in _FORMATS}
OTHERS = {
    9: "q8_1",
    15: "q8_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    21: "iq3_s",
    22: "iq2_s",
    29: "iq1_m",
    34: "tq1_0",
    35: "tq2_0",
    40: "nvfp4",
    41: "q1_0",
}  # ggml's names of quantized values in files
TERNARY = (34, 35)  # quantized values of those that the ggml library decodes
