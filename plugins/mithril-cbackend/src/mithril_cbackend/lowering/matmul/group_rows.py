"""Lowering of ``c.group_rows``: rows of a matrix in packed blocks, one number at a time."""

from __future__ import annotations

import math
from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, position_in, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.int8x4.group_operation import group_rows
from mithril_cbackend.lowering.int8x4.group_tiles import COLUMNS, GroupLayout


@lowers(group_rows)
def rows(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``c.group_rows``."""
    frame = KernelBuilder(kernel, name, machine)
    GroupRows(frame).write()
    return frame.finish()


class GroupRows:
    """Loops over positions, groups and quantized values; threads share the positions."""

    def __init__(self, frame: KernelBuilder) -> None:
        node = frame.kernel.anchor
        a = node.attributes
        self.frame, self.node = frame, node
        self.layout = GroupLayout(a["group"], a["has_offsets"], a["is_half"], a["bits"], a["nested"])
        self.packed_blocks, self.table = (frame.reader.buffers[operand(node, k)] for k in (1, 2))
        self.columns, self.terms = a["columns"], a["terms"]

    def write(self) -> None:
        frame, positions, group = self.frame, operand(self.node), self.layout.group
        groups = self.terms // group
        shape = shape_of(positions)
        rows = math.prod(shape)
        with frame.share("row", rows, rows * self.terms) as (_, row):
            number = position_in(frame.reader, positions, frame.reader.split(row, shape), self.columns)
            lane = frame.code.let(number % COLUMNS, "lane")
            packed_block = frame.code.let(number // COLUMNS * self.layout.packed_block(groups), "packed_block")
            with frame.reader.loop("g", groups) as g:
                begin, factors = self.places(packed_block, g)
                scale = frame.code.let(self.number(begin, factors, 0, lane), "scale")
                offset = frame.code.let(self.number(begin, factors, 1, lane), "offset") if self.has_offsets else None
                with frame.reader.loop("four", group // 4) as four, frame.reader.loop("k", 4) as k:
                    element = self.code(begin + self.layout.head, lane * 4 + k, four) * scale
                    element = element if offset is None else element + offset
                    frame.write_flat(self.node.result, row * self.terms + g * group + four * 4 + k, element)

    @property
    def has_offsets(self) -> bool:
        return self.layout.has_offsets

    def places(self, packed_block: t.Expr, g: Any) -> tuple[t.Expr, t.Expr]:
        """Return the places of a group and of its factors."""
        layout, code = self.layout, self.frame.code
        if not layout.nested:
            return code.let(packed_block + g * layout.size, "begin"), packed_block
        factors = code.let(packed_block + g // layout.nested * layout.block, "factors")
        return code.let(factors + layout.factors + g % layout.nested * layout.size, "begin"), factors

    def byte(self, place: Any) -> t.Expr:
        return t.cast(t.load(self.packed_blocks, place), "int32")

    def number(self, begin: t.Expr, factors: t.Expr, part: int, lane: t.Expr) -> t.Expr:
        """Load the scale (part 0) or the offset (part 1) of a column."""
        layout = self.layout
        place = begin + part * layout.numbers + lane * (layout.numbers // COLUMNS)
        if layout.nested:
            code = (self.byte(place) ^ t.const(128, "int32")) - t.const(128, "int32")
            return t.cast(code, "float32") * self.half(factors + part * COLUMNS * 2 + lane * 2)
        if layout.is_half:
            return self.half(place)
        bits = t.cast(self.byte(place), "uint32")
        for k in range(1, 4):
            bits = bits | t.cast(self.byte(place + k), "uint32") << t.const(8 * k, "uint32")
        return t.bits(bits, "float32")

    def half(self, place: Any) -> t.Expr:
        """Load a float16: move its bits, and correct the exponent by an exact product."""
        bits = self.frame.code.let(t.cast(self.byte(place) + self.byte(place + 1) * 256, "uint32"), "bits")
        magnitude = (bits & t.const(0x7FFF, "uint32")) << t.const(13, "uint32")
        sign = (bits >> t.const(15, "uint32")) << t.const(31, "uint32")
        return t.bits(magnitude | sign, "float32") * t.const(2.0**112, "float32")

    def code(self, begin: Any, byte: Any, four: Any) -> t.Expr:
        """Load the number of a quantized value: one of four that have this byte of their int8x4 groups."""
        layout = self.layout
        int8x4s = begin + layout.upper + byte
        if layout.bits == 8:
            return t.cast(self.byte(int8x4s + four * (4 * COLUMNS)) - 128, "float32")
        shift = t.cast(t.index(four % 2 * 4), "int32")
        code = self.byte(int8x4s + four // 2 * (4 * COLUMNS)) >> shift & t.const(15, "int32")
        number = t.load(self.table, code)
        if not layout.upper:
            return number
        count = layout.bits - 4
        shift = t.cast(t.index(four * count), "int32")
        upper = self.byte(begin + byte) >> shift & t.const((1 << count) - 1, "int32")
        return number + t.cast(upper * 16, "float32")
