"""Products with constant quantized values in groups: packed blocks of quantized values and scales that one kernel reads
once.

``matmul(x, transpose(dequantize_groups(quantized, ...)))`` becomes ``c.group_product``, of float32 rows, or of signed
bytes if the left operand is dequantized from them and the numbers are integers. Rows of a table of quantized values are
rows before they are dequantized. Matrices of files (``c.block_matrix``) are read in the same way, and their rows from
packed blocks. Quantized values are never converted to a matrix of floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Editor, Node, Value, float32, int8
from mithril.system import ArrayCache
from mithril_cbackend.lowering.element.element_reader import is_uniform, operand, shape_of
from mithril_cbackend.lowering.int8x4.group_operation import block_matrix, group_product, group_rows
from mithril_cbackend.lowering.int8x4.group_packed_blocks import PackedBlocks, packed_blocks_of, packed_blocks_of_blocks
from mithril_gguf.formats import FORMATS, Format

Array = np.ndarray[Any, Any]
PACKED_BLOCKS = ArrayCache()  # of quantized values: programs for other sizes share them
SOURCES = (ops.dequantize_groups, block_matrix)
UNITS = (1.0, 0.5)  # that tables of integers are multiples of


@dataclass(frozen=True)
class Groups:
    """Constant operands of ``dequantize_groups``."""

    quantized: Array
    table: Array
    scale: Array
    offset: Array | None

    @property
    def group(self) -> int:
        return int(self.quantized.shape[-1] * 2 // self.scale.shape[-1])

    @property
    def operands(self) -> tuple[Array | None, ...]:
        """Return the arrays that packed blocks depend on in addition to the quantized values."""
        return self.scale, self.offset

    @property
    def is_finite(self) -> bool:
        return all(np.isfinite(x).all() for x in (self.scale, self.offset) if x is not None)

    def packed(self, unit: float) -> PackedBlocks:
        """Return packed blocks for a table that is divided by ``unit``."""
        return packed_blocks_of(self.quantized, self.scale.astype(np.float32) * np.float32(unit), self.offset)


@dataclass(frozen=True)
class Blocks:
    """Constant operands of ``c.block_matrix``."""

    format: Format
    quantized: Array
    order: Array | None

    @property
    def table(self) -> Array | None:
        return self.format.table

    @property
    def operands(self) -> tuple[Array | None, ...]:
        return (self.order,)

    @property
    def is_finite(self) -> bool:
        return all(head.is_finite for head in self.format.heads(self.format.blocks(self.quantized)))

    def packed(self, unit: float) -> PackedBlocks:
        return packed_blocks_of_blocks(self.format, self.quantized, self.order, unit)


class GroupProducts:
    """Rewriter of the products of one graph."""

    def __init__(self, editor: Editor, data: Any, zero_of: Any) -> None:
        self.editor, self.data, self.zero_of = editor, data, zero_of
        self.packed_blocks: dict[tuple[Value, float], tuple[Value, PackedBlocks]] = {}

    def product(self, node: Node) -> bool:
        """Rewrite a product with quantized values; return whether it is one."""
        source = self.source(operand(node, 1))
        x = operand(node)
        if source is None or not shape_of(x) or is_uniform(self.editor.producer(x)) or x.dtype.bits > 32:
            return False
        groups = self.groups(source)
        if groups is None or not x.dtype.is_float:
            return False
        left = self.editor.producer(x)
        factor, unit = None, None
        if left is not None and left.op is ops.dequantize and self.is_symmetric(left):
            # Bytes multiply bytes only if all numbers of the table are integers in some unit; otherwise
            # the rows are widened.
            unit = next((u for u in UNITS if groups.table is None or is_integral(groups.table / u)), None)
            if unit is not None:
                x, factor = operand(left), operand(left, 1)
        with self.editor.before(node) as b:
            rows = x if unit is not None else ops.cast(x, dtype="float32") if x.dtype is not float32 else x
            value, packed_blocks = self.packed(b, source, groups, unit or 1.0)
            numbers = first_numbers(groups) / (unit or 1.0)
            table = (numbers + 128).astype(np.uint8) if unit is not None else numbers.astype(np.float32)
            result = group_product(rows, value, b.constant(table, name="table"), **packed_blocks.attributes)
            if factor is not None:
                result = result * (ops.reshape(factor, shape=(*factor.shape, 1)) if factor.ndim else factor)
            if node.result.dtype is not float32:
                result = ops.cast(result, dtype=node.result.dtype)
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)
        return True

    def rows(self, node: Node) -> None:
        """Take rows of quantized values and scales instead of rows of numbers."""
        source = self.editor.producer(operand(node))
        if source is None or source.op not in SOURCES or node.attributes["axis"] != 0:
            return
        if source.op is block_matrix:
            if not source.attributes["transposed"]:
                self.rows_of_packed_blocks(node, source)
            return
        quantized, table, *numbers = source.operands
        with self.editor.before(node):
            rows = [None if v is None else ops.take(v, operand(node, 1), axis=0) for v in (quantized, *numbers)]
            result = ops.dequantize_groups(rows[0], table, *rows[1:])
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)

    def rows_of_packed_blocks(self, node: Node, source: Node) -> None:
        """Read rows from the packed blocks that products read as well."""
        groups = self.groups(source)
        if groups is None:
            return
        with self.editor.before(node) as b:
            value, packed_blocks = self.packed(b, source, groups, 1.0)
            positions, numbers = operand(node, 1), b.constant(first_numbers(groups), name="table")
            result = group_rows(positions, value, numbers, terms=shape_of(source.result)[1], **packed_blocks.attributes)
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)

    # -- operands ---------------------------------------------------------------------------------------------------
    def source(self, value: Value) -> Node | None:
        """Return the quantized values whose transposed matrix a product reads, or None."""
        producer, is_transposed = self.editor.producer(value), False
        while producer is not None and producer.op in (ops.cast, ops.transpose):
            if producer.op is ops.cast and not producer.result.dtype.is_float:
                return None
            is_transposed ^= producer.op is ops.transpose
            producer = self.editor.producer(operand(producer))
        if producer is not None and producer.op is block_matrix:
            is_transposed ^= producer.attributes["transposed"]
        is_matrix = producer is not None and producer.op in SOURCES and producer.result.ndim == 2
        return producer if is_matrix and is_transposed else None

    def groups(self, node: Node) -> Groups | Blocks | None:
        """Return quantized constants that packed blocks can hold, which convert scales as finite numbers, or None."""
        if node.op is block_matrix:
            order = node.operands[1] if len(node.operands) > 1 else None
            quantized = self.data(node.operands[0])
            assert quantized is not None
            blocks = Blocks(FORMATS[node.attributes["format"]], quantized, None if order is None else self.data(order))
            return blocks if blocks.is_finite else None
        elements = [None if v is None else self.data(v) for v in (*node.operands, None)[:4]]
        if any(e is None for v, e in zip(node.operands, elements, strict=False) if v is not None):
            return None
        quantized, table, scale, offset = elements
        assert quantized is not None
        assert table is not None
        assert scale is not None
        result = Groups(quantized, table.astype(np.float32), scale, offset)
        # An int8x4 group has 8 quantized values of one scale. Infinite and nan factors are left to
        # other kernels: packed scales are converted by moving bits, which is right for finite numbers
        # only (commit 230622b6).
        return result if result.group % 8 == 0 and result.is_finite else None

    def is_symmetric(self, node: Node) -> bool:
        """Whether an operand is signed bytes with one scale, or one per row of a matrix."""
        quantized, scale = operand(node), operand(node, 1)
        if quantized.dtype is not int8 or self.zero_of(node) != 0 or scale.dtype is not float32:
            return False
        return not scale.ndim or (node.attributes["axis"] == 0 and quantized.ndim == 2)

    def packed(self, b: Any, source: Node, groups: Groups | Blocks, unit: float) -> tuple[Value, PackedBlocks]:
        """Return the packed blocks of quantized values, the same for all their readers."""
        key = (source.result, unit)
        if key not in self.packed_blocks:
            # By content: equal arrays of two programs are two objects, and their numbers may be those of later ones.
            content = tuple(None if x is None else sha256(x.tobytes()).digest() for x in groups.operands)
            packed_blocks = PACKED_BLOCKS.get(groups.quantized, (unit, content), lambda: groups.packed(unit))
            self.packed_blocks[key] = b.constant(packed_blocks.data, name="packed_blocks"), packed_blocks
        return self.packed_blocks[key]


def first_numbers(groups: Groups | Blocks) -> Array:
    """Return the table that operations of packed blocks take: the numbers of the quantized values of four bits."""
    return np.zeros(16, np.float32) if groups.table is None else groups.table[:16]


def is_integral(table: Array) -> bool:
    """Whether all numbers are integers of eight bits."""
    return bool((table == np.rint(table)).all() and table.min() >= -128 and table.max() <= 127)
