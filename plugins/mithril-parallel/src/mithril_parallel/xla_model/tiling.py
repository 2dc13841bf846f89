"""Sizes of arrays in a TPU's memory: two axes are stored in tiles of eight rows by 128 columns."""

from __future__ import annotations

from functools import lru_cache
from math import prod

# The sublanes and lanes of a TPU's vector register.
TILE = (8, 128)
ALIGNED = 256  # bytes; alignment of arrays without tiles


@lru_cache(maxsize=4096)
def stored_bytes(shape: tuple[int, ...], itemsize: int, tiled: bool) -> int:
    """Return the bytes of an array in memory; a tiled one has its axes in the order with the least padding."""
    if not tiled:
        return -(-prod(shape) * itemsize // ALIGNED) * ALIGNED
    axes = [n for n in shape if n != 1]
    if 0 in axes:
        return 0
    rows, columns = TILE[0] * max(1, 4 // itemsize), TILE[1]
    if len(axes) < 2:
        n = axes[0] if axes else 1
        return -(-n // columns) * columns * itemsize
    total = prod(axes)
    smallest = min(
        total // (axes[i] * axes[j]) * _rows(axes[i], rows) * (-(-axes[j] // columns) * columns)
        for i in range(len(axes))
        for j in range(len(axes))
        if i != j
    )
    return smallest * itemsize


def _rows(n: int, tile: int) -> int:
    """Return ``n`` rows padded to a multiple of the tile, or to a power of two if they are fewer than one tile."""
    return 1 << (n - 1).bit_length() if n < tile else -(-n // tile) * tile


def image_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of [N, C, ...] in the layout of convolutions: N and C are tiled, in either order."""
    n, c, *spatial = shape
    return prod(spatial) * min(tiled_bytes(n, c, itemsize), tiled_bytes(c, n, itemsize))


def tiled_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Return the bytes of a matrix in tiles; tiles of narrow dtypes have more rows."""
    return _rows(rows, TILE[0] * max(1, 4 // itemsize)) * (-(-columns // TILE[1]) * TILE[1]) * itemsize


def row_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of an array whose last axis are the columns of its tiles, however few there are."""
    return tiled_bytes(prod(shape[:-1]), shape[-1], itemsize)
