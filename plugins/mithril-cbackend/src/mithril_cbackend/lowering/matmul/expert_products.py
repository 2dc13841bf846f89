"""Products of mixtures of experts: rows are sorted by their expert, and tiles multiply those of one expert.

The number of rows of an expert is known at run time only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mithril import ops
from mithril.graph import Node, TensorType, Value, float32, int32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS, KernelBuilder, Machine
from mithril_cbackend.lowering.matmul.microkernel import (
    Matrix,
    copy_packed_block,
    count,
    multiply_tile,
    tile_for,
    tiles,
)
from mithril_cbackend.lowering.matmul.naive_contractions import batch_position

OPERATIONS = frozenset({ops.expert_matmul, ops.expert_weight_grad})


def is_supported(node: Node) -> bool:
    """Whether all sizes are known, the factors are float32, and the numbers of experts int32."""
    values = [v for v in (*node.operands, node.result) if v is not None]
    sizes = [n for v in values for n in v.shape]
    kinds = [v.dtype for v in values]
    return all(isinstance(n, int) and n for n in sizes) and kinds == [float32, float32, int32, float32]


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return the buffers: the sorted rows, where those of each expert begin, and a packed block for each thread."""
    p = Sizes(kernel.anchor, machine)
    sizes = {"order": (p.rows, int32), "ends": (p.experts + 2, int32)}
    sizes["packed_block"] = (machine.threads * p.terms * p.tile.columns, float32)
    return [Value(name, TensorType(dtype, (size,))) for name, (size, dtype) in sizes.items()]


class Sizes:
    """The sizes of a product, and the tile that computes it."""

    def __init__(self, node: Node, machine: Machine) -> None:
        first, second = shape_of(operand(node)), shape_of(operand(node, 1))
        self.is_gradient = node.op is ops.expert_weight_grad
        self.lead = first[:-1] if self.is_gradient else shape_of(node.result)[:-1]
        self.rows, self.width, self.columns = math.prod(self.lead), first[-1], second[-1]
        self.experts = node.attributes["count"] if self.is_gradient else second[0]
        self.terms = self.rows if self.is_gradient else self.width  # of a sum, at most
        self.tile = tile_for(self.width if self.is_gradient else self.rows, self.columns, machine)


class ExpertProducts:
    """The rows of each expert in the order of the experts, and loops over experts and packed blocks."""

    def __init__(self, kernel: Kernel, name: str, machine: Machine) -> None:
        self.frame = KernelBuilder(kernel, name, machine)
        self.node, self.code, self.reader = kernel.anchor, self.frame.code, self.frame.reader
        self.x, self.right, self.experts = (operand(self.node, k) for k in range(3))
        self.sizes = Sizes(self.node, machine)
        self.order, self.ends, self.packed_blocks = (self.frame.outputs[v] for v in kernel.scratch)

    def sort(self) -> None:
        """Sort the rows by counting; afterwards those of expert e are ``order[ends[e]:ends[e + 1]]``."""
        code, reader, one = self.code, self.reader, t.const(1, "int32")

        def increase(position: Any) -> None:
            code.store(self.ends, position, t.load(self.ends, position) + one)

        with reader.loop("e", self.sizes.experts + 2) as e:
            code.store(self.ends, e, t.const(0, "int32"))
        with reader.loop("i", self.sizes.rows) as i:
            e = self.expert_of(i)
            with code.when(self.exists(e)), reader.loop("one", 1):
                increase(e + 2)
        with reader.loop("e", self.sizes.experts) as e:
            code.store(self.ends, e + 2, t.load(self.ends, e + 2) + t.load(self.ends, e + 1))
        with reader.loop("i", self.sizes.rows) as i:
            e = self.expert_of(i)
            with code.when(self.exists(e)), reader.loop("one", 1):
                code.store(self.order, t.load(self.ends, e + 1), t.index(i))
                increase(e + 1)

    def expert_of(self, i: Any) -> t.Expr:
        index = batch_position(self.reader.split(i, self.sizes.lead), shape_of(self.experts))
        return self.code.let(t.index(self.reader.at(self.experts, index)), "expert")

    def exists(self, e: Any) -> Any:
        return (e >= 0) & (e < self.sizes.experts)

    @contextmanager
    def packed_blocks_of_experts(self) -> Iterator[tuple[Any, Any, Any, Matrix]]:
        """Loop over experts and packed blocks in parallel; yield both with the first row of the expert and a buffer."""
        p, number = self.sizes, count(self.sizes.columns, self.sizes.tile.columns)
        work = p.rows * p.width * p.columns // PRODUCTS
        with self.frame.share("packed_block", p.experts * number, work) as (worker, item):
            e, packed_block = self.reader.split(item, (p.experts, number))
            first = self.code.let(t.load(self.ends, e), "first")
            buffer = Matrix(self.packed_blocks, worker * (p.terms * p.tile.columns), p.tile.columns, 1)
            yield e, packed_block, first, buffer

    def each_width(self, packed_block: Any, write: Any) -> None:
        """Write code for full packed blocks, and for the last one if it has fewer columns."""
        full, rest = divmod(self.sizes.columns, self.sizes.tile.columns)
        if not full or not rest:
            write(rest or self.sizes.tile.columns)
        else:
            is_last = t.equal(packed_block, full)
            self.reader.either(is_last, lambda: write(rest), lambda: write(self.sizes.tile.columns))

    def element(self, value: Value, position: Any, column: Any) -> t.Expr:
        """Return an element of the row at a position of the order."""
        index = self.reader.split(t.load(self.order, position), self.sizes.lead)
        return self.reader.at(value, (*batch_position(index, shape_of(value)[:-1]), column))


@lowers(ops.expert_matmul, scratch=scratch)
def expert_matmul(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Multiply the rows of each expert with its packed blocks; rows without an expert are 0."""
    e = ExpertProducts(kernel, name, machine)
    frame, reader, p = e.frame, e.reader, e.sizes
    e.sort()
    with reader.loop("i", p.rows) as i, frame.code.when(~e.exists(e.expert_of(i))), reader.loop("j", p.columns) as j:
        frame.write_flat(e.node.result, i * p.columns + j, t.const(0, "float32"))
    with e.packed_blocks_of_experts() as (expert, packed_block, first, buffer):
        rows, column = frame.code.let(t.load(e.ends, expert + 1) - first, "rows"), packed_block * p.tile.columns

        def multiply(width: int) -> None:
            copy_packed_block(
                frame, lambda k, j: reader.at(e.right, (expert, k, column + j)), None, p.width, width, buffer
            )
            for loop, height in tiles(frame, rows, p.tile):
                with loop as row:
                    multiply_tile(frame, row, height, (p.width,), left, buffer, width, emit, True)

        def left(row: Any, k: Any) -> t.Expr:
            return frame.code.let(e.element(e.x, first + row, k))

        def emit(row: Any, j: Any, element: t.Expr) -> None:
            start = t.load(e.order, first + row) * p.columns
            frame.write_flat(e.node.result, start + (column + j), element)

        with frame.code.when(rows > 0), reader.loop("used", 1):
            e.each_width(packed_block, multiply)
    return frame.finish()


@lowers(ops.expert_weight_grad, scratch=scratch)
def expert_weight_grad(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Sum the outer products of the rows of each expert."""
    e = ExpertProducts(kernel, name, machine)
    frame, p = e.frame, e.sizes
    e.sort()
    with e.packed_blocks_of_experts() as (expert, packed_block, first, buffer):
        rows: Any = frame.code.let(t.load(e.ends, expert + 1) - first, "rows")
        column = packed_block * p.tile.columns

        def multiply(width: int) -> None:
            copy_packed_block(frame, lambda k, j: e.element(e.right, first + k, column + j), None, rows, width, buffer)
            for loop, height in tiles(frame, p.width, p.tile):
                with loop as row:
                    multiply_tile(frame, row, height, (rows,), left, buffer, width, emit, True)

        def left(row: Any, k: Any) -> t.Expr:
            return frame.code.let(e.element(e.x, first + k, row))

        def emit(row: Any, j: Any, element: t.Expr) -> None:
            frame.write_flat(e.node.result, (expert * p.width + row) * p.columns + (column + j), element)

        e.each_width(packed_block, multiply)
    return frame.finish()
