"""Lowering of ``c.group_product``: packed blocks of quantized values are read once for each tile of rows.

One row is bound by the memory bandwidth of the quantized values; more rows share the look-ups of a tile.
"""

from __future__ import annotations

import math
from typing import Any

from mithril.graph import Node, TensorType, Value, float32, int32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS, KernelBuilder, Machine
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.int8x4 import group_tiles, group_tiles_c
from mithril_cbackend.lowering.int8x4.group_operation import group_product
from mithril_cbackend.lowering.int8x4.group_tiles import COLUMNS, GroupForm
from mithril_cbackend.lowering.matmul.microkernel import by_height, count, each_row, tiles_of_any_number


def form_of(node: Node, machine: Machine) -> GroupForm:
    """Return the layout of the packed blocks and the instructions for them."""
    a, is_bytes = node.attributes, not operand(node).dtype.is_float
    lanes = min(max(machine.lanes(), 4), 16)
    level = group_tiles.level(frozenset(machine.features), lanes, is_bytes)
    layout = a["group"], a["has_offsets"], a["is_half"], a["bits"], a["nested"]
    return GroupForm(*layout, is_bytes, lanes, level)


def sizes(node: Node) -> tuple[Any, int, int]:
    """Return the rows, the columns, and the terms of a sum."""
    *lead, terms = shape_of(operand(node))
    return math.prod(lead), node.attributes["columns"], terms


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return the buffer of the sums of groups, if tiles read them."""
    node = kernel.anchor
    rows, _, terms = sizes(node)
    form = form_of(node, machine)
    if not form.has_sums:
        return []
    return [Value("sums", TensorType(int32 if form.is_bytes else float32, (rows * (terms // form.group),)))]


@lowers(group_product, is_producer=True, scratch=scratch)
def product(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``c.group_product``."""
    frame = KernelBuilder(kernel, name, machine)
    GroupProduct(frame).write()
    return frame.finish()


class GroupProduct:
    """Loops over packed blocks and tiles of rows."""

    def __init__(self, frame: KernelBuilder) -> None:
        node = frame.kernel.anchor
        self.frame, self.node, self.form = frame, node, form_of(node, frame.machine)
        self.rows, self.columns, self.terms = sizes(node)
        x, packed_blocks, table = (operand(node, k) for k in range(3))
        self.x, self.packed_blocks, self.table = (frame.reader.buffers[v] for v in (x, packed_blocks, table))
        self.itemsize = x.dtype.itemsize
        self.groups = self.terms // self.form.group
        self.sums = next((frame.outputs[v] for v in frame.kernel.scratch), None)
        follow = [n for n in frame.kernel.nodes if n is not node]
        self.vector = vectorizable(follow)

    def write(self) -> None:
        frame = self.frame
        if self.sums is not None:
            self.add_groups(self.sums)
        work = self.rows * self.columns * self.terms // PRODUCTS
        packed_blocks = count(self.columns, COLUMNS)
        with frame.share("packed_block", packed_blocks, work) as (_, number):
            if not isinstance(self.rows, int):
                for loop in tiles_of_any_number(frame, self.rows, self.form.rows, self.form.rows - 1):
                    with loop as (row, height):
                        self.tile(row, height, number, packed_blocks)
                return
            full, rest = divmod(self.rows, self.form.rows)
            with frame.reader.loop("tile", full) as tile:
                if full:
                    self.tile(tile * self.form.rows, self.form.rows, number, packed_blocks)
            if rest:
                self.tile(full * self.form.rows, rest, number, packed_blocks)

    def add_groups(self, sums: t.Buffer) -> None:
        """Sum the elements of each group of each row."""
        code, reader = self.frame.code, self.frame.reader
        kind = "int32" if self.form.is_bytes else "float32"
        lanes = math.gcd(self.form.group, self.form.lanes)
        with reader.loop("g", self.rows * self.groups) as g:
            total = code.alloc("sum", lanes, kind)
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                code.store(total, j, t.const(0, kind))
            with reader.loop("v", self.form.group // lanes) as v, reader.loop("j", lanes, t.VECTORIZED) as j:
                element = t.cast(t.load(self.x, g * self.form.group + v * lanes + j), kind)
                code.store(total, j, t.load(total, j) + element)
            result = t.load(total, 0)
            for lane in range(1, lanes):
                result = result + t.load(total, lane)
            code.store(sums, g, result)

    def tile(self, row: Any, rows: Any, number: Any, packed_blocks: int) -> None:
        """Compute one tile, of a height that may be known at run time only, and run the epilogue on it."""
        form, code, reader = self.form, self.frame.code, self.frame.reader
        total = code.alloc("tile", (rows if isinstance(rows, int) else form.rows) * COLUMNS, "float32")
        unused = t.address_of(self.table, 0)

        def multiply(rows: int) -> None:
            name = f"{form.name}_{rows}x{form.lanes}"
            code.call_piece(
                t.Piece(name, group_tiles.tile(name, form, rows), group_tiles_c.tile(name, form, rows)),
                t.address_of(self.x, row * self.terms),
                t.index(self.terms * self.itemsize),
                t.address_of(self.packed_blocks, number * form.packed_block(self.groups)),
                t.address_of(self.table, 0),
                unused if self.sums is None else t.address_of(self.sums, row * self.groups),
                t.address_of(total, 0),
                t.index(self.groups),
            )

        if isinstance(rows, int):
            multiply(rows)
        else:
            by_height(self.frame, rows, range(form.rows - 1, 0, -1), multiply)
        width = self.columns % COLUMNS

        def emit(width: int) -> None:
            lanes = form.lanes

            def write(i: Any) -> None:
                for v in range(count(width, lanes)):
                    size = min(lanes, width - v * lanes)
                    kind = t.VECTORIZED if self.vector and size == lanes else t.SERIAL
                    with reader.loop("j", size, kind) as j:
                        element = t.load(total, i * COLUMNS + (j + v * lanes))
                        self.emit(row + i, number * COLUMNS + (j + v * lanes), element)

            each_row(self.frame, rows, write)

        if not width:
            emit(COLUMNS)
        elif packed_blocks == 1:
            emit(width)
        else:
            last = t.equal(t.index(number), packed_blocks - 1)
            reader.either(last, lambda: emit(width), lambda: emit(COLUMNS))

    def emit(self, row: Any, column: Any, element: t.Expr) -> None:
        frame, result = self.frame, self.node.result
        if frame.kernel.outputs == [result]:
            frame.write_flat(result, row * self.columns + column, element)
        else:
            frame.emit((*frame.reader.split(row, shape_of(result)[:-1]), column), element)
