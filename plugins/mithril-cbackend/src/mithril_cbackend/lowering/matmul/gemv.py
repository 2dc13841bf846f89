"""Products with few rows, whose right operand is read once, where and as it lies: how fast depends on memory alone.

Where its columns are stored one after the other, each is multiplied with every row; where its rows are, each is
added to sums of all columns, as often as the left operand says.
"""

from __future__ import annotations

from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import scalar_ops
from mithril_cbackend.lowering.element.element_reader import Index
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import Frame, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed, rounded
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.matmul.matmul_form import Product, stored

FEW = 8  # rows
TOGETHER = 8  # rows of the right operand that are added at a time
SUMS = 1 << 14  # bytes of sums that stay in the first cache


def suits(kernel: Kernel, product: Product, machine: Machine) -> bool:
    """Whether a product is done here."""
    if product.m > FEW or product.right.value in kernel.prepared:
        return False
    right, lanes = stored(product.right, kernel.producers), machine.lanes(product.kind.bits)
    if right is None:
        return False
    return (right.summed == 1 and product.k >= lanes) or (right.free == 1 and product.n >= 4 * lanes)


def write(frame: Frame, product: Product) -> None:
    right = stored(product.right, frame.kernel.producers)
    assert right is not None
    (by_column if right.summed == 1 and product.k >= frame.machine.lanes(product.kind.bits) else by_row)(frame, product)


# -- results ------------------------------------------------------------------------------------------------------
def straight(product: Product, kernel: Kernel) -> bool:
    """Whether neighbors in a row of the result are neighbors in memory, and for all that follows."""
    several = [n for n in product.right.sizes(product.right.free) if n != 1]
    neighbors = not product.turned or product.m == 1
    return neighbors and (len(several) < 2 or kernel.outputs == [kernel.anchor.result])


def emit(frame: Frame, product: Product, at: Index, row: Any, column: Any, total: t.Expr) -> None:
    """A sum is complete."""
    reader, result = frame.reader, frame.kernel.anchor.result
    element = rounded(frame.code, t.cast(total, computed(result.dtype)), result.dtype)
    if frame.kernel.outputs == [result]:
        frame.write_flat(result, product.flat(reader, at, row, column), element)
    else:
        frame.emit(product.position(reader, at, row, column), element)


def _left(frame: Frame, product: Product, at: Index) -> Any:
    """Elements of the left operand."""
    reader, lies = frame.reader, stored(product.left, frame.kernel.producers)
    if lies is None:
        return lambda row, k: product.left.element(reader, at, row, k)
    matrix = lies.matrix(at, product.kind, reader)
    return matrix.element


# -- columns ------------------------------------------------------------------------------------------------------
def by_column(frame: Frame, product: Product) -> None:
    """Each element a product of two rows of memory; a few columns at a time, so that rows are read for all of them."""
    code, reader, kind, rows = frame.code, frame.reader, product.kind, product.m
    lanes = frame.machine.lanes(kind.bits)
    block = next(b for b in (8, 4, 2, 1) if product.n % b == 0 and rows * b <= 2 * FEW)
    cells = [(i, c) for i in range(rows) for c in range(block)]
    whole, rest = divmod(product.k, lanes)
    right = stored(product.right, frame.kernel.producers)
    assert right is not None
    blocks = product.n // block
    kinds = frame.kinds((product.matrices, blocks), product.work)
    with (
        reader.loop("m", product.matrices, kinds.get(0, t.SERIAL)) as m,
        reader.loop("n", blocks, kinds.get(1, t.SERIAL)) as n,
    ):
        at = reader.split(m, product.batch)
        matrix, left = right.matrix(at, kind, reader), _left(frame, product, at)
        column = n * block
        total = code.alloc("total", len(cells) * lanes, kind.name)

        def add(slot: int, lane: Any, i: int, c: int, k: Any) -> None:
            place = slot * lanes + lane
            made = scalar_ops.mul(code, left(i, k), matrix.element(column + c, k), kind)
            code.store(total, place, scalar_ops.add(code, t.load(total, place), made, kind))

        for slot in range(len(cells)):
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                code.store(total, slot * lanes + j, t.const(0, kind.name))
        with reader.loop("k", whole) as k:
            for slot, (i, c) in enumerate(cells):
                with reader.loop("j", lanes, t.VECTORIZED) as j:
                    add(slot, j, i, c, k * lanes + j)
        if rest:
            with reader.loop("r", rest) as r:
                for slot, (i, c) in enumerate(cells):
                    add(slot, 0, i, c, whole * lanes + r)
        for slot, (i, c) in enumerate(cells):
            emit(frame, product, at, i, column + c, _folded(frame, total, slot * lanes, lanes, product))


def _folded(frame: Frame, total: t.Buffer, first: int, lanes: int, product: Product) -> t.Expr:
    """The sum of a vector's elements, by halves."""
    while lanes > 1:
        lanes //= 2
        with frame.reader.loop("j", lanes, t.VECTORIZED if lanes > 1 else t.SERIAL) as j:
            at = j + first
            other = t.load(total, at + lanes)
            made = scalar_ops.add(frame.code, t.load(total, at), other, product.kind)
            frame.code.store(total, at, made)
    return t.load(total, first)


# -- rows ---------------------------------------------------------------------------------------------------------
def by_row(frame: Frame, product: Product) -> None:
    """Sums of as many columns as stay in the first cache; to them, the right operand's rows are added."""
    lanes, threads = frame.machine.lanes(product.kind.bits), frame.workers(product.work, product.n)
    most = SUMS * 8 // product.kind.bits // product.m
    shares = threads if product.matrices < threads else 1
    width = -(-product.n // max(-(-product.n // most), shares))
    width = -(-width // lanes) * lanes
    whole, rest = divmod(product.n, width)
    for first, chunks, size in ((0, whole, width), (whole * width, 1, rest)):
        if chunks and size:
            _chunks(frame, product, first, chunks, size)


def _chunks(frame: Frame, product: Product, first: int, chunks: int, size: int) -> None:
    code, reader, kind, lanes = frame.code, frame.reader, product.kind, frame.machine.lanes(product.kind.bits)
    right = stored(product.right, frame.kernel.producers)
    assert right is not None
    vector = vectorizable([n for n in frame.kernel.nodes if n is not frame.kernel.anchor])
    pitch = -(-size // lanes) * lanes
    pieces = [(0, size // lanes, lanes, t.VECTORIZED), (size // lanes * lanes, 1, size % lanes, t.SERIAL)]
    work = product.work * size * chunks // product.n
    with frame.share("chunk", product.matrices * chunks, work) as (_, item):
        *at, chunk = reader.split(item, (*product.batch, chunks))
        begin = first + chunk * size
        matrix = right.matrix(tuple(at), kind, reader).turned().from_column(begin)
        left = _left(frame, product, tuple(at))
        total = code.alloc("total", product.m * pitch, kind.name)

        def add(k: Any, count: int) -> None:
            """So many rows, from ``k`` on."""
            factors = [[code.let(left(i, k + u), "a") for u in range(count)] for i in range(product.m)]
            for start, vectors, width, how in pieces:
                with reader.loop("v", vectors) as v, reader.loop("j", width, how) as j:
                    column = v * lanes + start + j
                    for i in range(product.m):
                        made = t.load(total, i * pitch + column)
                        for u in range(count):
                            b = matrix.element(k + u, column)
                            made = scalar_ops.add(code, made, scalar_ops.mul(code, factors[i][u], b, kind), kind)
                        code.store(total, i * pitch + column, made)

        with reader.loop("v", product.m * pitch // lanes) as v, reader.loop("j", lanes, t.VECTORIZED) as j:
            code.store(total, v * lanes + j, t.const(0, kind.name))
        whole, rest = divmod(product.k, TOGETHER)
        with reader.loop("k", whole) as k:
            add(k * TOGETHER, TOGETHER)
        if rest:
            with reader.loop("k", 1) as _:
                add(whole * TOGETHER, rest)
        for i in range(product.m):
            for start, count, width, how in pieces:
                kept = how if vector and straight(product, frame.kernel) else t.SERIAL
                with reader.loop("v", count) as v, reader.loop("j", width, kept) as j:
                    column = v * lanes + start + j
                    emit(frame, product, tuple(at), i, begin + column, t.load(total, i * pitch + column))
