"""Products of matrices that store only some of their elements: compressed rows of elements or of blocks of neighbors.

A sparse matrix is three arrays: ``values`` [stored], or [stored, width] of blocks of neighbors in a row; ``positions``
(int32 [stored]), the column of each, counted in blocks; ``starts`` (int32 [rows + 1]), where each row begins. Elements
from ``starts[rows]`` on are padding: their values are 0, and their positions exist.

Positions follow the rule of ``take``. Starts that contradict each other are made consistent: the first one is 0, and
the others are limited to the stored elements and sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.graph import (
    DTypeError,
    ShapeError,
    Size,
    TensorType,
    composite,
    dtype as as_dtype,
    exactly,
    product,
    sample,
    shape_text,
)
from mithril.ops.basic import dtype_of
from mithril.ops.creation import full, iota
from mithril.ops.elementwise import equal, less, maximum, minimum, where
from mithril.ops.indexing import scatter_nd_add, take
from mithril.ops.reduction import cumsum, sum
from mithril.ops.scatter_reductions import number, positions_within
from mithril.ops.shape import concat, reshape, unsqueeze
from mithril.ops.slicing import narrow
from mithril.ops.sorting import sort

POSITIONS = exactly(1, 3, 0, 2, 3, 0, dtype="int32", ordered=True)  # of three rows, and one element of padding
STARTS = exactly(0, 2, 2, 5, dtype="int32", ordered=True)
VALUES = exactly(0.5, -1.0, 2.0, 1.5, -0.5, 0.0, ordered=True)
BLOCKS = exactly(0.5, -1.0, 2.0, 1.5, -0.5, 3.0, shape=(3, 2))
OF_BLOCKS = (BLOCKS, exactly(1, 0, 1, dtype="int32", ordered=True), exactly(0, 1, 3, dtype="int32", ordered=True))


def _check(values: Any, positions: Any, starts: Any, columns: Size) -> Size:
    """Return the width of blocks; raise an error unless the arrays fit together."""
    width: Size = values.shape[1] if len(values.shape) == 2 else 1
    if any(as_dtype(x.dtype).name != "int32" for x in (positions, starts)):
        raise DTypeError("positions and starts of a sparse matrix are int32", hint="cast them: cast(x, dtype='int32')")
    ranks = len(values.shape) in (1, 2), len(positions.shape) == 1, len(starts.shape) == 1
    if not all(ranks) or values.shape[0] != positions.shape[0] or columns % width != 0:
        shapes = ", ".join(shape_text(x.shape) for x in (values, positions, starts))
        raise ShapeError(
            f"a sparse matrix with {columns} columns has no parts of the shapes {shapes}",
            hint="values [stored] or [stored, width], positions [stored], starts [rows + 1]; blocks fill the columns",
        )
    return width


def consistent_places(positions: Any, starts: Any, columns: Size) -> tuple[Any, Any]:
    """Return positions within the columns, and starts within the stored elements, from 0 on and in order."""
    is_first = equal(iota(shape=starts.shape, dtype="int32"), 0)
    return positions_within(positions, columns), sort(where(is_first, 0, _stored(starts, positions)), axis=0)


def _stored(starts: Any, positions: Any) -> Any:
    return maximum(minimum(starts, number(positions.shape[0], starts)), 0)


def _row_of_each(positions: Any, starts: Any) -> Any:
    """Return the row of each stored element, and the number of rows for padding."""
    stored, rows = positions.shape[0], starts.shape[0] - 1
    ends, ones = _stored(narrow(starts, 0, 1, rows + 1), positions), full(shape=(rows,), value=1, dtype="int32")
    counts = scatter_nd_add(full(shape=(stored + 1,), value=0, dtype="int32"), unsqueeze(ends, axis=(1,)), ones)
    return narrow(cumsum(counts, axis=0), 0, 0, stored)  # how many rows end up to each element


def _read_rows(x: Any, row: Any) -> Any:
    """Return the row of x of each stored element, 0 for padding."""
    rows = number(x.shape[0], row)
    return where(unsqueeze(less(row, rows), axis=(1,)), take(x, minimum(row, rows - 1)), 0)


def _blocks(x: Any, width: Size) -> Any:
    """Return [columns / width, width, n] of a matrix [columns, n]."""
    return reshape(x, shape=(x.shape[0] // width, width, x.shape[1]))


def _terms_flops(types: Sequence[TensorType | None], results: Sequence[TensorType], _: Any) -> Size:
    assert types[0] is not None
    return product(types[0].shape) * results[0].shape[-1] * 2


@composite(
    samples=[
        sample(VALUES, POSITIONS, STARTS, columns=4),
        sample(*OF_BLOCKS, columns=4, label="blocks"),
    ],
    linear="values",
)
def sparse_to_dense(values, positions, starts, *, columns: Size):
    """The elements [rows, columns] of a sparse matrix, 0 where none is stored."""
    width = _check(values, positions, starts, columns)
    stored, rows = values.shape[0], starts.shape[0] - 1
    row = _row_of_each(positions, starts)
    places = row * number(columns // width, positions) + positions_within(positions, columns // width)
    zeros = full(shape=((rows + 1) * (columns // width), width), value=0, dtype=dtype_of(values))
    blocks = scatter_nd_add(zeros, unsqueeze(places, axis=(1,)), reshape(values, shape=(stored, width)))
    return narrow(reshape(blocks, shape=(rows + 1, columns)), 0, 0, rows)


@sparse_to_dense.vjp
def _(g, y, values, positions, starts, *, columns):
    width = values.shape[1] if len(values.shape) == 2 else 1
    rows = starts.shape[0] - 1
    padded = concat(g, full(shape=(1, columns), value=0, dtype=dtype_of(g)), axis=0)  # padding reads the last row
    blocks = reshape(padded, shape=((rows + 1) * (columns // width), width))
    row = _row_of_each(positions, starts)
    places = row * number(columns // width, positions) + positions_within(positions, columns // width)
    return reshape(take(blocks, places), shape=values.shape), None, None


@composite(
    flops=_terms_flops,
    samples=[
        sample(VALUES, POSITIONS, STARTS, (4, 3)),
        sample(*OF_BLOCKS, (4, 3), label="blocks"),
    ],
    linear="values | x",
)
def sparse_matmul(values, positions, starts, x):
    """The product of a sparse matrix [rows, columns] with the rows of x [columns, n]."""
    if len(x.shape) != 2:
        raise ShapeError(f"sparse_matmul requires a matrix, got {shape_text(x.shape)}")
    width = _check(values, positions, starts, x.shape[0])
    stored, rows = values.shape[0], starts.shape[0] - 1
    read = take(_blocks(x, width), positions)
    terms = sum(read * reshape(values, shape=(stored, width, 1)), axis=1)
    zeros = full(shape=(rows + 1, x.shape[1]), value=0, dtype=dtype_of(terms))
    return narrow(scatter_nd_add(zeros, unsqueeze(_row_of_each(positions, starts), axis=(1,)), terms), 0, 0, rows)


@sparse_matmul.vjp
def _(g, y, values, positions, starts, x):
    width = values.shape[1] if len(values.shape) == 2 else 1
    read = _read_rows(g, _row_of_each(positions, starts))
    slopes = sum(take(_blocks(x, width), positions) * unsqueeze(read, axis=(1,)), axis=2)
    gx = sparse_matmul_transposed(values, positions, starts, g, columns=x.shape[0])
    return reshape(slopes, shape=values.shape), None, None, gx


@composite(
    flops=_terms_flops,
    samples=[
        sample(VALUES, POSITIONS, STARTS, (3, 2), columns=4),
        sample(*OF_BLOCKS, (2, 3), columns=4, label="blocks"),
    ],
    linear="values | x",
)
def sparse_matmul_transposed(values, positions, starts, x, *, columns: Size):
    """The product of a transposed sparse matrix [columns, rows] with the rows of x [rows, n]."""
    width = _check(values, positions, starts, columns)
    stored, rows = values.shape[0], starts.shape[0] - 1
    if len(x.shape) != 2 or x.shape[0] != rows:
        raise ShapeError(f"sparse_matmul_transposed requires a matrix of {rows} rows, got {shape_text(x.shape)}")
    read = _read_rows(x, _row_of_each(positions, starts))
    terms = unsqueeze(read, axis=(1,)) * reshape(values, shape=(stored, width, 1))
    zeros = full(shape=(columns // width, width, x.shape[1]), value=0, dtype=dtype_of(terms))
    return reshape(scatter_nd_add(zeros, unsqueeze(positions, axis=(1,)), terms), shape=(columns, x.shape[1]))


@sparse_matmul_transposed.vjp
def _(g, y, values, positions, starts, x, *, columns):
    width = values.shape[1] if len(values.shape) == 2 else 1
    read = _read_rows(x, _row_of_each(positions, starts))
    slopes = sum(take(_blocks(g, width), positions) * unsqueeze(read, axis=(1,)), axis=2)
    return reshape(slopes, shape=values.shape), None, None, sparse_matmul(values, positions, starts, g)


__all__ = ["consistent_places", "sparse_matmul", "sparse_matmul_transposed", "sparse_to_dense"]
