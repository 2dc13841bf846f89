"""Operations of matrices that are quantized in groups: as blocks of files, and as packed blocks of columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril.graph import float32, op
from mithril_cbackend.lowering.int8x4.group_packed_blocks import PackedBlocks, unpacked
from mithril_gguf.formats import FORMATS

NO_AXES = "it exists in programs of this backend"


def _float32(dtypes: Any, attributes: Any) -> Any:
    return float32


def _matrix_shape(quantized: Any, order: Any = None, *, format: str, transposed: bool = False) -> Any:
    kind = FORMATS[format]
    shape = (quantized[0] if order is None else order[0], quantized[1] // kind.bytes * kind.block)
    return shape[::-1] if transposed else shape


@op(name="c.block_matrix", shape=_matrix_shape, dtype=_float32, opaque=True, no_axes=NO_AXES)
def block_matrix(quantized, order=None, *, format: str, transposed: bool = False):  # type: ignore[no-untyped-def]
    """The matrix of rows of blocks in a format of GGUF files, perhaps in another order, or its transpose."""
    numbers = FORMATS[format].decoded(quantized if order is None else quantized[order])
    return numbers.T if transposed else numbers


def _product_shape(x: Any, packed_blocks: Any, table: Any, *, columns: int, **_: Any) -> Any:
    return (*x[:-1], columns)


@op(name="c.group_product", shape=_product_shape, dtype=_float32, opaque=True, no_axes=NO_AXES)
def group_product(  # type: ignore[no-untyped-def]
    x,
    packed_blocks,
    table,
    *,
    columns: int,
    group: int,
    has_offsets: bool = False,
    is_half: bool = True,
    bits: int = 4,
    nested: int = 0,
):
    """x times the transposed matrix of quantized values in packed blocks, with float32 sums."""
    weights = unpacked(PackedBlocks(packed_blocks, columns, group, has_offsets, is_half, bits, nested), table)
    return x.astype(np.float32) @ weights.T


def _rows_shape(positions: Any, packed_blocks: Any, table: Any, *, terms: int, **_: Any) -> Any:
    return (*positions, terms)


@op(name="c.group_rows", shape=_rows_shape, dtype=_float32, opaque=True, no_axes=NO_AXES)
def group_rows(  # type: ignore[no-untyped-def]
    positions,
    packed_blocks,
    table,
    *,
    columns: int,
    terms: int,
    group: int,
    has_offsets: bool = False,
    is_half: bool = True,
    bits: int = 4,
    nested: int = 0,
):
    """The rows at some positions of a matrix of quantized values in packed blocks."""
    return unpacked(PackedBlocks(packed_blocks, columns, group, has_offsets, is_half, bits, nested), table)[positions]
