"""Packing of narrow elements as 32-bit int8x4 groups: packed blocks of the right operand, and rows with zeros after the
last element.

A packed block is [depth][columns] int8x4 groups; the elements of an int8x4 group follow each other along the contracted
axis.
"""

from __future__ import annotations

from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder
from mithril_cbackend.lowering.matmul.microkernel import Matrix


class PackedBlockCopy:
    """Code that packs columns of a stored matrix into a packed block."""

    def __init__(self, frame: KernelBuilder, matrix: Matrix, packed_block: t.Buffer, columns: int) -> None:
        self.frame, self.matrix, self.packed_block, self.columns = frame, matrix, packed_block, columns
        self.bits = matrix.dtype.bits
        self.per = 32 // self.bits
        self.lanes = frame.machine.lanes()

    def write(self, start: Any, k: int, width: int, depth: int) -> None:
        """Copy ``k`` rows of ``width`` columns to int8x4 groups ``start`` on; the rest of the packed block is zero."""
        reader, m = self.frame.reader, self.matrix
        full, rest = divmod(k, self.per)
        squares = full // self.lanes if self._is_transposed() else 0
        vectors = width // self.lanes
        if squares and vectors:
            with reader.loop("s", squares) as s, reader.loop("v", vectors) as v:
                first = m.offset(s * (self.lanes * self.per), v * self.lanes)
                target = start + s * (self.lanes * self.columns) + v * self.lanes
                self.frame.code.transpose(
                    self.lanes, m.buffer, first, m.column // self.per, self.packed_block, target, self.columns
                )
            if width > vectors * self.lanes:
                self._int8x4(start, 0, squares * self.lanes, vectors * self.lanes, width, self.per)
        first = squares * self.lanes if vectors else 0
        self._int8x4(start, first, full, 0, width, self.per)
        if rest:
            self._int8x4(start, full, full + 1, 0, width, rest)
        if width < self.columns:
            self._zeros(start, 0, full + (rest > 0), width)
        self._zeros(start, full + (rest > 0), depth, 0)

    def _is_transposed(self) -> bool:
        m = self.matrix
        return m.row == 1 and m.column % self.per == 0 and self.lanes > 1

    def _zeros(self, start: Any, first: int, stop: int, column: int) -> None:
        with self.frame.reader.loop("z", max(stop - first, 0)) as z:
            if stop > first:
                with self.frame.reader.loop("j", self.columns - column) as j:
                    position = start + (z + first) * self.columns + column + j
                    self.frame.code.store(self.packed_block, position, t.const(0, "uint32"))

    def _int8x4(self, start: Any, first: int, stop: int, column: int, width: int, elements: int) -> None:
        """Combine elements to the int8x4 groups of rows first to stop and columns column to width."""
        reader, code = self.frame.reader, self.frame.code
        if stop <= first or width <= column:
            return
        contiguous = self.matrix.column == 1 and self.lanes > 1
        vectors, rest = divmod(width - column, self.lanes) if contiguous else (0, width - column)
        parts = [(0, vectors, self.lanes, t.VECTORIZED), (vectors * self.lanes, 1, rest, t.SERIAL)]
        with reader.loop("w", stop - first) as w:
            for begin, blocks, size, kind in parts:
                if not blocks or not size:
                    continue
                with reader.loop("v", blocks) as v, reader.loop("j", size, kind) as j:
                    c = v * self.lanes + (j + (begin + column))
                    int8x4: Any = None
                    for p in range(elements):
                        element = t.load(self.matrix.buffer, self.matrix.offset((w + first) * self.per + p, c))
                        unsigned = t.cast(t.cast(element, f"uint{self.bits}"), "uint32")
                        part = unsigned << t.const(self.bits * p, "uint32") if p else unsigned
                        int8x4 = part if int8x4 is None else int8x4 | part
                    code.store(self.packed_block, start + (w + first) * self.columns + c, int8x4)


def copy_rows(
    frame: KernelBuilder, element: Any, is_contiguous: bool, size: tuple[int, int], target: t.Buffer, stride: int
) -> None:
    """Copy a matrix of elements to rows of ``stride`` elements, with zeros after the last one."""
    reader, code, lanes = frame.reader, frame.code, frame.machine.lanes()
    rows, k = size
    kind = t.VECTORIZED if is_contiguous and lanes > 1 else t.SERIAL
    vectors, rest = divmod(k, lanes)
    zero = t.const(0, str(target.dtype))
    with reader.loop("r", rows) as r:
        if vectors:
            with reader.loop("v", vectors) as v, reader.loop("j", lanes, kind) as j:
                column = v * lanes + j
                code.store(target, r * stride + column, element(r, column))
        if rest:
            with reader.loop("k", rest) as i:
                column = i + vectors * lanes
                code.store(target, r * stride + column, element(r, column))
        if stride > k:
            with reader.loop("z", stride - k) as z:
                code.store(target, r * stride + (z + k), zero)
