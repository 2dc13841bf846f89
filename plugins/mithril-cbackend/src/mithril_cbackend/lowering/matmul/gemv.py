"""Products with few rows, bound by memory bandwidth: the right operand is read once, unpacked.

If its columns are contiguous, each is multiplied with every row of the left operand. If its rows are contiguous, each
is scaled by elements of the left operand and added to accumulators of all columns. Several rows shorter than a vector
are read as full vectors, whose lanes are different columns; so are small results of long sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import scalar_ops
from mithril_cbackend.lowering.element.element_reader import Index
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed, rounded
from mithril_cbackend.lowering.element.vectorization import pieces, vectorizable
from mithril_cbackend.lowering.matmul.matmul_form import LONG_SUM, Product, StridedOperand, strided_operand
from mithril_cbackend.lowering.matmul.microkernel import count

MAX_ROWS = 8  # rows of the left operand that this template takes at most
VARIANTS = (1, 2, 3, 4, 6, 8)  # rows for which a symbolic number of rows has code of its own
COLUMNS = 4  # columns per block if their number is symbolic
UNROLL = 8  # rows of the right operand per iteration
ACCUMULATORS = 24  # vectors of sums of a block of short rows: of 32 registers of AVX-512, the rest holds elements
PART = 64  # blocks of short rows that several groups of rows of the left operand read from the L1 cache
ACCUMULATOR_BYTES = 1 << 14  # bytes of accumulators, which fit the L1 cache


def is_supported(kernel: Kernel, product: Product, machine: Machine) -> bool:
    """Whether this template supports the product: few rows, and a right operand with contiguous rows or columns."""
    # Up to 8 rows the time is that of reading the right operand once; packing would read and write it
    # first. Constants are packed when the program is built, so that tiles read them as fast.
    right, lanes = strided_operand(product.right, kernel.producers), machine.lanes(product.kind.bits)
    if right is None or product.right.value in kernel.prepared:
        return False
    by_rows = isinstance(product.n, int) and right.free == 1
    is_long = by_rows and isinstance(product.k, int) and product.k >= LONG_SUM
    if isinstance(product.m, int) and product.m > (2 * MAX_ROWS if is_long and product.n < lanes else MAX_ROWS):
        return False
    if right.summed == 1 and product.k >= lanes:
        return True
    # Fewer columns leave too few independent accumulators to hide the latency of an addition in short sums.
    return by_rows and (is_long or product.n >= 4 * lanes)


def write(frame: KernelBuilder, product: Product) -> None:
    """Emit the product, by columns or by rows of the right operand."""
    _write(frame, product, range(product.m))


def write_few(frame: KernelBuilder, product: Product) -> None:
    """Emit variants for a symbolic number of rows up to MAX_ROWS, of which one runs."""
    m = t.index(product.m)
    for smaller, rows in pairwise((0, *VARIANTS)):
        fits = t.equal(m, rows) if rows == smaller + 1 else (m > smaller) & (m <= rows)
        with frame.code.when(fits), frame.reader.loop("few", 1):
            last = [frame.reader.position(t.select(m > i, t.index(i), m - 1)) for i in range(smaller + 1, rows)]
            _write(frame, product, [*range(smaller + 1), *last])


def _write(frame: KernelBuilder, product: Product, rows: Sequence[Any]) -> None:
    right = strided_operand(product.right, frame.kernel.producers)
    assert right is not None
    if right.summed == 1 and product.k >= frame.machine.lanes(product.kind.bits):
        by_column(frame, product, rows)
    elif _has_short_rows(frame, product, right):
        by_block(frame, product, rows)
    else:
        by_row(frame, product, rows)


# -- results ------------------------------------------------------------------------------------------------------
def is_contiguous(product: Product, kernel: Kernel) -> bool:
    """Whether neighbors in a row of the result are contiguous in memory, also in all outputs of the epilogue."""
    nontrivial_sizes = [n for n in product.right.sizes(product.right.free) if n != 1]
    is_adjacent = not product.transposed or product.m == 1
    return is_adjacent and (len(nontrivial_sizes) < 2 or kernel.outputs == [kernel.anchor.result])


def emit(frame: KernelBuilder, product: Product, batch_index: Index, row: Any, column: Any, total: t.Expr) -> None:
    """Emit a complete sum: write it, or run the epilogue on it."""
    reader, result = frame.reader, frame.kernel.anchor.result
    element = rounded(frame.code, t.cast(total, computed(result.dtype)), result.dtype)
    if frame.kernel.outputs == [result]:
        frame.write_flat(result, product.flat(reader, batch_index, row, column), element)
    else:
        frame.emit(product.position(reader, batch_index, row, column), element)


def _left(frame: KernelBuilder, product: Product, batch_index: Index) -> Any:
    """Return a function that reads an element of the left operand."""
    reader, strided = frame.reader, strided_operand(product.left, frame.kernel.producers)
    if strided is None:
        return lambda row, k: product.left.element(reader, batch_index, row, k)
    matrix = strided.matrix(batch_index, product.kind, reader)
    return matrix.element


# -- columns ------------------------------------------------------------------------------------------------------
def by_column(frame: KernelBuilder, product: Product, rows: Sequence[Any]) -> None:
    """Compute dot products of contiguous rows and columns, for blocks of columns that reuse the rows.

    The last block of a symbolic number of columns computes the last column repeatedly.
    """
    code, reader, kind, is_exact = frame.code, frame.reader, product.kind, isinstance(product.n, int)
    lanes = frame.machine.lanes(kind.bits)
    block = COLUMNS
    if is_exact:
        # At most 16 accumulators, half of the registers of AVX-512; columns share the loads of the left
        # rows.
        block = next(b for b in (8, 4, 2, 1) if product.n % b == 0 and len(rows) * b <= 2 * MAX_ROWS)
    cells = [(i, c) for i in range(len(rows)) for c in range(block)]
    num_vectors, rest = divmod(product.k, lanes)
    right = strided_operand(product.right, frame.kernel.producers)
    assert right is not None
    blocks = count(product.n, block)
    kinds = frame.kinds((product.matrices, blocks), product.work)
    with (
        reader.loop("m", product.matrices, kinds.get(0, t.SERIAL)) as m,
        reader.loop("n", blocks, kinds.get(1, t.SERIAL)) as n,
    ):
        batch_index = reader.split(m, product.batch)
        matrix, left = right.matrix(batch_index, kind, reader), _left(frame, product, batch_index)
        columns = [n * block + c for c in range(block)]
        if not is_exact:
            columns = [reader.position(t.select(c < product.n, c, t.index(product.n) - 1)) for c in columns]
        total = code.alloc("total", len(cells) * lanes, kind.name)

        def add(slot: int, lane: Any, i: int, c: int, k: Any) -> None:
            offset = slot * lanes + lane
            term = scalar_ops.mul(code, left(rows[i], k), matrix.element(columns[c], k), kind)
            code.store(total, offset, scalar_ops.add(code, t.load(total, offset), term, kind))

        for slot in range(len(cells)):
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                code.store(total, slot * lanes + j, t.const(0, kind.name))
        with reader.loop("k", num_vectors) as k:
            for slot, (i, c) in enumerate(cells):
                with reader.loop("j", lanes, t.VECTORIZED) as j:
                    add(slot, j, i, c, k * lanes + j)
        if rest:
            with reader.loop("r", rest) as r:
                for slot, (i, c) in enumerate(cells):
                    add(slot, 0, i, c, num_vectors * lanes + r)
        for slot, (i, c) in enumerate(cells):
            total_sum = _horizontal_sum(frame, total, slot * lanes, lanes, product)
            emit(frame, product, batch_index, rows[i], columns[c], total_sum)


def _horizontal_sum(frame: KernelBuilder, total: t.Buffer, first: int, lanes: int, product: Product) -> t.Expr:
    """Sum the elements of a vector by halves."""
    while lanes > 1:
        lanes //= 2
        with frame.reader.loop("j", lanes, t.VECTORIZED if lanes > 1 else t.SERIAL) as j:
            offset = j + first
            other = t.load(total, offset + lanes)
            pair_sum = scalar_ops.add(frame.code, t.load(total, offset), other, product.kind)
            frame.code.store(total, offset, pair_sum)
    return t.load(total, first)


# -- blocks of short rows -------------------------------------------------------------------------------------------
def _has_short_rows(frame: KernelBuilder, product: Product, right: StridedOperand) -> bool:
    """Whether rows are shorter than a vector, and both operands are contiguous along their last axis."""
    left, lanes = strided_operand(product.left, frame.kernel.producers), frame.machine.lanes(product.kind.bits)
    if left is None or left.summed != 1 or not product.kind.is_float or not isinstance(product.k, int):
        return False
    stored = {left.value.dtype, right.value.dtype} == {product.kind}
    return stored and isinstance(product.n, int) and product.n < lanes and right.summed == product.n


def by_block(frame: KernelBuilder, product: Product, rows: Sequence[Any]) -> None:
    """Multiply as many short rows at a time as a vector has lanes; they are as many vectors as there are columns.

    Lane p of these vectors is row p // n and column p % n, so that an exchange of lanes repeats each element of the
    left operand for its row. The sums of a column are added up at the end.
    """
    code, reader, kind, n = frame.code, frame.reader, product.kind, product.n
    lanes = frame.machine.lanes(kind.bits)
    height = max(1, ACCUMULATORS // n)
    right = strided_operand(product.right, frame.kernel.producers)
    left = strided_operand(product.left, frame.kernel.producers)
    assert right is not None
    assert left is not None
    groups = [rows[k : k + height] for k in range(0, len(rows), height)]
    blocks, rest = divmod(product.k, lanes)
    part = blocks if len(groups) == 1 else min(PART, blocks)
    with frame.share("m", product.matrices, product.work) as (_, item):
        batch_index = reader.split(item, product.batch)
        a, b = left.matrix(batch_index, kind, reader), right.matrix(batch_index, kind, reader).transposed()
        sums = code.alloc("sums", len(rows) * n * lanes, kind.name)
        with reader.loop("i", len(rows) * n) as i, reader.loop("j", lanes, t.VECTORIZED) as j:
            code.store(sums, i * lanes + j, t.const(0, kind.name))

        def add_group(first_row: int, count: int, first: Any, size: int) -> None:
            """Add the products of a group of rows and of some blocks, from ``first`` on."""
            slots = [(i, v, (i * n + v) * lanes) for i in range(count) for v in range(n)]
            begin = first_row * n * lanes
            total = code.alloc("total", count * n * lanes, kind.name)
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                for _, _, slot in slots:
                    code.store(total, j + slot, t.load(sums, j + (begin + slot)))
            with reader.loop("k", size) as block:
                k = (first + block) * lanes
                short_rows = code.alloc("rows", n * lanes, kind.name)
                for v in range(n):
                    vector = t.vector(b.offset(k, 0) + v * lanes, lanes)
                    code.store(short_rows, t.vector(v * lanes, lanes), t.load(b.buffer, vector))
                for i, v, slot in slots:
                    elements = t.load(a.buffer, t.vector(a.offset(rows[first_row + i], k), lanes))
                    repeated = t.shuffle(elements, elements, [(v * lanes + p) // n for p in range(lanes)])
                    term = repeated * t.load(short_rows, t.vector(v * lanes, lanes))
                    place = t.vector(slot, lanes)
                    code.store(total, place, t.load(total, place) + term)
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                for _, _, slot in slots:
                    code.store(sums, j + (begin + slot), t.load(total, j + slot))

        for first, parts, size in ((0, blocks // part, part), (blocks // part * part, 1, blocks % part)):
            if parts and size:
                with reader.loop("part", parts) as p:
                    for k, group in enumerate(groups):
                        add_group(k * height, len(group), p * part + first, size)
        for i, row in enumerate(rows):
            begin = i * n * lanes
            with reader.loop("r", rest) as r, reader.loop("j", n) as j:
                k = r + blocks * lanes
                term = scalar_ops.mul(code, a.element(row, k), b.element(k, j), kind)
                code.store(sums, j + begin, scalar_ops.add(code, t.load(sums, j + begin), term, kind))
            half = lanes
            while half > 1:
                half //= 2
                with reader.loop("j", half * n) as j:
                    other = t.load(sums, j + (begin + half * n))
                    code.store(sums, j + begin, scalar_ops.add(code, t.load(sums, j + begin), other, kind))
            with reader.loop("j", n) as j:
                emit(frame, product, batch_index, row, j, t.load(sums, j + begin))


# -- rows ---------------------------------------------------------------------------------------------------------
def by_row(frame: KernelBuilder, product: Product, rows: Sequence[Any]) -> None:
    """Add scaled rows of the right operand to accumulators of as many columns as fit the L1 cache."""
    lanes, threads = frame.machine.lanes(product.kind.bits), frame.workers(product.work, product.n)
    max_width = ACCUMULATOR_BYTES * 8 // product.kind.bits // len(rows)
    splits = threads if product.matrices < threads else 1
    # Chunks of equal width, so that threads finish together.
    width = -(-product.n // max(-(-product.n // max_width), splits))
    width = -(-width // lanes) * lanes
    full_chunks, rest = divmod(product.n, width)
    for first, chunks, size in ((0, full_chunks, width), (full_chunks * width, 1, rest)):
        if chunks and size:
            _chunks(frame, product, rows, first, chunks, size)


def _chunks(frame: KernelBuilder, product: Product, rows: Sequence[Any], first: int, chunks: int, size: int) -> None:
    code, reader, kind, lanes = frame.code, frame.reader, product.kind, frame.machine.lanes(product.kind.bits)
    right = strided_operand(product.right, frame.kernel.producers)
    assert right is not None
    vector = vectorizable([n for n in frame.kernel.nodes if n is not frame.kernel.anchor])
    row_stride = -(-size // lanes) * lanes
    full = size // lanes * lanes
    segments = [(0, size // lanes, lanes, t.VECTORIZED)]
    segments += [(full + start, 1, width, t.VECTORIZED) for start, width in pieces(size - full, lanes)]
    work = product.work * size * chunks // product.n
    with frame.share("chunk", product.matrices * chunks, work) as (_, item):
        *batch_index, chunk = reader.split(item, (*product.batch, chunks))
        begin = first + chunk * size
        matrix = right.matrix(tuple(batch_index), kind, reader).transposed().from_column(begin)
        left = _left(frame, product, tuple(batch_index))
        total = code.alloc("total", len(rows) * row_stride, kind.name)

        def add(k: Any, count: int) -> None:
            """Add ``count`` rows, beginning with row ``k``."""
            factors = [[code.let(left(i, k + u), "a") for u in range(count)] for i in rows]
            for start, vectors, width, loop_kind in segments:
                with reader.loop("v", vectors) as v, reader.loop("j", width, loop_kind) as j:
                    column = v * lanes + start + j
                    for i in range(len(rows)):
                        # The products are added first: each group waits for one addition of the last one.
                        terms = [
                            scalar_ops.mul(code, factors[i][u], matrix.element(k + u, column), kind)
                            for u in range(count)
                        ]
                        group = reduce(lambda a, b: scalar_ops.add(code, a, b, kind), terms)
                        accumulated = t.load(total, i * row_stride + column)
                        code.store(total, i * row_stride + column, scalar_ops.add(code, accumulated, group, kind))

        with reader.loop("v", len(rows) * row_stride // lanes) as v, reader.loop("j", lanes, t.VECTORIZED) as j:
            code.store(total, v * lanes + j, t.const(0, kind.name))
        full_groups, rest = divmod(product.k, UNROLL)
        with reader.loop("k", full_groups) as k:
            add(k * UNROLL, UNROLL)
        if rest:
            with reader.loop("k", 1) as _:
                add(full_groups * UNROLL, rest)
        for i, row in enumerate(rows):
            for start, vectors, width, loop_kind in segments:
                store_kind = loop_kind if vector and is_contiguous(product, frame.kernel) else t.SERIAL
                with reader.loop("v", vectors) as v, reader.loop("j", width, store_kind) as j:
                    column = v * lanes + start + j
                    emit(
                        frame, product, tuple(batch_index), row, begin + column, t.load(total, i * row_stride + column)
                    )
