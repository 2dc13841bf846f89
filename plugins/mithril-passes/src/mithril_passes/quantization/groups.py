"""4-bit weights in groups: codebooks, and quantized values with the scales that lose least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
BLOCK = 1 << 18  # weights that are encoded at a time, so that copies stay in the cache
ROUNDS = 2  # of quantized values for a scale, and of the scale for these quantized values
MAX_LOSS = 0.01  # of a scale by its rounding to float16

# sixteen numbers each, in the order of the quantized values
CODEBOOKS: Mapping[str, tuple[float, ...]] = {
    "int4": tuple(float(n) for n in range(-8, 8)),
    # quantiles of the normal distribution (Dettmers et al., QLoRA, appendix E)
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    # ggml's
    "iq4_nl": (
        -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
    ),
    # FP4 E2M1 of the OCP Microscaling specification; scales are powers of two
    "mxfp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}  # fmt: skip
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Encoded:
    """Operands of ``dequantize_groups``."""

    quantized: Array  # uint8 [n, k / 2]
    table: Array
    scale: Array  # [n, k / group]

    @property
    def nbytes(self) -> int:
        return int(self.quantized.nbytes + self.scale.nbytes)


def table_of(codebook: str, is_integral: bool = False) -> Array:
    """Return the numbers of a codebook; integers if they multiply bytes, so that sums are exact."""
    table = np.array(CODEBOOKS[codebook], np.float32)
    if is_integral and codebook == "nf4":
        table = np.rint(table * 127).astype(np.float32)
    return table


def encode(weights: Array, codebook: str, group: int, is_integral: bool = False) -> Encoded:
    """Return the quantized values of a matrix [n, k], whose rows are whole groups."""
    n, k = weights.shape
    table = table_of(codebook, is_integral)
    order = np.argsort(table, kind="stable").astype(np.uint8)
    numbers = table[order]
    quantized, scale = np.empty((n, k // 2), np.uint8), np.empty((n, k // group), np.float32)
    step = max(1, BLOCK // k)
    for first in range(0, n, step):
        part = slice(first, first + step)
        w = np.asarray(weights[part], np.float32).reshape(-1, group)
        s = _power_of_two(w) if codebook == "mxfp4" else _fitted(w, numbers)
        positions = _nearest(w, s, numbers)
        pairs = order[positions].reshape(len(weights[part]), k // 2, 2)
        quantized[part] = pairs[..., 0] | pairs[..., 1] << 4
        scale[part] = s.reshape(-1, k // group)
    result = Encoded(quantized, table, scale.astype(np.float16) if _fits_half(scale) else scale)
    for array in (result.quantized, result.table, result.scale):
        array.setflags(write=False)  # programs for other sizes share them
    return result


def _fitted(w: Array, numbers: Array) -> Array:
    """Return the scale of each group, at first by its extreme, then by least squares for the nearest values."""
    extreme = np.take_along_axis(w, np.abs(w).argmax(axis=1, keepdims=True), axis=1)
    best = extreme / (numbers[0] if -numbers[0] >= numbers[-1] else numbers[-1])
    best = _rounded(best)
    smallest = np.full_like(best, np.inf)
    scale = best
    for _ in range(ROUNDS + 1):
        coded = numbers[_nearest(w, scale, numbers)]
        lost = np.square(w - coded * scale).sum(axis=1, keepdims=True)
        best, smallest = np.where(lost < smallest, scale, best), np.minimum(lost, smallest)
        norm = np.square(coded).sum(axis=1, keepdims=True)
        fitted = (w * coded).sum(axis=1, keepdims=True) / np.where(norm > 0, norm, 1)
        scale = _rounded(np.where(norm > 0, fitted, scale))
    return np.asarray(best)


def _rounded(scale: Array) -> Array:
    """Round scales to float16 where it represents them well."""
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16).astype(np.float32)
    return np.asarray(half if np.abs(half - scale).max(initial=0) <= MAX_LOSS * np.abs(scale).max(initial=0) else scale)


def _fits_half(scale: Array) -> bool:
    with np.errstate(over="ignore"):
        return bool((scale.astype(np.float16).astype(np.float32) == scale).all())


def _power_of_two(w: Array) -> Array:
    """Return the scales that map the exponent of each group's extreme to the largest one of the quantized values."""
    top = np.abs(w).max(axis=1, keepdims=True)
    _, exponent = np.frexp(top)  # top = m * 2 ** exponent, m in [0.5, 1)
    return np.where(top > 0, np.ldexp(np.float32(1), exponent - 3), np.float32(1)).astype(np.float32)


def _nearest(w: Array, scale: Array, numbers: Array) -> Array:
    """Return the position of the nearest number, in ascending order, for each weight."""
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    x = w * inverse
    middle = (numbers[1:] + numbers[:-1]) / 2
    positions = np.zeros(w.shape, np.uint8)
    for m in middle:
        positions += x > m
    return positions
