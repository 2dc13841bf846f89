"""Sizes of convolutions of bytes and pairs: the copied image, runs of int8x4 groups, tiles of pixels.

Batch, height and width may be symbolic. Tiles of a symbolic number of pixels have the height of full ones, or one of a
few smaller ones that is selected at run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mithril.graph import Node, Size, uint32
from mithril_cbackend.instructions import AMX, NATIVE
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.int8x4.llvm_tiles import AMX_INT8X4, Instructions
from mithril_cbackend.lowering.matmul import int8x4_products
from mithril_cbackend.lowering.matmul.microkernel import count


def may_exceed(size: Size, limit: Size) -> bool:
    """Whether a size is larger than another one, or may be if they are symbolic."""
    difference = size - limit
    return not isinstance(difference, int) or difference > 0


@dataclass(frozen=True)
class Plan:
    """Sizes of the copied image, of runs and of tiles."""

    machine_use: Instructions
    image: tuple[int, ...]  # [batch, height, width, int8x4 groups]
    group: int  # channels of a group of the image
    groups: int
    kernel: tuple[int, int]
    result: tuple[int, ...]  # [batch, height, width, channels]
    full_stride: tuple[int, int]
    dilation: tuple[int, int]
    before: tuple[int, int]
    is_padded: bool

    @staticmethod
    def of(node: Node, use: Instructions) -> Plan:
        a, weights, image = node.attributes, shape_of(operand(node, 1)), shape_of(operand(node))
        int8x4s = image[3] if operand(node).dtype is uint32 else image[3] // use.per
        kernel, padding = (weights[0], weights[1]), a["padding"]
        pairs = tuple(a["stride"]), tuple(a["dilation"]), (padding[0][0], padding[1][0])
        is_padded = any(n for pair in padding for n in pair)
        shapes = (*image[:3], int8x4s), weights[2], a["groups"], kernel, shape_of(node.result)
        plan = Plan(use, *shapes, *pairs, is_padded)
        # Runs whose length has no divisor near 16 would fill less than half of each AMX block; vectors
        # of AVX-512 take them.
        is_short = count(plan.run, use.of_runs(plan.run).depth) > 2 * count(plan.run, AMX_INT8X4)
        return replace(plan, machine_use=replace(use, level=NATIVE)) if use.level == AMX and is_short else plan

    # -- the image ------------------------------------------------------------------------------------------------
    @property
    def is_single(self) -> bool:
        """Whether the kernel is one pixel."""
        return self.kernel == (1, 1)

    @property
    def is_copied(self) -> bool:
        """Whether tiles read a copy of the image: padded, of fewer pixels, or with int8x4 groups after the last one."""
        last = self.first_int8x4(self.packed_blocks - 1) + self.depth
        is_exact = self.depth == self.run and last <= self.image[3] and not self.is_padded
        return not (self.is_single and self.full_stride == (1, 1) and is_exact)

    @property
    def stride(self) -> tuple[int, int]:
        """Return the distance of pixels in the copy; without padding it has only those that a kernel of one reads."""
        return (1, 1) if self.is_single and not self.is_padded else self.full_stride

    @property
    def size(self) -> tuple[int, int]:
        """Return the height and width of the copy."""
        sizes = zip(self.result[1:3], self.stride, self.kernel, self.dilation, strict=True)
        height, width = ((n - 1) * s + (k - 1) * d + 1 for n, s, k, d in sizes)
        return height, width

    @property
    def copied_int8x4(self) -> int:
        """Return the int8x4 groups of the copy, and those that tiles read after its last pixel."""
        height, width = self.size
        int8x4s = self.image[3]
        after = (self.rows + self.kernel[1]) * self.stride[1] * int8x4s + self.depth
        return height * width * int8x4s + (self.lines - 1) * self.stride[0] * width * int8x4s + after

    # -- runs -----------------------------------------------------------------------------------------------------
    @property
    def columns(self) -> int:
        return int8x4_products.columns_of(self.machine_use)

    @property
    def packed_blocks(self) -> int:
        return count(self.result[3], self.columns)

    def first_int8x4(self, packed_block: Any) -> Any:
        """Return the first int8x4 group of a pixel that a packed block reads."""
        if self.groups == 1:
            return 0
        group = packed_block * self.columns * self.groups // self.result[3]
        return group * self.group // self.machine_use.per

    @cached_property
    def span(self) -> int:
        """Return the number of int8x4 groups of a pixel that each packed block reads."""
        if self.groups == 1:
            return self.image[3]
        channels = self.result[3]
        last = [min((p + 1) * self.columns, channels) - 1 for p in range(self.packed_blocks)]
        ends = [count((c * self.groups // channels + 1) * self.group, self.machine_use.per) for c in last]
        return max(end - int(self.first_int8x4(p)) for p, end in enumerate(ends))

    @property
    def joins_row(self) -> bool:
        """Whether a row of the kernel is one run."""
        return self.groups == 1 and self.dilation[1] == 1

    @property
    def run(self) -> int:
        """Return the int8x4 groups of a run."""
        return self.span * self.kernel[1] if self.joins_row else self.span

    @cached_property
    def use(self) -> Instructions:
        use = self.machine_use.of_runs(self.run)
        return use if self.lines == 1 and len(use.heights(self.rows)) == 1 else replace(use, height=self.height)

    @property
    def depth(self) -> int:
        """Return the int8x4 groups of a run, rounded up to whole blocks."""
        block = self.machine_use.of_runs(self.run).depth
        return count(self.run, block) * block

    @property
    def offsets(self) -> list[int]:
        """Return the distance of each run from the first one, in int8x4 groups."""
        row, int8x4s = self.dilation[0] * self.size[1] * self.image[3], self.image[3]
        columns = range(1 if self.joins_row else self.kernel[1])
        return [y * row + x * self.dilation[1] * int8x4s for y in range(self.kernel[0]) for x in columns]

    # -- tiles ----------------------------------------------------------------------------------------------------
    @cached_property
    def is_flat(self) -> bool:
        """Whether tiles run over the ends of rows, at the cost of unused pixels between them."""
        use, (height, width) = self.machine_use, self.result[1:3]
        # With a stride the pixels after the end of a row are not those of the next one.
        if self.stride != (1, 1):
            return False
        # Images in place have no unused pixels between their rows.
        if use.level == AMX or not (self.is_copied and isinstance(height, int) and isinstance(width, int)):
            return True

        def time(positions: int) -> int:  # in rows of tiles; low tiles wait for their sums
            tiles = count(positions, use.rows)
            return tiles * max(count(positions, tiles), use.rows * 3 // 4)

        return time((height - 1) * self.size[1] + width) <= height * time(width)

    @property
    def images(self) -> int:
        """Return the number of images that tiles do not cross."""
        return self.result[0] if self.is_copied else 1

    @property
    def positions(self) -> int:
        """Return the positions of all tiles of an image, or of one row."""
        batch, height, width = self.result[:3]
        if not self.is_copied:
            return batch * height * width
        return (height - 1) * self.size[1] + width if self.is_flat else width

    @property
    def is_static(self) -> bool:
        """Whether the number of positions is known."""
        return isinstance(self.positions, int)

    @property
    def parts(self) -> int:
        """Return the number of tiles of all positions."""
        return count(self.positions, self.machine_use.rows if self.is_static or self.is_flat else self.width)

    @property
    def lines(self) -> int:
        """Return the rows of the result that a tile has; two if rows may be short."""
        use = self.machine_use
        if use.level != AMX or self.is_flat or self.result[1] == 1:
            return 1
        return 1 if self.is_static and self.positions > use.height else 2

    @property
    def width(self) -> int:
        """Return the neighboring pixels of a tile."""
        use = self.machine_use
        if not self.is_static:
            return use.rows // self.lines
        return min(self.positions, use.rows) if self.is_flat else count(self.positions, self.parts)

    @property
    def rows(self) -> int:
        return self.lines * self.width

    @property
    def height(self) -> int:
        """Return the rows of an AMX tile."""
        return self.width if self.lines > 1 else min(self.machine_use.height, count(self.rows, 2))

    @property
    def heights(self) -> list[int]:
        """Return the possible rows of tiles, which are powers of two if there are several."""
        if self.is_static or not self.is_flat:
            return [self.rows]
        if self.is_copied:  # of which small images leave some unused
            return [self.rows, self.rows // 2, self.rows // 4]
        image = math.prod(self.result[1:3])
        fewest = min(image, self.rows) if isinstance(image, int) else 1  # positions, if there are any
        return [h for h in (self.rows >> k for k in range(self.rows.bit_length())) if 2 * h > fewest]

    @property
    def tiles(self) -> int:
        """Return the tiles of an image if they have the height of full ones."""
        return self.parts if self.is_flat else self.parts * count(self.result[1], self.lines)
