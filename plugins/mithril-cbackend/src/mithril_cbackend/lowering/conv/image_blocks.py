"""Images that a convolution computes together: several small ones share the reads of the kernels.

The images of a known batch are divided evenly. A block of a symbolic batch has room for a power of two, and the last
block has fewer images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder
from mithril_cbackend.lowering.matmul.microkernel import Tile

BATCHES = (1, 3, 8, 32)  # for which the plan of a symbolic batch is selected
ROOM = (2, 4, 8, 16, 32)
FEW = 64  # rows of a block of a symbolic batch, if it has several images
LAST = (1, 2, 4, 8, 16)  # rows of the tiles that compute the rest of a block


def several(batch: Any, rows: int) -> Sequence[int]:
    """Return the possible numbers of images in a block, more than one, for images of this number of rows.

    Room that a small batch leaves unused makes strides long: it is limited to that of a few tiles.
    """
    if isinstance(batch, int):
        return [d for d in range(2, batch + 1) if batch % d == 0]
    return [d for d in ROOM if d * rows <= FEW]


def block_at(frame: KernelBuilder, number: Any, batch: Any, images: int) -> tuple[Any, Any]:
    """Return the first image of a block and the number of its images."""
    first = number * images
    if isinstance(batch, int) or images == 1:
        return first, images
    rest = t.index(batch) - first
    return first, frame.code.let(t.select(rest < images, rest, t.index(images)), "images")


def last_tiles(rows: int, tile: Tile) -> Sequence[int]:
    """Return the heights of the tiles that the rest of a block may need if each image has this number of rows."""
    step = math.gcd(rows, tile.rows)
    rests = range(step, tile.rows, step)
    return [n for k, n in enumerate(LAST) if any((LAST[k - 1] if k else 0) < rest <= n for rest in rests)]
