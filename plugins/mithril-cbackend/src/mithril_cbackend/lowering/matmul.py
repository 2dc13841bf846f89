"""Matrix products by tiles, with what follows them run on each tile.

The right operand is copied to panels, one at a time, whatever its layout, so that transposes cost little; where it is
known when the program is made, its panels are made then; and where every panel is met once only, it is read as it lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.graph import Node, Value
from mithril.types import TensorType, float32
from mithril_cbackend import tir as t
from mithril_cbackend.kernel import Kernel
from mithril_cbackend.lowering import contractions
from mithril_cbackend.lowering.elementwise import vectorisable
from mithril_cbackend.lowering.frame import PRODUCTS, Frame, Machine
from mithril_cbackend.lowering.panels import Matrix, Tile, copy_panel, multiply, pack, tile_for
from mithril_cbackend.lowering.reader import Index, operand, shape_of


@dataclass(frozen=True)
class Product:
    """A product as ``batch`` times [m, k] @ [k, n]."""

    batch: tuple[int, ...]
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return "x".join(map(str, (*self.batch, self.m, self.n, self.k)))

    @property
    def work(self) -> int:
        return math.prod(self.batch) * self.m * self.n * self.k // PRODUCTS


def product_of(node: Node) -> Product | None:
    """How a matmul is one of matrices; None where a simple schedule does better."""
    if node.op.name != "matmul" or node.result.dtype is not float32:
        return None
    left, right = shape_of(operand(node)), shape_of(operand(node, 1))
    if len(left) < 2 or len(right) < 2:
        return None
    k, n = right[-2:]
    if len(right) == 2:  # rows of all matrices follow each other
        found = Product((), math.prod(left[:-1]), n, k)
    else:
        found = Product(np.broadcast_shapes(left[:-2], right[:-2]), left[-2], n, k)
    small = found.m * found.n * found.k < 512 or found.n < 4
    return None if small or 0 in (found.m, found.n, found.k) else found


def tile(product: Product, machine: Machine) -> Tile:
    found = machine.schedules.get(str(product))
    return tile_for(product.m, product.n, machine) if found is None else Tile(*map(int, found.split("x")))


def schedules(node: Node, machine: Machine) -> list[str]:
    """The tiles that fit the registers and the result."""
    product = product_of(node)
    if product is None:
        return []
    lanes, registers = machine.lanes(), 32 if machine.vector_bytes == 64 else 16
    sizes = [(rows, vectors) for vectors in (1, 2, 3, 4) for rows in (1, 2, 4, 6, 8, 12, 14, 16)]
    return [
        f"{rows}x{vectors * lanes}"
        for rows, vectors in sizes
        if rows <= product.m and (vectors - 1) * lanes < product.n and rows * vectors + vectors + 1 <= registers
        if 2 * rows * vectors >= min(registers, 2 * product.m)
    ]


def scratch(node: Node, machine: Machine) -> list[Value]:
    """A panel for every thread."""
    product = product_of(node)
    if product is None:
        return []
    return [Value("panel", TensorType(float32, (machine.threads * tile(product, machine).columns * product.k,)))]


def prepared(kernel: Kernel, right: np.ndarray[Any, Any], machine: Machine) -> np.ndarray[Any, Any] | None:
    """The panels of a right operand that is known now; None where they are not used."""
    product = product_of(kernel.anchor)
    if product is None or product.batch:
        return None
    return pack(right, tile(product, machine).columns)


def transposed(kernel: Kernel) -> bool:
    made = kernel.producers.get(operand(kernel.anchor, 1))
    return made is not None and made.op.name == "transpose"


def matmul(kernel: Kernel, name: str, machine: Machine) -> Any:
    """NumPy's matrix product."""
    product = product_of(kernel.anchor)
    if product is None:
        return contractions.matmul(kernel, name, machine)
    if product.m < 4 and not product.batch and transposed(kernel):
        return rows_times_vector(kernel, name, machine, product)
    frame = Frame(kernel, name, machine)
    Tiles(frame, product, machine).write()
    return frame.finish()


def _position(at: Any, shape: tuple[int, ...], frame: Frame) -> Index:
    """A row of the flattened result as a position of the whole result's leading axes."""
    return (at,) if len(shape) == 1 else frame.reader.split(at, shape)


def _strides(frame: Frame, value: Value) -> tuple[t.Buffer, list[int]] | None:
    """The buffer in which a value lies, as it is or transposed, and how far its axes' elements lie apart."""
    made = frame.kernel.producers.get(value)
    source = operand(made) if made is not None and made.op.name == "transpose" else value
    buffer = frame.reader.buffers.get(source)
    if buffer is None:
        return None
    shape = shape_of(source)
    steps = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    return buffer, steps if source is value else [steps[k] for k in made.attributes["perm"]]  # type: ignore[union-attr]


class Tiles:
    """The loops over matrices and panels."""

    def __init__(self, frame: Frame, product: Product, machine: Machine) -> None:
        self.frame, self.product, self.reader = frame, product, frame.reader
        self.node = frame.kernel.anchor
        self.tile, self.lanes = tile(product, machine), machine.lanes()
        self.left, self.right = operand(self.node), operand(self.node, 1)
        follow = [n for n in frame.kernel.nodes if n is not self.node and n.result not in (self.left, self.right)]
        self.vector = vectorisable(follow)
        self.stored = _strides(frame, self.right)

    def write(self) -> None:
        p, columns = self.product, self.tile.columns
        whole, rest = divmod(p.n, columns)
        for first, panels, width in ((0, whole, columns), (whole, 1, rest)):
            if panels and width:
                self.panels(first, panels, width)

    def panels(self, first: int, panels: int, width: int) -> None:
        """All products with ``panels`` panels of a width, dealt out to the threads; rows as well, if they are few."""
        p, frame, columns = self.product, self.frame, self.tile.columns
        matrices, work = math.prod(p.batch), p.work * width * panels // p.n
        threads = frame.workers(work, p.m)
        split = matrices * panels < threads and p.m % (threads * self.tile.rows) == 0
        parts = threads if split else 1
        with frame.share("panel", matrices * panels * parts, work) as (worker, item):
            *at, number, part = self.reader.split(item, (*p.batch, panels, parts))
            number = t.iadd(number, first)
            panel = self.panel(tuple(at), worker, number, width)
            start, rows = t.imul(part, p.m // parts), p.m // parts

            def left(row: Any, k: Any) -> t.Expr:
                return self.element(tuple(at), t.iadd(start, row), k)

            def emit(row: Any, column: Any, element: t.Expr) -> None:
                self.emit(tuple(at), t.iadd(start, row), t.iadd(t.imul(number, columns), column), element)

            multiply(frame, rows, (p.k,), self.tile, left, panel, width, emit, self.vector)

    def panel(self, at: Index, worker: Any, number: Any, width: int) -> Matrix:
        """Where the tiles read a panel: made before, in place, or copied now."""
        p, frame, columns = self.product, self.frame, self.tile.columns
        size = columns * p.k
        if self.right in frame.kernel.prepared:
            packed = frame.reader.buffers[frame.kernel.prepared[self.right][0]]
            return Matrix(packed, t.imul(number, size), columns, 1)
        first = t.imul(number, columns)
        lead = contractions.batch_position(at, shape_of(self.right)[:-2])
        matrix = None
        if self.stored is not None:
            buffer, (*steps, row, column) = self.stored
            start: Any = 0
            for i, step in zip(lead, steps, strict=True):
                start = t.iadd(start, t.imul(i, step))
            matrix = Matrix(buffer, start, row, column).from_column(first)
            if column == 1 and p.m <= self.tile.rows and width % self.lanes == 0:
                return matrix
        panel = Matrix(frame.outputs[frame.kernel.scratch[0]], t.imul(worker, size), columns, 1)

        def element(i: Any, j: Any) -> t.Expr:
            return frame.reader.at(self.right, (*lead, i, t.iadd(first, j)))

        copy_panel(frame, element, matrix, p.k, width, panel)
        return panel

    def element(self, at: Index, row: Any, k: Any) -> t.Expr:
        """Of the left operand."""
        shape = shape_of(self.left)
        if self.product.batch:
            return self.reader.at(self.left, (*contractions.batch_position(at, shape[:-2]), row, k))
        return self.reader.at(self.left, (*_position(row, shape[:-1], self.frame), k))

    def emit(self, at: Index, row: Any, column: Any, element: t.Expr) -> None:
        lead = shape_of(self.node.result)[:-1]
        where = (*at, row) if self.product.batch else _position(row, lead, self.frame)
        self.frame.emit((*where, column), element)


def rows_times_vector(kernel: Kernel, name: str, machine: Machine, product: Product) -> Any:
    """A few rows times a transposed matrix: each element a product of two rows, which are read once."""
    frame = Frame(kernel, name, machine)
    code, reader, lanes = frame.code, frame.reader, machine.lanes()
    node = kernel.anchor
    left, right, lead = operand(node), operand(node, 1), shape_of(node.result)[:-1]
    block = next(b for b in (4, 2, 1) if product.n % b == 0)
    whole, rest = divmod(product.k, lanes)

    def take(i: int, c: int, k: Any, lane: Any, column: Any, total: Any) -> None:
        a = reader.at(left, (*_position(i, shape_of(left)[:-1], frame), k))
        b = reader.at(right, (k, t.iadd(column, c)))
        at = t.iadd((i * block + c) * lanes, lane)
        code.store(total, at, t.binary("add", t.load(total, at), t.binary("mul", a, b)))

    with reader.loop("n", product.n // block, frame.parallel(product.work)) as n:
        column = t.imul(n, block)
        total = code.alloc("total", product.m * block * lanes, "float32")
        for part in range(product.m * block):
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                code.store(total, t.iadd(j, part * lanes), t.const(0, "float32"))
        cells = [(i, c) for i in range(product.m) for c in range(block)]
        if whole:
            with reader.loop("k", whole) as k:
                for i, c in cells:
                    with reader.loop("j", lanes, t.VECTORIZED) as j:
                        take(i, c, t.iadd(t.imul(k, lanes), j), j, column, total)
        if rest:
            with reader.loop("r", rest) as r:
                for i, c in cells:
                    take(i, c, t.iadd(whole * lanes, r), 0, column, total)
        for i, c in cells:
            with reader.loop("l", lanes - 1) as lane:
                at = (i * block + c) * lanes
                other = t.load(total, t.iadd(t.iadd(lane, 1), at))
                code.store(total, at, t.binary("add", t.load(total, at), other))
            where = _position(i, lead, frame)
            frame.emit((*where, t.iadd(column, c)), t.load(total, (i * block + c) * lanes))
    return frame.finish()
