"""Matrix products in register tiles: packed panels of the right operand, element-wise operations run on each tile.

The tile is ``rows`` by ``columns`` accumulators, all in vector registers; the panel of the right operand that it meets is
copied once into a contiguous scratch buffer, whatever the operand's layout, so that transposes cost nothing extra.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mithril.graph import Node, Value
from mithril.types import float32
from mithril.types import TensorType
from mithril_cbackend import tir as t
from mithril_cbackend.kernel import Kernel
from mithril_cbackend.lowering import contractions
from mithril_cbackend.lowering.frame import Frame, Machine
from mithril_cbackend.lowering.reader import Index, operand, shape_of

Element = Callable[[Any, Any, Any], t.Expr]  # batch, row (or inner), inner (or column) -> element


@dataclass(frozen=True)
class Product:
    """A product as ``batch`` times [m, k] @ [k, n]."""

    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    shared: bool  # one right operand for the whole batch


def product_of(node: Node) -> Product | None:
    """How a matmul is one of matrices; None where a simple schedule does better."""
    if node.op.name != "matmul" or node.result.dtype is not float32:
        return None
    left, right = shape_of(operand(node)), shape_of(operand(node, 1))
    if len(left) < 2 or len(right) < 2:
        return None
    k, n = right[-2:]
    if len(right) == 2:  # rows of all matrices follow each other
        found = Product((), math.prod(left[:-1]), n, k, True)
    elif left[:-2] == right[:-2]:
        found = Product(left[:-2], left[-2], n, k, False)
    else:
        return None
    small = found.m * found.n * found.k < 512 or found.n < 4
    return None if small or 0 in (found.m, found.n, found.k) else found


def tile(product: Product, machine: Machine) -> tuple[int, int]:
    """Rows and columns of the accumulators: as many vectors as there are registers for."""
    lanes = machine.lanes()
    vectors = 1 if product.n <= lanes else 2
    rows = 8 if machine.vector_bytes == 64 else 4
    if vectors == 1:
        rows *= 2
    return min(rows, product.m), vectors * lanes


def packs(product: Product, kernel: Kernel) -> bool:
    """Whether the right operand is copied to panels: it pays as soon as a panel is used several times."""
    return product.m >= 4 or transposed(kernel)


def transposed(kernel: Kernel) -> bool:
    right = operand(kernel.anchor, 1)
    made = kernel.producers.get(right)
    return made is not None and made.op.name == "transpose"


def panels(product: Product, columns: int) -> int:
    return -(-product.n // columns)


def scratch(node: Node, machine: Machine) -> list[Value]:
    """The buffer for packed panels."""
    product = product_of(node)
    if product is None:
        return []
    columns = tile(product, machine)[1]
    size = math.prod(product.batch) * panels(product, columns) * columns * product.k
    return [Value("packed", TensorType(float32, (size,)))]


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
    if len(shape) == 1:
        return (at,)
    if sum(n != 1 for n in shape) <= 1:
        place = max(range(len(shape)), key=lambda k: shape[k])
        return tuple(at if k == place and shape[k] != 1 else 0 for k in range(len(shape)))
    out, stride = [], math.prod(shape)
    for k, n in enumerate(shape):
        stride //= n
        i = t.idiv(at, stride)
        out.append(frame.reader.position(t.imod(i, n) if k else i))
    return tuple(out)


class Tiles:
    """The loops over panels and tiles."""

    def __init__(self, frame: Frame, product: Product, machine: Machine) -> None:
        self.frame, self.product, self.machine = frame, product, machine
        self.code, self.reader = frame.code, frame.reader
        self.node = frame.kernel.anchor
        self.rows, self.columns = tile(product, machine)
        self.lanes = machine.lanes()
        self.packed = frame.outputs[frame.kernel.scratch[0]]
        self.left, self.right = operand(self.node), operand(self.node, 1)

    def a(self, batch: Index, row: Any, inner: Any) -> t.Expr:
        if self.product.batch:
            return self.reader.at(self.left, (*batch, row, inner))
        return self.reader.at(self.left, (*_position(row, shape_of(self.left)[:-1], self.frame), inner))

    def write(self) -> None:
        p, reader = self.product, self.reader
        whole, rest = divmod(p.n, self.columns)
        work = p.m * p.n * p.k
        kinds = {0: self.frame.parallel(work)} if p.batch else {}
        with reader.nest("", list(p.batch), kinds) as batch:
            number = reader.flat(batch, p.batch) if p.batch else 0
            start = t.imul(number, panels(p, self.columns) * self.columns * p.k)
            if whole:
                kind = t.SERIAL if p.batch else self.frame.parallel(work)
                with reader.loop("panel", whole, kind) as panel:
                    self.panel(batch, start, panel, self.columns)
            if rest:
                self.panel(batch, start, whole, rest)

    def panel(self, batch: Index, start: Any, panel: Any, width: int) -> None:
        p, reader = self.product, self.reader
        base = t.iadd(start, t.imul(panel, self.columns * p.k))
        first = t.imul(panel, self.columns)
        self.pack(batch, base, first, width)
        whole, rest = divmod(p.m, self.rows)
        if whole:
            with reader.loop("tile", whole) as i:
                self.tile(batch, base, t.imul(i, self.rows), self.rows, first, width)
        if rest:
            self.tile(batch, base, whole * self.rows, rest, first, width)

    def pack(self, batch: Index, base: Any, first: Any, width: int) -> None:
        """One panel of the right operand, padded with zeros to whole vectors."""
        p, reader, code = self.product, self.reader, self.code
        padded = -(-width // self.lanes) * self.lanes

        def copy(k: Any, j: Any) -> None:
            at = (*(batch if p.batch else ()), k, reader.position(t.iadd(first, j)))
            code.store(self.packed, t.iadd(base, t.iadd(t.imul(k, self.columns), j)), reader.at(self.right, at))

        if transposed(self.frame.kernel):
            block = 16
            blocks, left = divmod(p.k, block)
            if blocks:
                with reader.loop("ko", blocks) as ko, reader.loop("j", width) as j, reader.loop("ki", block) as ki:
                    copy(t.iadd(t.imul(ko, block), ki), j)
            if left:
                with reader.loop("j", width) as j, reader.loop("ki", left) as ki:
                    copy(t.iadd(ki, blocks * block), j)
        else:
            with reader.loop("k", p.k) as k:
                full = width // self.lanes
                if full:
                    with reader.loop("v", full) as v, reader.loop("j", self.lanes, t.VECTORIZED) as j:
                        copy(k, t.iadd(t.imul(v, self.lanes), j))
                if width % self.lanes:
                    with reader.loop("j", width % self.lanes) as j:
                        copy(k, t.iadd(full * self.lanes, j))
        if padded > width:
            with reader.loop("k", p.k) as k, reader.loop("j", padded - width) as j:
                at = t.iadd(base, t.iadd(t.imul(k, self.columns), t.iadd(j, width)))
                code.store(self.packed, at, t.const(0, "float32"))

    def tile(self, batch: Index, base: Any, row: Any, rows: int, first: Any, width: int) -> None:
        """One tile of the result."""
        p, reader, code, lanes = self.product, self.reader, self.code, self.lanes
        vectors = -(-width // lanes)
        total = code.alloc("tile", rows * vectors * lanes, "float32")

        def slot(i: int, v: int) -> int:
            return (i * vectors + v) * lanes

        for i in range(rows):
            for v in range(vectors):
                with reader.loop("j", lanes, t.VECTORIZED) as j:
                    code.store(total, t.iadd(j, slot(i, v)), t.const(0, "float32"))
        with reader.loop("k", p.k) as k:
            elements = [self.a(batch, t.iadd(row, i), k) for i in range(rows)]
            for i in range(rows):
                for v in range(vectors):
                    with reader.loop("j", lanes, t.VECTORIZED) as j:
                        b = t.load(self.packed, t.iadd(base, t.iadd(t.imul(k, self.columns), t.iadd(j, v * lanes))))
                        at = t.iadd(j, slot(i, v))
                        code.store(total, at, t.binary("add", t.load(total, at), t.binary("mul", elements[i], b)))
        self.store(batch, row, rows, first, width, total, slot)

    def store(self, batch: Index, row: Any, rows: int, first: Any, width: int, total: Any, slot: Any) -> None:
        from mithril_cbackend.lowering.elementwise import vectorisable

        p, reader, lanes = self.product, self.reader, self.lanes
        follow = [n for n in self.frame.kernel.nodes if n is not self.node and n.result is not self.right]
        vector = t.VECTORIZED if vectorisable([n for n in follow if n.result is not self.left]) else t.SERIAL
        lead = shape_of(self.node.result)[:-1]
        for i in range(rows):
            where = (*batch, t.iadd(row, i)) if p.batch else _position(t.iadd(row, i), lead, self.frame)
            for v in range(width // lanes):
                with reader.loop("j", lanes, vector) as j:
                    column = t.iadd(first, t.iadd(j, v * lanes))
                    self.frame.emit((*where, column), t.load(total, t.iadd(j, slot(i, v))))
            if width % lanes:
                v = width // lanes
                with reader.loop("j", width % lanes) as j:
                    column = t.iadd(first, t.iadd(j, v * lanes))
                    self.frame.emit((*where, column), t.load(total, t.iadd(j, slot(i, v))))


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

    with reader.loop("n", product.n // block, frame.parallel(product.m * product.n * product.k)) as n:
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
