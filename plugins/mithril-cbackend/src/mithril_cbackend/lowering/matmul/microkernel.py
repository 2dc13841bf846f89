"""Register tiles of a matrix product, over one packed block of the right operand.

A packed block is a few vectors wide and contiguous by rows: a tile reads it sequentially, and the next tile finds it in
the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mithril.graph import DType, float32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import storage_dtypes
from mithril_cbackend.lowering.element.element_reader import typical
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.scalar_ops import add, mul
from mithril_cbackend.lowering.element.vectorization import pieces

PREFETCH = 1024  # elements between the reads of a packed constant and its prefetches
LONG = 192  # products of a sum that take much longer than storing it
UNROLLED = 4  # rows of a tile of a run-time height whose results are computed together
Element = Callable[[Any, Any], t.Expr]  # row, column -> element
Left = Callable[..., t.Expr]  # row, indices of the contracted axes -> element
Emit = Callable[[Any, Any, t.Expr], None]  # row, column, element


@dataclass(frozen=True)
class Tile:
    """Size of the register tile."""

    rows: int
    columns: int


def tile_for(m: Any, n: Any, machine: Machine, bits: int = 32) -> Tile:
    """Return the largest tile that fits the registers, with rows balanced so that the last tile is almost full."""
    lanes = machine.lanes(bits)
    # Two vectors per row halve the broadcasts of left elements per product. A result narrower than
    # one vector has no use for the second; its registers are used for more rows.
    vectors = 1 if isinstance(n, int) and n <= lanes else 2
    # 16 accumulators of the 32 registers of AVX-512, 8 of the 16 of AVX2 and SSE: the rest holds
    # columns and broadcasts.
    rows = (8 if machine.vector_bytes == 64 else 4) * (2 if vectors == 1 else 1)
    if not isinstance(m, int):
        return Tile(rows, vectors * lanes)
    if m <= 2 and isinstance(n, int) and n >= 4 * lanes:
        vectors = 4  # enough independent accumulators to hide the latency of an addition
    # 9 rows are tiles of 5 and 4, not of 8 and 1: a tile of one row reads the packed block for little
    # work.
    return Tile(-(-m // -(-m // rows)), vectors * lanes)


def count(n: int, columns: int) -> int:
    """Return the number of parts of ``columns`` that hold ``n``, which may be symbolic."""
    return (n + (columns - 1)) // columns


@dataclass(frozen=True)
class Matrix:
    """Strided matrix in a buffer, with its storage dtype and compute dtype.

    Element [i, j] is at ``start + i * row + j * column``.
    """

    buffer: t.Buffer
    start: Any
    row: int
    column: int
    dtype: DType = float32
    kind: DType = float32
    constant: bool = False  # prefetched: large constants are not in the cache when their product begins

    def offset(self, i: Any, j: Any) -> Any:
        return self.start + (i * self.row + j * self.column)

    def part(self, i: Any, j: Any) -> Matrix:
        """Return the submatrix that begins at row ``i`` and column ``j``."""
        return replace(self, start=self.offset(i, j))

    def from_column(self, j: Any) -> Matrix:
        return self.part(0, j)

    def transposed(self) -> Matrix:
        """Return the transposed matrix."""
        return replace(self, row=self.column, column=self.row)

    def element(self, i: Any, j: Any) -> t.Expr:
        return t.cast(
            storage_dtypes.load(self.buffer, self.offset(i, j), self.dtype), storage_dtypes.computed(self.kind)
        )


def copy_packed_block(
    frame: KernelBuilder, element: Element, matrix: Matrix | None, k: int, width: int, packed_block: Matrix
) -> None:
    """Copy k rows of ``width`` columns to a packed block, with zeros up to whole vectors.

    ``matrix`` is set if the elements are stored.
    """
    code, reader, lanes = frame.code, frame.reader, frame.machine.lanes(packed_block.kind.bits)

    def copy_element(i: Any, j: Any) -> None:
        code.store(packed_block.buffer, packed_block.offset(i, j), element(i, j))

    k = k if isinstance(k, int) else t.index(k)
    is_transposed = (
        # Columns that are contiguous in memory are transposed in registers, a square at a time; element
        # by element, each load would touch another cache line. Only float32 has the shuffles.
        matrix is not None and matrix.row == 1 and matrix.column != 1 and lanes > 1 and packed_block.kind is float32
    )
    squares, left = (k // lanes, k % lanes) if is_transposed else (0, k)
    full_width = width // lanes * lanes
    if squares and full_width:
        assert matrix is not None
        with reader.loop("s", squares) as s, reader.loop("v", full_width // lanes) as v:
            _transpose_square(frame, matrix.part(s * lanes, v * lanes), packed_block, s * lanes, v)
    if left and full_width:
        kind = t.VECTORIZED if matrix is not None and matrix.column == 1 else t.SERIAL
        with (
            reader.loop("k", left) as i,
            reader.loop("v", full_width // lanes) as v,
            reader.loop("j", lanes, kind) as j,
        ):
            copy_element(i + squares * lanes, v * lanes + j)
    if width > full_width:
        zero = t.const(0, packed_block.kind.name)
        is_row = isinstance(width, int) and matrix is not None and matrix.column == 1
        for start, size in pieces(width - full_width, lanes) if is_row else ():
            with reader.loop("k", k) as i, reader.loop("j", size, t.VECTORIZED) as j:
                copy_element(i, j + (full_width + start))
        if not is_row:
            with reader.loop("j", width - full_width) as j, reader.loop("k", k) as i:
                copy_element(i, j + full_width)
        if isinstance(width, int):
            for start, size in pieces(-width % lanes, lanes):
                with reader.loop("k", k) as i, reader.loop("j", size, t.VECTORIZED) as j:
                    code.store(packed_block.buffer, packed_block.offset(i, j + (width + start)), zero)
        else:
            with reader.loop("j", packed_block.row - width) as j, reader.loop("k", k) as i:
                code.store(packed_block.buffer, packed_block.offset(i, j + width), zero)


def _transpose_square(frame: KernelBuilder, matrix: Matrix, packed_block: Matrix, row: Any, vector: Any) -> None:
    """Transpose a square of the matrix into the packed block, after a conversion if its dtype is not float32."""
    code, reader, lanes = frame.code, frame.reader, frame.machine.lanes()
    buffer, start, step = matrix.buffer, matrix.start, matrix.column
    if matrix.dtype is not float32:
        buffer, start, step = code.alloc("square", lanes * lanes, "float32"), 0, lanes
        with reader.loop("c", lanes) as c, reader.loop("j", lanes, t.VECTORIZED) as j:
            code.store(buffer, c * lanes + j, matrix.element(j, c))
    code.transpose(
        lanes, buffer, start, step, packed_block.buffer, packed_block.offset(row, vector * lanes), packed_block.row
    )


@dataclass(frozen=True)
class PackedRows:
    """A constant left operand in the order in which tiles read it: [tile, depth, row of the tile].

    Reads are one stream, which is prefetched.
    """

    buffer: t.Buffer
    start: Any
    depth: int

    def offset(self, row: Any, rows: int, k: Any) -> Any:
        """Return the position of element k of the tile that begins at ``row``; those of its rows follow each other."""
        return self.start + row * self.depth + k * rows


@dataclass(frozen=True)
class PartialSums:
    """Storage for partial sums between blocks of the contracted axis.

    ``first`` and ``last`` are bools or expressions: whether the current block is the first or the last one.
    """

    slot: Callable[[Any, Any], tuple[t.Buffer, Any]]  # row, column -> buffer, offset
    first: Any
    last: Any


def multiply(
    frame: KernelBuilder,
    m: Any,
    inner: Sequence[Any],
    tile: Tile,
    left: Left | PackedRows,
    packed_block: Matrix,
    width: int,
    emit: Emit,
    vector: bool,
    last: Sequence[int] = (1, 2, 4, 8, 16),
    epilogue: bool = False,
) -> None:
    """Multiply all rows with one packed block. ``emit`` gets vectors if ``vector`` is set, else elements.

    ``inner`` has the sizes of the contracted axes, by which ``left`` is indexed.
    """
    for first, rows in tiles(frame, m, tile, last):
        with first as row:
            multiply_tile(frame, row, rows, inner, left, packed_block, width, emit, vector, None, epilogue)


class LastRows:
    """The rows of a tile that may be higher than the rest of a symbolic size: the last row is computed repeatedly."""

    def __init__(self, frame: KernelBuilder, first: t.Expr, last: t.Expr, rows: int) -> None:
        let = frame.code.let
        self.frame, self.first, self.last = frame, let(first, "row"), let(last, "row")
        self.rows = [self.first, *(let(self._row(i), "row") for i in range(1, rows))]

    def _row(self, i: Any) -> t.Expr:
        return t.select(self.first + i < self.last, self.first + i, self.last)

    def __add__(self, i: Any) -> t.Expr:
        return self.rows[i] if isinstance(i, int) else self.frame.code.let(self._row(i), "row")

    def __radd__(self, other: int) -> LastRows:
        assert other == 0
        return self


def tiles(
    frame: KernelBuilder, m: Any, tile: Tile, last: Sequence[int] = (1, 2, 4, 8, 16)
) -> Iterator[tuple[AbstractContextManager[Any], int]]:
    """Yield loops over tiles of rows with the number of rows in each tile; a loop returns the first row.

    The last rows of a symbolic size are computed by the smallest tile of ``last`` that fits them.
    """
    full_tiles, rest = m // tile.rows, m % tile.rows

    @contextmanager
    def over_full_tiles() -> Iterator[Any]:
        with frame.reader.loop("tile", full_tiles) as i:
            yield i * tile.rows

    @contextmanager
    def over_some(smaller: int, rows: int) -> Iterator[Any]:
        """Compute the last rows if they fit this tile, and not the smaller one."""
        fits = (t.index(rest) > smaller) & (t.index(rest) <= rows)
        with frame.code.when(fits), frame.reader.loop("last", 1):
            yield LastRows(frame, t.index(full_tiles) * tile.rows, t.index(m) - 1, rows)

    if full_tiles != 0:
        yield over_full_tiles(), tile.rows
    if not isinstance(rest, int):
        for smaller, rows in pairwise((0, *last)):
            if smaller < tile.rows - 1:
                yield over_some(smaller, rows), rows
    elif rest:
        yield nullcontext(full_tiles * tile.rows), rest


def tiles_of_any_number(
    frame: KernelBuilder, m: Any, rows: int, highest: int
) -> Iterator[AbstractContextManager[tuple[Any, Any]]]:
    """Yield loops over tiles of a symbolic number of rows, which return the first row of a tile and its height.

    Full tiles have ``rows``; the height of the ones after them, 1 to ``highest``, is known at run time. Few rows are a
    tile of their own, whose first row is known.
    """
    m, code, reader = t.index(m), frame.code, frame.reader

    @contextmanager
    def over_few() -> Iterator[tuple[Any, Any]]:
        with code.when((m > 0) & (m <= highest)), reader.loop("few", 1):
            yield 0, m

    @contextmanager
    def over_full_tiles() -> Iterator[tuple[Any, Any]]:
        with reader.loop("tile", m // rows) as tile:
            yield tile * rows, rows

    @contextmanager
    def over_last() -> Iterator[tuple[Any, Any]]:
        rest = m % rows
        with code.when(m > highest), reader.loop("last", (rest + (highest - 1)) // highest) as part:
            left = code.let(rest - part * highest, "left")
            height = code.let(t.select(left < highest, left, t.index(highest)), "height")
            yield code.let(m - left, "row"), height

    # The full ones first: LLVM compiles them best.
    yield from (over_full_tiles(), over_few(), over_last())


def by_height(frame: KernelBuilder, height: t.Expr, heights: Sequence[int], write: Callable[[int], None]) -> None:
    """Write code for each height, of which that of the run-time height runs."""
    first, *rest = heights
    if not rest:
        write(first)
        return
    is_first = t.equal(height, first)
    frame.reader.either(is_first, lambda: write(first), lambda: by_height(frame, height, rest, write))


def each_row(frame: KernelBuilder, rows: Any, write: Callable[[Any], None]) -> None:
    """Write loops over the rows of a tile; if their number is known at run time only, some are unrolled together."""
    reader = frame.reader
    if isinstance(rows, int):
        with reader.loop("i", rows) as i:
            write(i)
        return
    groups = frame.code.let(rows // UNROLLED, "groups")
    with reader.loop("g", groups) as g, reader.loop("i", UNROLLED) as i:
        write(g * UNROLLED + i)
    with reader.loop("i", rows % UNROLLED) as i:
        write(groups * UNROLLED + i)


def multiply_tile(
    frame: KernelBuilder,
    row: Any,
    rows: int,
    inner: Sequence[int],
    left: Left | PackedRows,
    packed_block: Matrix,
    width: int,
    emit: Emit,
    vector: bool,
    sums: PartialSums | None = None,
    epilogue: bool = False,
) -> None:
    """Multiply the rows from ``row`` on with one packed block.

    Results of long sums that have an ``epilogue`` pass through memory: it is written once, not for each vector.
    """
    code, reader, kind = frame.code, frame.reader, packed_block.kind
    lanes = frame.machine.lanes(kind.bits)
    vectors = count(width if isinstance(width, int) else packed_block.row, lanes)
    total = code.alloc("tile", rows * vectors * lanes, kind.name)
    cells = [(i, v, (i * vectors + v) * lanes) for i in range(rows) for v in range(vectors)]
    # Single elements are a loop too: one for each vector of a transposed convolution took LLVM 1.5 s.
    in_rows = rows > 1 and (not vector or (epilogue and typical(math.prod(inner)) >= LONG))

    def clear() -> None:
        with reader.loop("j", lanes, t.VECTORIZED) as j:  # one loop: TVM's pass takes time for each
            for _, _, slot in cells:
                code.store(total, j + slot, t.const(0, kind.name))

    def each(action: Callable[[Any, Any, Any], None], vector: bool, in_rows: bool = False) -> None:
        if in_rows or not isinstance(width, int):
            vector = vector and (not isinstance(width, int) or width >= lanes)
            full = width // lanes * lanes if vector else 0
            with reader.loop("i", rows) as i:
                first = i * (vectors * lanes)
                if vector:
                    with reader.loop("v", full // lanes) as v, reader.loop("j", lanes, t.VECTORIZED) as j:
                        action(row + i, v * lanes + j, v * lanes + (j + first))
                if not isinstance(width, int) or width > full:
                    with reader.loop("j", width - full) as j:
                        action(row + i, j + full, j + (full + first))
            return
        for i, v, slot in cells:
            size = min(lanes, width - v * lanes)
            with reader.loop("j", size, t.VECTORIZED if vector and size == lanes else t.SERIAL) as j:
                action(row + i, j + v * lanes, j + slot)

    def copy(action: Callable[[Any, Any, Any], None]) -> None:
        if not isinstance(width, int) or width % lanes:
            each(action, True)
            return
        with reader.loop("j", lanes, t.VECTORIZED) as j:
            for i, v, slot in cells:
                action(row + i, j + v * lanes, j + slot)

    def resume(i: Any, j: Any, slot: Any) -> None:
        assert sums is not None
        code.store(total, slot, t.load(*sums.slot(i, j)))

    def save(i: Any, j: Any, slot: Any) -> None:
        assert sums is not None
        code.store(*sums.slot(i, j), t.load(total, slot))

    def finish() -> None:
        results = total
        if in_rows:
            results = code.alloc("results", rows * vectors * lanes, kind.name)
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                for _, _, slot in cells:
                    code.store(results, j + slot, t.load(total, j + slot))
        each(lambda i, j, slot: emit(i, j, t.load(results, slot)), vector, in_rows)

    if sums is None or (width % lanes and sums.first is not True):
        clear()
    if sums is not None:
        reader.either(sums.first, clear, lambda: copy(resume))
    add_products(frame, row, rows, inner, left, packed_block, total, cells)
    if sums is None:
        finish()
    else:
        reader.either(sums.last, finish, lambda: copy(save))


def add_products(
    frame: KernelBuilder,
    row: Any,
    rows: int,
    inner: Sequence[int],
    left: Left | PackedRows,
    packed_block: Matrix,
    total: t.Buffer,
    cells: Sequence[tuple[int, int, int]],
) -> None:
    """Add the products of rows and of a packed block to sums with vectors ``cells``: row, vector, place."""
    code, reader, lanes = frame.code, frame.reader, frame.machine.lanes(packed_block.kind.bits)
    with reader.nest("ke", inner) as k:
        if isinstance(left, PackedRows):
            offset = left.offset(row, rows, reader.flat(k, inner))
            code.prefetch(left.buffer, offset + PREFETCH)
            elements = [code.let(t.load(left.buffer, offset + i), "w") for i in range(rows)]
        else:
            elements = [left(row + i, *k) for i in range(rows)]
        for v in range(len(cells) // rows if packed_block.constant else 0):
            code.prefetch(packed_block.buffer, packed_block.offset(reader.flat(k, inner), v * lanes + PREFETCH))
        with reader.loop("j", lanes, t.VECTORIZED) as j:
            for i, v, slot in cells:
                b = packed_block.element(reader.flat(k, inner), j + v * lanes)
                offset = j + slot
                product = mul(code, elements[i], b, packed_block.kind)
                code.store(total, offset, add(code, t.load(total, offset), product, packed_block.kind))
