"""Batched matrix products as the form of ``matmul`` and ``dot``, with the layout of their operands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import DType, Node, Value, float32, float64, int32, int64, uint32, uint64
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, Reader, operand, shape_of, typical
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS
from mithril_cbackend.lowering.matmul.microkernel import Matrix

MIN_PRODUCTS = 512  # multiplications; smaller products use simple loops
LONG_SUM = 1024  # products of a sum from which packing the right operand costs more than narrow vectors


@dataclass(frozen=True)
class MatmulOperand:
    """Operand with its batch axes (None if broadcast), free axes and contracted axes."""

    value: Value
    batch: tuple[int | None, ...]
    free: tuple[int, ...]
    summed: tuple[int, ...]

    def sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        shape = shape_of(self.value)
        return tuple(shape[k] for k in axes)

    @property
    def length(self) -> int:
        """Number of rows (left operand) or columns (right operand)."""
        return math.prod(self.sizes(self.free))

    def element(self, reader: Reader, batch_index: Index, free: t.Expr, summed: t.Expr) -> t.Expr:
        """Return an element of the matrix at ``batch_index``."""
        index: dict[int, t.Expr] = {
            axis: i for axis, i in zip(self.batch, batch_index, strict=True) if axis is not None
        }
        for axes, i in ((self.free, free), (self.summed, summed)):
            index |= zip(axes, reader.split(i, self.sizes(axes)), strict=True)
        return reader.at(self.value, tuple(index.get(k, 0) for k in range(len(self.value.shape))))


@dataclass(frozen=True)
class Product:
    """Batched product [m, k] @ [k, n]. The result has the axes of the batch, the left and the right operand."""

    left: MatmulOperand
    right: MatmulOperand
    batch: tuple[int, ...]
    kind: DType  # accumulator dtype
    transposed: bool = False  # the result has the axes of the right operand before those of the left one

    @property
    def m(self) -> int:
        return self.left.length

    @property
    def n(self) -> int:
        return self.right.length

    @property
    def k(self) -> int:
        return math.prod(self.left.sizes(self.left.summed))

    @property
    def matrices(self) -> int:
        return math.prod(self.batch)

    @property
    def work(self) -> int:
        return self.matrices * self.m * self.n * self.k // PRODUCTS

    def flat(self, reader: Reader, batch_index: Index, row: t.Expr, column: t.Expr) -> Any:
        """Return the offset of an element of the result."""
        rows, columns = (self.n, self.m) if self.transposed else (self.m, self.n)
        first, second = (column, row) if self.transposed else (row, column)
        return (reader.flat(batch_index, self.batch) * rows + first) * columns + second

    def position(self, reader: Reader, batch_index: Index, row: t.Expr, column: t.Expr) -> Index:
        """Return the index of an element of the result."""
        parts = [reader.split(i, s.sizes(s.free)) for i, s in ((row, self.left), (column, self.right))]
        first, second = reversed(parts) if self.transposed else parts
        return (*batch_index, *first, *second)

    def __str__(self) -> str:
        """Return the key of the schedule: sizes, and the dtype if it is not float32."""
        sizes = "x".join(map(str, (*self.batch, self.m, self.n, self.k)))
        stored = self.left.value.dtype
        return sizes if stored is float32 else f"{sizes} {stored.name}"


def accumulator(dtype: DType) -> DType:
    """Return the accumulator dtype. Integer sums wrap around, so 32 bits suffice for all but 64-bit integers."""
    if dtype.is_float:
        return float64 if dtype.bits == 64 else float32
    if dtype.kind == "uint":
        return uint64 if dtype.bits == 64 else uint32
    return int64 if dtype.bits == 64 else int32


def product_of(node: Node) -> Product | None:
    """Return the node as a batched matrix product, or None if simple loops are faster."""
    product = {"matmul": _matmul, "dot": _dot}[node.op.name](node)
    # Matrix times vector: transposed, it is a vector times a matrix.
    if typical(product.n) < 4 <= typical(product.m):
        product = replace(product, left=product.right, right=product.left, transposed=True)
    is_long = isinstance(product.k, int) and product.k >= LONG_SUM
    if (
        0 in (product.m, product.n, product.k, product.matrices)
        or (typical(product.n) < 4 and not is_long)
        or typical(product.m * product.n * product.k) < MIN_PRODUCTS
    ):
        return None
    return product


def _matmul(node: Node) -> Product:
    a, b = operand(node), operand(node, 1)
    left, right = shape_of(a), shape_of(b)
    rows = max(len(left) - 1, 0)
    column = (len(right) - 1,) if len(right) > 1 else ()
    inner = (max(len(right) - 2, 0),)
    kind = accumulator(node.result.dtype)
    if len(right) <= 2:  # the rows of all matrices are contiguous, so they form one matrix
        return Product(MatmulOperand(a, (), tuple(range(rows)), (rows,)), MatmulOperand(b, (), column, inner), (), kind)
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    free = (len(left) - 2,) if len(left) > 1 else ()
    sides = (
        MatmulOperand(a, _batch(left, batch), free, (len(left) - 1,)),
        MatmulOperand(b, _batch(right, batch), column, inner),
    )
    return Product(*sides, batch, kind)


def _batch(shape: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the axes of an operand that align with the axes of the batch."""
    lead = len(batch) - max(len(shape) - 2, 0)
    axes = [k - lead for k in range(len(batch))]
    return tuple(k if k >= 0 and shape[k] != 1 else None for k in axes)


def _dot(node: Node) -> Product:
    a, b, w = operand(node), operand(node, 1), node.attributes

    def side(value: Value, summed: tuple[int, ...], batch: tuple[int, ...]) -> MatmulOperand:
        free = tuple(k for k in range(len(value.shape)) if k not in (*summed, *batch))
        return MatmulOperand(value, tuple(batch), free, tuple(summed))

    left, right = side(a, w["contract_a"], w["batch_a"]), side(b, w["contract_b"], w["batch_b"])
    return Product(left, right, left.sizes(w["batch_a"]), accumulator(node.result.dtype))


@dataclass(frozen=True)
class StridedOperand:
    """Operand read from a stored value, possibly transposed or converted to a wider dtype."""

    value: Value
    batch: tuple[int, ...]  # strides of the batch axes, in elements
    free: int
    summed: int

    def matrix(self, batch_index: Index, kind: DType, reader: Reader) -> Matrix:
        """Return the matrix at ``batch_index``, with the free axes as its rows."""
        start: Any = 0
        for i, step in zip(batch_index, self.batch, strict=True):
            start = start + i * step
        return Matrix(reader.buffers[self.value], start, self.free, self.summed, self.value.dtype, kind)


def strided_operand(side: MatmulOperand, producers: Mapping[Value, Node]) -> StridedOperand | None:
    """Return the strides of an operand, or None if its elements are computed or its axes have no common stride."""
    value, shape = side.value, shape_of(side.value)
    order = list(range(len(shape)))  # axes of the operand -> axes of the stored value
    while (producer := producers.get(value)) is not None:
        source = operand(producer) if producer.op in (ops.transpose, ops.cast) else None
        if source is None or not (producer.op is ops.transpose or is_lossless_cast(source.dtype, value.dtype)):
            return None
        if producer.op is ops.transpose:
            order = [producer.attributes["perm"][k] for k in order]
        value = source
    sizes = shape_of(value)
    steps = [math.prod(sizes[order[k] + 1 :]) for k in range(len(shape))]
    free, summed = _step(side.free, shape, steps), _step(side.summed, shape, steps)
    if free is None or summed is None:
        return None
    return StridedOperand(value, tuple(0 if axis is None else steps[axis] for axis in side.batch), free, summed)


def is_lossless_cast(source: DType, target: DType) -> bool:
    """Whether the cast is lossless."""
    if target is int32:
        return source.is_integer and source.bits < 32
    if target not in (float32, float64):
        return False
    return (
        source.bits < target.bits
        if source.is_float
        else source.is_integer and source.bits < (24, 53)[target is float64]
    )


def _step(axes: tuple[int, ...], shape: tuple[int, ...], steps: list[int]) -> int | None:
    """Return the common stride of several axes, or None if they cannot be merged into one."""
    axes_over_one = [k for k in axes if shape[k] != 1]
    if not axes_over_one:
        return 1
    if any(steps[a] != steps[b] * shape[b] for a, b in pairwise(axes_over_one)):
        return None
    return steps[axes_over_one[-1]]
