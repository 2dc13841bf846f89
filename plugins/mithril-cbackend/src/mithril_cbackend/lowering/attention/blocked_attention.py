"""Blocked attention: scores, weights and results of one block of queries at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.graph import Op, Size, Value, float32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.attention.attention_match import Attention, causal_limits
from mithril_cbackend.lowering.element import vector_math
from mithril_cbackend.lowering.element.element_reader import Index, clamped, operand, shape_of
from mithril_cbackend.lowering.element.elementwise import inner_loop
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS, KernelBuilder, Machine
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.element.views import view, view_strides
from mithril_cbackend.lowering.matmul import naive_contractions
from mithril_cbackend.lowering.matmul.microkernel import Matrix, Tile, copy_packed_block, count, multiply, tile_for
from mithril_cbackend.lowering.rows import reductions

BLOCK = 32  # queries per block, at most
SCORES = 1 << 15  # elements of a block's scores, which share the L2 cache with keys and values
ROWS_AT_ONCE = 4  # rows of scores in one softmax loop
LAST = (2, 8, 16)  # tiles for the last queries of a symbolic number
LIKELY = 64  # queries and keys, for which the number of threads is selected if they are symbolic
MANY_KEYS = 1 << 10  # tiles for a symbolic number of keys are those for this number
MAX_DECODE_QUERIES = 3  # up to this number of queries, packing the keys does not pay off


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention.

    Each head of ``heads`` has separate keys and values, which the query heads of ``sharing`` share.
    """

    heads: tuple[int, ...]
    sharing: tuple[int, ...]
    queries: Any  # an int or symbolic, like the number of keys
    keys: Any
    inner: int  # size of queries and keys
    outer: int  # size of values
    block: int
    keys_tile: Tile
    values_tile: Tile
    reads_unpacked: bool  # keys and values are read unpacked

    @staticmethod
    def of(kernel: Kernel, attention: Attention, machine: Machine, queries: int | None = None) -> Sizes:
        """Return the sizes of an attention, or those of its variant for a number of queries."""
        *batch, any_queries, keys = shape_of(attention.scores)
        queries = any_queries if queries is None else queries
        inner, outer = shape_of(operand(attention.first))[-1], shape_of(attention.second.result)[-1]
        head_axes = 0  # leading axes on which keys or values depend
        for product in (attention.first, attention.second):
            lead = shape_of(operand(product, 1))[:-2]
            lead = (*[1] * (len(batch) - len(lead)), *lead)
            head_axes = max([head_axes, *(k + 1 for k, n in enumerate(lead) if n != 1)])
        block = block_of(queries, keys)
        rows = block if isinstance(queries, int) else queries
        tiles = tile_for(rows, keys if isinstance(keys, int) else MANY_KEYS, machine), tile_for(rows, outer, machine)
        lanes = machine.lanes()
        strides = [view(kernel.producers, operand(product, 1)) for product in (attention.first, attention.second)]
        unit_strides = [
            operand_view is not None and operand_view[1][k] == 1
            for operand_view, k in zip(strides, (-2, -1), strict=True)
        ]
        # Verifying two tokens packed the whole cache: 1.35 of an exact program, 1.03 without packing
        # (commit 9e9b011d).
        is_short = isinstance(queries, int) and isinstance(keys, int) and queries <= MAX_DECODE_QUERIES
        full_vectors = lanes > 1 and is_short and keys >= lanes and inner % lanes == outer % lanes == 0
        reads_unpacked = full_vectors and all(unit_strides)
        return Sizes(
            tuple(batch[:head_axes]),
            tuple(batch[head_axes:]),
            queries,
            keys,
            inner,
            outer,
            block,
            *tiles,
            reads_unpacked,
        )

    @property
    def row(self) -> Any:
        """Elements of a row of scores, rounded up to whole packed blocks."""
        return count(self.keys, self.keys_tile.columns) * self.keys_tile.columns

    def parts(self, machine: Machine) -> dict[str, Any]:
        """Return the buffers of a thread with their sizes in elements, rounded up to whole vectors."""
        columns, lanes = self.values_tile.columns, machine.lanes()
        sizes = {"query": self.block * self.inner, "scores": self.block * self.row, "factors": self.block}
        if not self.reads_unpacked:
            sizes |= {"keys": self.row * self.inner, "values": count(self.outer, columns) * columns * self.keys}
        return {name: count(n, lanes) * lanes for name, n in sizes.items()}


def block_of(queries: Any, keys: Any) -> int:
    """Return the number of queries in a block, equal for all blocks if the number of queries is known."""
    # Multiples of 8, the rows of a tile; at least 8, since with fewer queries the packed keys are
    # read for little work.
    max_block = min(BLOCK, max(8, SCORES // keys // 8 * 8)) if isinstance(keys, int) else BLOCK
    if not isinstance(queries, int):
        return max_block
    return min(queries, count(count(queries, count(queries, max_block)), 8) * 8)


def whole_and_rest(size: Size, parts: int) -> tuple[Any, Any]:
    """Return quotient and remainder, of a symbolic size as expressions."""
    if isinstance(size, int):
        return divmod(size, parts)
    return t.index(size) // parts, t.index(size) % parts


class BlockedAttention:
    """Loops over heads and blocks of queries."""

    def __init__(self, frame: KernelBuilder, attention: Attention, sizes: Sizes) -> None:
        self.frame, self.attention, self.sizes = frame, attention, sizes
        self.code, self.reader, self.lanes = frame.code, frame.reader, frame.machine.lanes()
        self.query, self.keys = operand(attention.first), operand(attention.first, 1)
        self.values = operand(attention.second, 1)
        producers, nodes = frame.kernel.producers, set(frame.kernel.nodes)
        self.limits = causal_limits(producers, attention)
        excluded = {attention.first, attention.second, *attention.softmax, *attention.guard, *self.chain}
        self.vector = vectorizable([n for n in nodes if n not in excluded])
        self.buffer = frame.outputs[frame.kernel.scratch[0]]
        self.parts = sizes.parts(frame.machine)

    @property
    def chain(self) -> list[Any]:
        """Layout ops after the second product."""
        producers, value, chain = self.frame.kernel.producers, self.frame.kernel.outputs[0], []
        while value is not self.attention.second.result:
            chain.append(producers[value])
            value = operand(producers[value])
        return chain[::-1]

    def write(self) -> None:
        s, frame = self.sizes, self.frame
        heads, blocks, is_exact = math.prod(s.heads), s.queries // s.block, isinstance(s.queries, int)
        queries, keys = (n if isinstance(n, int) else LIKELY for n in (s.queries, s.keys))
        products = heads * math.prod(s.sharing) * queries * keys * (s.inner + s.outer)
        work = products // PRODUCTS
        threads = frame.workers(work, frame.machine.threads)
        # Threads share heads where they divide evenly: each packs its keys once. Otherwise all threads
        # work on each head, and pack its keys several times.
        parts = threads if is_exact and heads % threads and blocks >= threads else 1  # split heads if uneven
        with frame.share("head", heads * parts, work) as (worker, item):
            *head, part = self.reader.split(item, (*s.heads, parts))
            start = worker * sum(self.parts.values())
            self.offsets: dict[str, Any] = {}
            for name, elements in self.parts.items():
                self.offsets[name], start = start, self.reader.position(start + elements)
            self.prepare(tuple(head))
            with self.reader.nest("", s.sharing) as sharing:
                lead = (*head, *sharing)
                if is_exact:
                    self.equal_blocks(lead, blocks, part, parts)
                else:
                    self.blocks_of_any_number(lead)

    def equal_blocks(self, lead: Index, blocks: int, part: Any, parts: int) -> None:
        s = self.sizes
        num_blocks = blocks // parts if blocks % parts == 0 else (blocks + parts - 1 - part) // parts
        with self.reader.loop("block", num_blocks) as k:
            first = (k * parts + part) * s.block
            self.block(lead, self.reader.position(first), s.block)
        if s.queries % s.block:
            self.last_block(lead, part, parts)

    def blocks_of_any_number(self, lead: Index) -> None:
        """Compute blocks whose number of queries is known when the program runs."""
        s = self.sizes
        with self.reader.loop("block", count(s.queries, s.block)) as k:
            first = self.reader.position(k * s.block)
            left = t.index(s.queries) - first
            self.block(lead, first, self.reader.position(t.select(left < s.block, left, t.index(s.block))))

    def last_block(self, lead: Index, part: Any, parts: int) -> None:
        """Compute the last, smaller block in the last part."""
        s = self.sizes
        rest = s.queries % s.block
        if parts == 1:
            self.block(lead, s.queries - rest, rest)
            return
        is_last_part = t.equal(t.index(part), parts - 1)
        with self.code.when(is_last_part), self.reader.loop("last", 1):
            self.block(lead, s.queries - rest, rest)

    # -- what all blocks of a head read ---------------------------------------------------------------------------
    def matrix(self, value: Value, head: Index) -> Matrix | None:
        """Return the operand of this head as a matrix, or None if it is computed."""
        operand_view = view(self.frame.kernel.producers, value)
        buffer = None if operand_view is None else self.reader.buffers.get(operand_view[0])
        if operand_view is None or buffer is None:
            return None
        *steps, row, column = operand_view[1]
        start: Any = 0
        for i, step in zip(naive_contractions.batch_position(head, shape_of(value)[:-2]), steps, strict=True):
            start = start + i * step
        return Matrix(buffer, start, row, column)

    def packed_blocks(self, value: Value, head: Index, part: str, rows: int, columns: int, tile: Tile) -> None:
        """Copy a [rows, columns] operand to packed blocks of the tile's width."""
        stored, size = self.matrix(value, head), tile.columns * rows
        lead = naive_contractions.batch_position(head, shape_of(value)[:-2])

        def copy(number: Any, width: int) -> None:
            first = number * tile.columns
            packed_block = Matrix(self.buffer, self.offsets[part] + number * size, tile.columns, 1)

            def element(i: Any, j: Any) -> t.Expr:
                return self.reader.at(value, (*lead, i, first + j))

            matrix = None if stored is None else stored.from_column(first)
            copy_packed_block(self.frame, element, matrix, rows, width, packed_block)

        full_packed_blocks, rest = whole_and_rest(columns, tile.columns)
        if full_packed_blocks != 0:
            with self.reader.loop("packed_block", full_packed_blocks) as number:
                copy(number, tile.columns)
        if rest != 0:
            with self.present(rest):
                copy(full_packed_blocks, rest)

    @contextmanager
    def present(self, rest: Any) -> Iterator[None]:
        """Write code that runs if there is a rest."""
        if isinstance(rest, int):
            yield
            return
        with self.code.when(rest > 0), self.reader.loop("last", 1):
            yield

    def prepare(self, head: Index) -> None:
        s, full = self.sizes, (*head, *[0] * len(self.sizes.sharing))
        self.packed_blocks(self.keys, full, "keys", s.inner, s.keys, s.keys_tile)
        self.packed_blocks(self.values, full, "values", s.keys, s.outer, s.values_tile)

    # -- a block of queries ---------------------------------------------------------------------------------------
    def block(self, lead: Index, first: Any, rows: int) -> None:
        packed_blocks = self.visible_packed_blocks(lead, first + (rows - 1))
        self.copy_queries(lead, first, rows)
        self.mask_tail(rows)
        self.score(lead, first, rows, packed_blocks)
        self.softmax_block(rows, packed_blocks)
        self.multiply_values(lead, first, rows, packed_blocks)

    def mask_tail(self, rows: int) -> None:
        """Mask the columns after the last key with minus infinity."""
        s = self.sizes
        if s.row != s.keys:
            with self.reader.loop("row", rows) as row, self.reader.loop("j", s.row - s.keys) as j:
                offset = self.offsets["scores"] + row * s.row + (j + s.keys)
                self.code.store(self.buffer, offset, t.const(-math.inf, "float32"))

    def visible_packed_blocks(self, lead: Index, query: Any) -> Any:
        """Return the number of packed blocks visible up to a query, at least one: fully masked rows give nan."""
        s, columns = self.sizes, self.sizes.keys_tile.columns
        total = s.row // columns
        packed_blocks: Any = total if isinstance(total, int) else None
        for value, extra in self.limits:
            keys = self.reader.broadcast(value, (*lead, query, 0))
            last = clamped(self.reader, keys + (extra - 1), 0, s.keys - 1)
            visible = self.reader.position(last // columns + 1)
            if packed_blocks is None or isinstance(packed_blocks, int):
                packed_blocks = visible
            else:
                packed_blocks = self.reader.position(t.select(visible < packed_blocks, visible, packed_blocks))
        return self.reader.position(t.index(total)) if packed_blocks is None else packed_blocks

    def copy_queries(self, lead: Index, first: Any, rows: int) -> None:
        shape, inner = shape_of(self.query), self.sizes.inner
        vectors = self.lanes if vectorizable(self.nodes_of(self.query)) else 0
        with self.reader.loop("row", rows) as row:

            def copy(index: Index) -> None:
                source = (*naive_contractions.batch_position(lead, shape[:-2]), first + row, index[-1])
                target = self.offsets["query"] + row * inner + index[-1]
                self.code.store(self.buffer, target, self.reader.at(self.query, source))

            inner_loop(self.frame, (), inner, vectors, copy)

    def nodes_of(self, value: Value) -> list[Any]:
        """Return the nodes of this kernel that compute a value."""
        producers, nodes, pending = self.frame.kernel.producers, [], [value]
        while pending:
            node = producers.get(pending.pop())
            if node is not None:
                nodes.append(node)
                pending += [v for v in node.operands if v is not None]
        return nodes

    def score(self, lead: Index, first: Any, rows: int, packed_blocks: Any) -> None:
        s, tile, product = self.sizes, self.sizes.keys_tile, self.attention.first.result

        def left(row: Any, k: Any) -> t.Expr:
            return t.load(self.buffer, self.offsets["query"] + row * s.inner + k)

        def score_packed_block(number: Any, width: int) -> None:
            begin = number * tile.columns
            packed_block = Matrix(self.buffer, self.offsets["keys"] + begin * s.inner, tile.columns, 1)

            def emit(row: Any, column: Any, element: t.Expr) -> None:
                key = begin + column
                index = (*lead, first + row, key)
                self.reader.define(product, index, self.code.let(element, product.name))
                target = self.offsets["scores"] + row * s.row + key
                self.code.store(self.buffer, target, self.reader.at(self.attention.scores, index))

            multiply(self.frame, rows, (s.inner,), tile, left, packed_block, width, emit, self.vector, LAST)

        full_packed_blocks, rest = whole_and_rest(s.keys, tile.columns)
        if isinstance(packed_blocks, int) or (isinstance(rest, int) and not rest):
            if full_packed_blocks:
                with self.reader.loop(
                    "packed_block", full_packed_blocks if isinstance(packed_blocks, int) else packed_blocks
                ) as number:
                    score_packed_block(number, tile.columns)
            if rest:
                score_packed_block(full_packed_blocks, rest)
            return
        if full_packed_blocks != 0:
            num_packed_blocks = t.select(packed_blocks < full_packed_blocks, packed_blocks, t.index(full_packed_blocks))
            with self.reader.loop("packed_block", self.reader.position(num_packed_blocks)) as number:
                score_packed_block(number, tile.columns)
        with self.code.when(packed_blocks > full_packed_blocks), self.reader.loop("last", 1):
            score_packed_block(full_packed_blocks, rest)

    def softmax_block(self, rows: int, packed_blocks: Any) -> None:
        """Replace scores by exp(score - max), and save the reciprocal of each row's sum."""
        for first, num_groups, group_size in (
            (0, rows // ROWS_AT_ONCE, ROWS_AT_ONCE),
            (rows - rows % ROWS_AT_ONCE, rows % ROWS_AT_ONCE, 1),
        ):
            if num_groups:
                with self.reader.loop("row", num_groups) as k:
                    begin = k * group_size + first
                    self.softmax_rows([begin + n for n in range(group_size)], packed_blocks)

    def softmax_rows(self, rows: list[Any], packed_blocks: Any) -> None:
        """Compute several rows together, to hide the latency of their reductions."""
        code, reader, buffer, row = self.code, self.reader, self.buffer, self.sizes.row
        starts = [reader.position(self.offsets["scores"] + k * row) for k in rows]

        def update_max(best: t.Expr, offset: Any, i: int) -> t.Expr:
            return reductions.fold(code, ops.max, best, t.load(buffer, offset), float32)

        def update_sum(total: t.Expr, offset: Any, i: int) -> t.Expr:
            score = code.let(t.load(buffer, offset) - row_max[i], "score")
            weight = code.let(vector_math.exp_of_negative(code, score), "weight")
            code.store(buffer, offset, weight)
            return total + weight

        row_max = self.reduce_rows(ops.max, starts, packed_blocks, update_max)
        sums = self.reduce_rows(ops.sum, starts, packed_blocks, update_sum)
        for k, total in zip(rows, sums, strict=True):
            factor = t.const(1.0, "float32") / total
            code.store(buffer, self.offsets["factors"] + k, factor)

    def reduce_rows(self, op: Op, starts: list[Any], packed_blocks: Any, update: Any) -> list[t.Expr]:
        """Reduce the rows of scores that begin at ``starts``."""
        code, reader, columns = self.code, self.reader, self.sizes.keys_tile.columns
        totals = [code.alloc(op.name, columns, "float32") for _ in starts]
        for total in totals:
            with reader.loop("j", columns, t.VECTORIZED) as j:
                code.store(total, j, reductions.identity(op, float32))
        with reader.loop("packed_block", packed_blocks) as number:
            for i, (start, total) in enumerate(zip(starts, totals, strict=True)):
                for v in range(columns // self.lanes):
                    with reader.loop("j", self.lanes, t.VECTORIZED) as j:
                        slot = j + v * self.lanes
                        offset = start + number * columns + slot
                        code.store(total, slot, update(t.load(total, slot), offset, i))
        results = [reductions.reduce_lanes(self.frame, op, total, columns, float32, 0) for total in totals]
        return [code.let(x, op.name) for x in results]

    def multiply_values(self, lead: Index, first: Any, rows: int, packed_blocks: Any) -> None:
        """Multiply weights with values, scale by the row factors and write the result in its final layout."""
        s, tile = self.sizes, self.sizes.values_tile
        keys = self.num_keys(packed_blocks)
        strides = view_strides(self.chain, self.attention.second.result)
        assert strides is not None
        *steps, row_step, column_step = strides
        start = first * row_step
        for i, step in zip(lead, steps, strict=True):
            start = start + i * step
        result = Matrix(self.frame.outputs[self.frame.kernel.outputs[0]], start, row_step, column_step)

        def left(row: Any, k: Any) -> t.Expr:
            return t.load(self.buffer, self.offsets["scores"] + row * s.row + k)

        def multiply_packed_block(number: Any, width: int) -> None:
            begin = number * tile.columns
            packed_block = self.packed_block_of_values(lead, begin)

            def emit(row: Any, column: Any, element: t.Expr) -> None:
                factor = t.load(self.buffer, self.offsets["factors"] + row)
                scaled = element * factor
                if self.attention.guard:
                    scaled = t.select(t.isnan(factor), t.const(0.0, "float32"), scaled)
                self.code.store(result.buffer, result.offset(row, begin + column), scaled)

            multiply(self.frame, rows, (keys,), tile, left, packed_block, width, emit, column_step == 1, LAST)

        full_packed_blocks, rest = divmod(s.outer, tile.columns)
        if full_packed_blocks:
            with self.reader.loop("packed_block", full_packed_blocks) as number:
                multiply_packed_block(number, tile.columns)
        if rest:
            multiply_packed_block(full_packed_blocks, rest)

    def packed_block_of_values(self, lead: Index, begin: Any) -> Matrix:
        """Return the packed block of values that begins at a column."""
        start = self.offsets["values"] + begin * self.sizes.keys
        return Matrix(self.buffer, start, self.sizes.values_tile.columns, 1)

    def num_keys(self, packed_blocks: Any) -> Any:
        """Return the number of keys in ``packed_blocks`` packed blocks."""
        s, columns = self.sizes, self.sizes.keys_tile.columns
        if isinstance(packed_blocks, int):
            return s.keys
        keys = self.reader.position(packed_blocks * columns)
        return keys if s.row == s.keys else clamped(self.reader, keys, 0, s.keys)
