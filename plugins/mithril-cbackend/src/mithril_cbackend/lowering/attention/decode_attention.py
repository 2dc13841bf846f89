"""Attention of few queries, as in text generation: keys and values are read once, without packing.

A group of keys, one per lane, is multiplied with a query, which gives one vector of partial sums per key. The square
of these is transposed, so that adding its rows gives a vector of scores.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.lowering.attention.blocked_attention import BlockedAttention
from mithril_cbackend.lowering.element.element_reader import Index, clamped
from mithril_cbackend.lowering.matmul.microkernel import Matrix


class DecodeAttention(BlockedAttention):
    """Attention for heads whose keys and values are contiguous along the vectorized axes."""

    def prepare(self, head: Index) -> None:
        pass

    def packed_block_of_values(self, lead: Index, begin: Any) -> Matrix:
        values = self.matrix(self.values, lead)
        assert values is not None
        return values.from_column(begin)

    def score(self, lead: Index, first: Any, rows: int, packed_blocks: Any) -> None:
        s, lanes = self.sizes, self.lanes
        keys = self.matrix(self.keys, lead)
        assert keys is not None
        groups = packed_blocks * (s.keys_tile.columns // lanes)
        with self.reader.loop("group", groups) as group:
            begin = group * lanes
            if s.row != s.keys:  # the last group overlaps the one before
                begin = clamped(self.reader, begin, 0, s.keys - lanes)
            for row in range(rows):
                self.score_group(lead, first, row, begin, keys)

    def score_group(self, lead: Index, first: Any, row: int, begin: Any, keys: Matrix) -> None:
        s, lanes, code, reader, product = self.sizes, self.lanes, self.code, self.reader, self.attention.first.result
        products, transposed = (code.alloc(name, lanes * lanes, "float32") for name in ("products", "turned"))
        with reader.loop("key", lanes) as key, reader.loop("j", lanes, t.VECTORIZED) as j:
            parts = [
                t.load(self.buffer, self.offsets["query"] + (row * s.inner + k) + j) * keys.element(j + k, begin + key)
                for k in range(0, s.inner, lanes)
            ]
            code.store(products, key * lanes + j, reduce(add, parts))
        code.transpose(lanes, products, 0, lanes, transposed, 0, lanes)
        sums = code.alloc("sums", lanes, "float32")
        with reader.loop("j", lanes, t.VECTORIZED) as j:
            parts = [t.load(transposed, j + k * lanes) for k in range(lanes)]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            code.store(sums, j, parts[0])
        with reader.loop("j", lanes, t.VECTORIZED if self.vector else t.SERIAL) as j:
            key = begin + j
            index = (*lead, first + row, key)
            reader.define(product, index, code.let(t.load(sums, j), product.name))
            code.store(self.buffer, self.offsets["scores"] + row * s.row + key, reader.at(self.attention.scores, index))
