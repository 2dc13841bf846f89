"""Sorting along an axis, and selection of its first elements, by integer keys that are in order.

Keys of equal elements are equal, and every method is stable. Short rows are ranked by comparing all pairs in vectors,
long rows are sorted digit by digit, and a few first elements of a long row are kept in a sorted block while it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mithril import ops
from mithril.graph import DType, TensorType, Value, int32, int64
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine

SHORT = 64  # elements of a row that are ranked faster than the counts of all digits are cleared and added up
BLOCK = 64  # first elements of a row that are kept faster in order than all elements are sorted
GROUP = 4  # vectors of keys that are compared with the last key of the block at once
DIGITS = 256  # values of a digit of a key, which has 8 bits
Key = Callable[[Any], t.Expr]  # position along the axis -> key of the element


def key_dtype(dtype: DType) -> DType:
    return int64 if dtype.bits == 64 else int32


def key_of(code: t.Code, x: t.Expr, dtype: DType, descending: bool) -> t.Expr:
    """Return an integer that is smaller the earlier the element is in the sorted order; nan is last."""
    kind = key_dtype(dtype)

    def number(value: int) -> t.Expr:
        return t.const(value, kind.name)

    if dtype.is_float:
        x = code.let(x, "x")
        zero = t.const(0.0, x.dtype)
        word = code.let(t.bits(t.select(t.equal(x, zero), zero, x), kind.name), "word")  # both zeros are equal
        # The bits of negative floats are in reverse order.
        key = word ^ word >> number(kind.bits - 1) & number(kind.limits[1])
    elif dtype.kind == "uint" and dtype.bits == kind.bits:
        key = t.cast(x ^ t.const(1 << kind.bits - 1, dtype.name), kind.name)
    else:
        key = t.cast(x, kind.name)
    key = ~key if descending else key
    return code.let(t.select(t.isnan(x), number(kind.limits[1]), key) if dtype.is_float else key, "key")


def selects(kernel: Kernel) -> bool:
    """Whether a block keeps the first elements of a row, so that the row is not sorted."""
    n = shape_of(operand(kernel.anchor))[kernel.anchor.attributes["axis"]]
    is_short = isinstance(n, int) and n <= SHORT
    return kernel.anchor.op is ops.top_k and kernel.anchor.attributes["k"] <= BLOCK and not is_short


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return the buffers of each thread: keys and positions before and after a digit, and counts of all digits."""
    x = operand(kernel.anchor)
    n, kind = shape_of(x)[kernel.anchor.attributes["axis"]], key_dtype(x.dtype)
    if selects(kernel) or (isinstance(n, int) and n <= SHORT):
        return []
    sizes = {"keys": (kind, 2 * n), "places": (int32, 2 * n), "counts": (int32, kind.bits // 8 * DIGITS)}
    return [Value(name, TensorType(dtype, (size * machine.threads,))) for name, (dtype, size) in sizes.items()]


@lowers(ops.sort, ops.argsort, ops.top_k, scratch=scratch)
def sorting(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``sort``, ``argsort`` and ``top_k``."""
    frame = KernelBuilder(kernel, name, machine)
    node, reader, x = kernel.anchor, frame.reader, operand(kernel.anchor)
    shape, axis = shape_of(x), node.attributes["axis"]
    outer_axes = [k for k in range(len(shape)) if k != axis]
    sizes = [shape[k] for k in outer_axes]
    first_ones = node.attributes["k"] if node.op is ops.top_k else shape[axis]
    descending = node.op is ops.top_k or node.attributes["descending"]
    with frame.share("row", math.prod(sizes), math.prod(shape)) as (worker, row):
        coordinates = dict(zip(outer_axes, reader.split(row, sizes), strict=True))

        def index_of(position: Any) -> Index:
            return tuple({**coordinates, axis: position}[k] for k in range(len(shape)))

        def key(position: Any) -> t.Expr:
            return key_of(frame.code, reader.at(x, index_of(position)), x.dtype, descending)

        rows = Rows(frame, key, shape[axis], axis == len(shape) - 1, worker)
        if selects(kernel):
            place = rows.select(first_ones)
        else:
            place = rows.by_digits() if kernel.scratch else rows.by_ranks()
        with reader.loop("i", first_ones) as i:
            position = frame.code.let(place(i), "place")
            for v in kernel.outputs:
                is_position = node.op is ops.argsort or v in node.results[1:]
                frame.write(v, index_of(i), position if is_position else reader.at(x, index_of(position)))
    return frame.finish()


class Rows:
    """A row of ``n`` keys; each method returns the position of the i-th element of its sorted order as a function."""

    def __init__(self, frame: KernelBuilder, key: Key, n: Any, is_contiguous: bool, worker: Any) -> None:
        self.frame, self.code, self.reader = frame, frame.code, frame.reader
        self.key, self.n, self.worker = key, n, worker
        self.kind = key_dtype(operand(frame.kernel.anchor).dtype)
        self.lanes = frame.machine.lanes(self.kind.bits)
        self.vectors = t.VECTORIZED if is_contiguous else t.SERIAL

    def number(self, value: int) -> t.Expr:
        return t.const(value, self.kind.name)

    def each_key(self, store: Callable[[Any, t.Expr], None]) -> None:
        """Compute all keys, in vectors where elements are contiguous."""
        vectors = self.n // self.lanes
        with self.reader.loop("v", vectors) as v, self.reader.loop("j", self.lanes, self.vectors) as j:
            i = v * self.lanes + j
            store(i, self.key(i))
        with self.reader.loop("r", self.n % self.lanes) as r:
            i = self.reader.position(vectors * self.lanes + r)
            store(i, self.key(i))

    # -- all pairs ----------------------------------------------------------------------------------------------------
    def by_ranks(self) -> Callable[[Any], t.Expr]:
        """Count the elements that precede each one, which is its place in the order."""
        code, reader, lanes, kind = self.code, self.reader, self.lanes, self.kind.name
        size = -(-self.n // lanes) * lanes
        keys, ranks = code.alloc("keys", size, kind), code.alloc("ranks", size, kind)
        places = code.alloc("places", self.n, "int32")
        self.each_key(lambda i, key: code.store(keys, i, key))
        for first, width in ((self.n, size - self.n), (0, size)):
            with reader.loop("i", width) as i:
                code.store(keys if first else ranks, i + first, self.number(0))
        with reader.loop("other", self.n) as other:
            compared = code.let(t.load(keys, other), "compared")
            with reader.loop("v", size // lanes) as v, reader.loop("j", lanes, t.VECTORIZED) as j:
                i = v * lanes + j
                key = code.let(t.load(keys, i), "key")
                precedes = (compared < key) | t.equal(compared, key) & (t.index(other) < i)
                code.store(ranks, i, t.load(ranks, i) + t.select(precedes, self.number(1), self.number(0)))
        with reader.loop("i", self.n) as i:
            code.store(places, t.cast(t.load(ranks, i), "int32"), t.index(i))
        return lambda i: t.load(places, i)

    # -- digits -------------------------------------------------------------------------------------------------------
    def by_digits(self) -> Callable[[Any], t.Expr]:
        """Sort by the digits of the keys, the last digit first."""
        code, reader, n, digits = self.code, self.reader, t.index(self.n), self.kind.bits // 8
        keys, places, counts = (self.frame.outputs[v] for v in self.frame.kernel.scratch)
        worker = t.index(self.worker)
        start, tables = code.let(worker * (n * 2), "start"), worker * (digits * DIGITS)
        with reader.loop("i", digits * DIGITS) as i:
            code.store(counts, tables + i, t.index(0))

        def store(i: Any, key: t.Expr) -> None:
            code.store(keys, start + i, key)
            code.store(places, start + i, t.index(i))

        self.each_key(store)

        def count_at(digit: int, key: t.Expr) -> t.Expr:
            bits = key >> self.number(8 * digit) & self.number(DIGITS - 1)
            if digit == digits - 1:
                bits = bits ^ self.number(DIGITS // 2)  # negative keys come first
            return code.let(tables + digit * DIGITS + t.cast(bits, "int32"), "at")

        with reader.loop("i", n) as i:
            key = code.let(t.load(keys, start + i), "key")
            for digit in range(digits):
                slot = count_at(digit, key)
                code.store(counts, slot, t.load(counts, slot) + 1)
        side = code.alloc("side", 1, "int32")
        code.store(side, 0, t.index(0))
        for digit in range(digits):
            before = code.let(start + t.load(side, 0) * n, "before")
            is_shared = t.equal(t.load(counts, count_at(digit, t.load(keys, before))), n)
            with code.when(~is_shared), reader.loop("once", 1):
                after = code.let(start + (1 - t.load(side, 0)) * n, "after")
                self._move(
                    keys, places, counts, tables + digit * DIGITS, before, after, lambda k, d=digit: count_at(d, k)
                )
                code.store(side, 0, 1 - t.load(side, 0))
        sorted_at = code.let(start + t.load(side, 0) * n, "sorted_at")
        return lambda i: t.load(places, sorted_at + i)

    def _move(
        self, keys: Any, places: Any, counts: Any, table: Any, before: Any, after: Any, count_at: Callable[..., t.Expr]
    ) -> None:
        """Move keys and positions to the places that the counts of one digit give."""
        code, reader = self.code, self.reader
        total = code.alloc("total", 1, "int32")
        code.store(total, 0, t.index(0))
        with reader.loop("c", DIGITS) as c:
            count, first = code.let(t.load(counts, table + c), "count"), code.let(t.load(total, 0), "first")
            code.store(counts, table + c, first)
            code.store(total, 0, first + count)
        with reader.loop("i", self.n) as i:
            key = code.let(t.load(keys, before + i), "key")
            slot = count_at(key)
            target = code.let(t.load(counts, slot), "target")
            code.store(counts, slot, target + 1)
            code.store(keys, after + target, key)
            code.store(places, after + target, t.load(places, before + i))

    # -- a sorted block -----------------------------------------------------------------------------------------------
    def select(self, k: int) -> Callable[[Any], t.Expr]:
        """Keep the first ``k`` elements in a sorted block; most keys are only compared with its last one."""
        code, reader, lanes, kind = self.code, self.reader, self.lanes, self.kind
        size, group = -(-k // lanes) * lanes, GROUP * lanes
        # Before the first element there is a key that precedes all others.
        blocks = [(code.alloc("best", lanes + size, d), code.alloc("next", size, d)) for d in (kind.name, "int32")]
        best, places = (block for block, _ in blocks)
        for block, dtype in ((best, kind), (places, int32)):
            with reader.loop("i", lanes + size) as i:
                code.store(block, i, t.const(kind.limits[0] if block is best else 0, dtype.name))

        def insert(key: t.Expr, position: t.Expr) -> None:
            with reader.loop("v", size // lanes) as v, reader.loop("j", lanes, t.VECTORIZED) as j:
                i = v * lanes + j
                current, left = (code.let(t.load(best, i + step), "at") for step in (lanes, lanes - 1))
                # The first elements are all kept: places after them are still empty.
                stays = code.let((current <= key) & (t.index(i) < position), "stays")
                follows = code.let((left <= key) & (t.index(i) <= position), "follows")
                for (block, after), new in zip(blocks, (key, position), strict=True):
                    neighbor = t.select(follows, new, t.load(block, i + (lanes - 1)))
                    code.store(after, i, t.select(stays, t.load(block, i + lanes), neighbor))
            for block, after in blocks:
                with reader.loop("v", size // lanes) as v, reader.loop("j", lanes, t.VECTORIZED) as j:
                    code.store(block, v * lanes + j + lanes, t.load(after, v * lanes + j))

        def consider(position: Any) -> None:
            position = t.index(position)
            key = self.key(position)
            with code.when(key < t.load(best, lanes + k - 1)), reader.loop("once", 1):
                insert(key, position)

        with reader.loop("i", k) as i:
            insert(self.key(i), t.index(i))
        groups = (self.n - k) // group
        with reader.loop("g", groups) as g:
            minimum = code.alloc("minimum", lanes, kind.name)
            for vector in range(GROUP):
                with reader.loop("j", lanes, self.vectors) as j:
                    key = self.key(g * group + (k + vector * lanes) + j)
                    code.store(minimum, j, _smaller(t.load(minimum, j), key) if vector else key)
            width = lanes
            while width > 1:
                width //= 2
                with reader.loop("j", width, t.VECTORIZED) as j:
                    code.store(minimum, j, _smaller(t.load(minimum, j), t.load(minimum, j + width)))
            with code.when(t.load(minimum, 0) < t.load(best, lanes + k - 1)), reader.loop("i", group) as i:
                consider(g * group + k + i)
        with reader.loop("r", (self.n - k) % group) as r:
            consider(groups * group + k + r)
        return lambda i: t.load(places, i + lanes)


def _smaller(a: t.Expr, b: t.Expr) -> t.Expr:
    return t.select(a < b, a, b)
