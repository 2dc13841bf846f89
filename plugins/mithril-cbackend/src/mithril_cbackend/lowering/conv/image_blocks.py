"""Images that a convolution computes together: several small ones share the reads of the kernels.

The images of a known batch are divided evenly. A block of a symbolic batch has room for a power of two, and the last
block has fewer images. Where the sizes of images are symbolic, blocks are cut at run time: rows of an image, or several
images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.lowering.conv.padding import Layout
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder
from mithril_cbackend.lowering.matmul.microkernel import Tile, count

BATCHES = (1, 3, 8, 32)  # for which the plan of a symbolic batch is selected
SIDES = (2, 4, 7, 14, 28, 56)  # of results for which the plan of symbolic images is selected
TARGETS = (16, 32, 64, 128, 256, 512)  # pixels or tiles of a block of symbolic images
ROOM = (2, 4, 8, 16, 32)
FEW = 64  # rows of a block of a symbolic batch, if it has several images
LAST = (1, 2, 4, 8, 16)  # rows of the tiles that compute the rest of a block
FEW_LAST = (1, 4)  # and a full tile, for images of symbolic sizes: each is compiled for each kind of packed block


def several(batch: Any, rows: int) -> Sequence[int]:
    """Return the possible numbers of images in a block, more than one, for images of this number of rows.

    Room that a small batch leaves unused makes strides long: it is limited to that of a few tiles.
    """
    if isinstance(batch, int):
        return [d for d in range(2, batch + 1) if batch % d == 0]
    return [d for d in ROOM if d * rows <= FEW]


def block_at(frame: KernelBuilder, number: Any, batch: Any, images: Any) -> tuple[Any, Any]:
    """Return the first image of a block and the number of its images."""
    first = number * images
    if isinstance(images, int) and (isinstance(batch, int) or images == 1):
        return first, images
    rest = t.index(batch) - first
    return first, frame.code.let(t.select(rest < images, rest, t.index(images)), "images")


Name = Callable[[Any], Any]  # names an expression that is used more than once


def cut(target: int, height: Any, width: Any, batch: Any, name: Name = lambda n: n) -> tuple[Any, Any]:
    """Return the rows and images of a block that has about ``target`` elements, of numbers or expressions.

    A block of several images has all of their rows. It has one row of one image if that has more elements.
    """
    rows = evenly(height, name(target // most(width, 1, name)), name)
    if isinstance(batch, int) and batch == 1:
        return rows, 1
    return rows, evenly(batch, name(target // most(height * width, 1, name)), name)


def evenly(size: Any, limit: Any, name: Name) -> Any:
    """Return the size of parts that are at most ``limit`` each, as equal as possible, and not empty."""
    parts = most(count(size, most(limit, 1, name)), 1, name)
    return most(count(size, parts), 1, name)


def most(a: Any, b: int, name: Name) -> Any:
    """Return the larger one of a size and a number."""
    a = name(a)
    return max(a, b) if isinstance(a, int) else name(t.select(a > b, a, t.index(b)))


def least(a: Any, b: Any) -> Any:
    """Return the smaller one of two sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return t.select(t.index(a) < b, t.index(a), t.index(b))


def example(layout: Layout, side: int) -> Layout:
    """Return the layout of an image whose result has this height and width where they are symbolic."""
    sides = [side if not isinstance(n, int) else n for n in layout.result]
    image = [n * s if not isinstance(i, int) else i for i, n, s in zip(layout.image, sides, layout.stride, strict=True)]
    return replace(layout, image=tuple(image), result=tuple(sides))


def at_run_time(layout: Layout, name: Name) -> Layout:
    """Return a layout whose symbolic sizes are named expressions."""
    return replace(layout, image=tuple(map(name, layout.image)), result=tuple(map(name, layout.result)))


def named(frame: KernelBuilder, size: Any) -> Any:
    """Return a size as a number, or as an expression that is computed once."""
    return size if isinstance(size, int) else frame.code.let(t.index(size), "size")


def last_tiles(rows: Any, tile: Tile) -> Sequence[int]:
    """Return the heights of the tiles that the rest of a block may need if each image has this number of rows."""
    if not isinstance(rows, int):
        return [n for n in FEW_LAST if n < tile.rows] + [tile.rows]
    step = math.gcd(rows, tile.rows)
    rests = range(step, tile.rows, step)
    return [n for k, n in enumerate(LAST) if any((LAST[k - 1] if k else 0) < rest <= n for rest in rests)]
