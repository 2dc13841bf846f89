"""Products of sparse matrices: each row adds the rows of x that its stored elements read, scaled by them.

Neighbors in a row of x are the lanes of vectors: positions are read once for all of them, and no vector is summed.
A single column has no such neighbors: there the lanes are those of a block, or independent sums of elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from mithril import ops
from mithril.graph import Node, float32, int32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, shape_of, typical
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS, KernelBuilder, Machine
from mithril_cbackend.lowering.element.vectorization import vectorizable

OPERATIONS = frozenset({ops.sparse_matmul, ops.sparse_matmul_transposed})
VECTORS = 4  # of accumulators: enough to hide the latency of an addition
SUMS = 4  # of single elements, for the same reason


def is_supported(node: Node) -> bool:
    """Whether the elements are float32, and the number of those that are stored is known."""
    values = [v for v in (*node.operands, node.result) if v is not None]
    kinds = [v.dtype for v in values]
    is_static = all(isinstance(n, int) and n for n in values[0].shape)
    return is_static and 0 not in node.result.shape and kinds == [float32, int32, int32, float32, float32]


@lowers(ops.sparse_matmul, is_producer=True)
def product(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``sparse_matmul``."""
    frame = KernelBuilder(kernel, name, machine)
    SparseProduct(frame).write()
    return frame.finish()


@lowers(ops.sparse_matmul_transposed)
def transposed_product(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``sparse_matmul_transposed``: rows of x, scaled by stored elements, are added to rows of the result."""
    frame = KernelBuilder(kernel, name, machine)
    product = SparseProduct(frame)
    result, code, reader = frame.outputs[product.node.result], frame.code, frame.reader
    size = product.node.attributes["columns"] * product.columns
    with reader.loop("i", size) as i:
        code.store(result, i, t.const(0, "float32"))
    with reader.loop("row", product.rows) as row, product.stored(row) as j:
        for u in range(product.width):
            element = code.let(t.load(product.values, j * product.width + u), "element")
            start = code.let((product.position(j) * product.width + u) * product.columns, "start")
            for columns, size in product.pieces(product.lanes):
                with columns as column:
                    for first, lanes in segments(size, product.lanes):
                        with product.lane(lanes) as lane:
                            place = start + column + first + lane
                            term = element * t.load(product.x, row * product.columns + column + first + lane)
                            code.store(result, place, t.load(result, place) + term)
    return frame.finish()


def segments(columns: int, lanes: int) -> Iterator[tuple[int, int]]:
    """Yield the first column and the lanes of vectors that cover all columns: full ones, then halves of the rest."""
    first = 0
    while first < columns:
        while lanes > columns - first:
            lanes //= 2
        yield first, lanes
        first += lanes


@contextmanager
def _from(frame: KernelBuilder, first: Any, count: Any) -> Iterator[Any]:
    """Loop over as many numbers from the first one."""
    with frame.reader.loop("j", count) as j:
        yield frame.code.let(j + first, "j")


class SparseProduct:
    """The operands of a product, and loops over rows and stored elements."""

    def __init__(self, frame: KernelBuilder) -> None:
        self.frame, self.node = frame, frame.kernel.anchor
        values, positions, starts, x = (operand(self.node, k) for k in range(4))
        buffers = frame.reader.buffers
        self.values, self.positions, self.starts, self.x = (buffers[v] for v in (values, positions, starts, x))
        self.width = shape_of(values)[1] if values.ndim == 2 else 1
        self.rows, self.columns, self.lanes = shape_of(starts)[0] - 1, shape_of(x)[1], frame.machine.lanes()
        self.work = shape_of(values)[0] * self.width * typical(self.columns) // PRODUCTS
        self.vector = vectorizable([n for n in frame.kernel.nodes if n is not self.node])

    def position(self, j: Any) -> t.Expr:
        return t.index(t.load(self.positions, j))

    def stored(self, row: Any) -> Any:
        """Return the loop over the stored elements or blocks of a row."""
        code = self.frame.code
        begin = code.let(t.index(t.load(self.starts, row)), "begin")
        return _from(self.frame, begin, t.index(t.load(self.starts, row + 1)) - begin)

    def write(self) -> None:
        """Write the product, for as many columns at a time as there are accumulators."""
        frame, step = self.frame, self.lanes * VECTORS
        if self.columns == 1:
            with frame.share("row", self.rows, self.work) as (_, row):
                self.emit(row, 0, self.block_sum(row) if self.width > 1 else self.sum(row))
            return
        for columns, size in self.pieces(step):
            with columns as column:
                self.chunk(column, size)

    def pieces(self, largest: int) -> Iterator[tuple[Any, int]]:
        """Yield contexts with the first column of each piece, and its size: full ones, then the rest.

        A rest that is known at run time only consists of the powers of two that it contains.
        """
        columns = self.columns
        yield self.full_pieces(largest), largest
        if isinstance(columns, int):
            if columns % largest:
                yield nullcontext(columns // largest * largest), columns % largest
            return
        size = largest // 2
        while size:
            yield self.piece_if_any(size), size
            size //= 2

    @contextmanager
    def full_pieces(self, size: int) -> Iterator[Any]:
        with self.frame.reader.loop("piece", self.columns // size) as piece:
            yield piece * size

    @contextmanager
    def piece_if_any(self, size: int) -> Iterator[Any]:
        count = t.index(self.columns) // size
        with self.frame.code.when(t.equal(count % 2, 1)), self.frame.reader.loop("piece", 1):
            yield self.frame.code.let(count // 2 * (2 * size), "column")

    def chunk(self, column: Any, size: int) -> None:
        frame, code = self.frame, self.frame.code
        parts = [*segments(size, self.lanes)]
        # Few columns have fewer vectors than accumulators: elements of a block are then added to sums of their own.
        sums = min(self.width, max(1, VECTORS // len(parts)))
        with frame.share("row", self.rows, self.work * size // typical(self.columns)) as (_, row):
            total = code.alloc("total", sums * size, "float32")
            for first, lanes in ((n * size + first, lanes) for n in range(sums) for first, lanes in parts):
                with self.lane(lanes) as lane:
                    code.store(total, first + lane, t.const(0, "float32"))
            with self.stored(row) as j:
                begin = code.let(self.position(j) * (self.width * self.columns) + column, "begin")
                for u in range(self.width):
                    element = code.let(t.load(self.values, j * self.width + u), "element")
                    for first, lanes in parts:
                        place = u % sums * size + first
                        with self.lane(lanes) as lane:
                            term = element * t.load(self.x, begin + u * self.columns + first + lane)
                            code.store(total, place + lane, t.load(total, place + lane) + term)
            for n in range(1, sums):
                for first, lanes in parts:
                    with self.lane(lanes) as lane:
                        other = t.load(total, n * size + first + lane)
                        code.store(total, first + lane, t.load(total, first + lane) + other)
            for first, lanes in parts:
                with self.lane(lanes if self.vector else 1, lanes) as lane:
                    self.emit(row, column + first + lane, t.load(total, first + lane))

    def lane(self, lanes: int, count: int | None = None) -> Any:
        """Return the loop over the lanes of a vector, or over ``count`` elements one by one."""
        kind = t.VECTORIZED if lanes > 1 else t.SERIAL
        return self.frame.reader.loop("lane", count or lanes, kind)

    def block_sum(self, row: Any) -> t.Expr:
        """Return the sum of a row of blocks times a vector."""
        code = self.frame.code
        lanes = min(self.lanes, self.width)
        total = code.alloc("total", lanes, "float32")
        with self.lane(lanes) as lane:
            code.store(total, lane, t.const(0, "float32"))
        with self.stored(row) as j:
            start = code.let(self.position(j) * self.width, "start")
            for first in range(0, self.width, lanes):
                with self.lane(lanes) as lane:
                    term = t.load(self.values, j * self.width + first + lane) * t.load(self.x, start + first + lane)
                    code.store(total, lane, t.load(total, lane) + term)
        while lanes > 1:
            lanes //= 2
            with self.lane(lanes) as lane:
                code.store(total, lane, t.load(total, lane) + t.load(total, lane + lanes))
        return t.load(total, 0)

    def sum(self, row: Any) -> t.Expr:
        """Return the sum of a row of elements times a vector."""
        code = self.frame.code
        total = code.alloc("total", SUMS, "float32")
        for k in range(SUMS):
            code.store(total, k, t.const(0, "float32"))
        begin = code.let(t.index(t.load(self.starts, row)), "begin")
        count = code.let(t.index(t.load(self.starts, row + 1)) - begin, "count")

        def add(j: Any, k: int) -> None:
            code.store(total, k, t.load(total, k) + t.load(self.values, j) * t.load(self.x, self.position(j)))

        with _from(self.frame, 0, count // SUMS) as group:
            for k in range(SUMS):
                add(begin + group * SUMS + k, k)
        with _from(self.frame, begin + count // SUMS * SUMS, count % SUMS) as j:
            add(j, 0)
        return (t.load(total, 0) + t.load(total, 1)) + (t.load(total, 2) + t.load(total, 3))

    def emit(self, row: Any, column: Any, element: t.Expr) -> None:
        frame, result = self.frame, self.node.result
        if frame.kernel.outputs == [result]:
            frame.write_flat(result, row * self.columns + column, element)
        else:
            frame.emit((row, column), element)
