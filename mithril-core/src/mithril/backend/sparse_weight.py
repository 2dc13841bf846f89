"""Matrices of float32 of which only some elements are stored, and the choice of the elements that stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from mithril.backend.arrays import Array, EncodedWeight
from mithril.graph import Op, OptionError

# How a matrix is stored: compressed rows of elements or of blocks, two of each four, or the smallest of these.
SparseFormat = Literal["auto", "csr", "block1x16", "2:4"]
WIDTHS = {"csr": 1, "block1x16": 16}  # of blocks; 16 floats are a line of the cache, and the lanes of AVX-512
MAX_SHARE = 0.5  # of the bytes of a dense matrix: more stored elements take longer than a dense product


class SparseWeight(EncodedWeight):
    """A matrix [rows, columns] in compressed rows: of elements, or of blocks of 16 neighbors in a row."""

    def __init__(self, values: Array, positions: Array, starts: Array, shape: tuple[int, int]) -> None:
        super().__init__(values, shape)
        self.positions, self.starts = positions, starts
        for part in (values, positions, starts):
            part.setflags(write=False)  # programs for other sizes share them

    @staticmethod
    def of(matrix: Array, format: str) -> SparseWeight:
        """Return the elements of a matrix that are not 0, in a format of ``WIDTHS``."""
        width, (rows, columns) = WIDTHS[format], matrix.shape
        blocks = np.asarray(matrix, np.float32, order="C").reshape(rows, columns // width, width)
        row, position = np.nonzero((blocks != 0).any(axis=2))
        starts = np.zeros(rows + 1, np.int32)
        np.cumsum(np.bincount(row, minlength=rows), out=starts[1:])
        values = blocks[row, position]
        if not len(row):  # kernels have no arrays without elements: one of padding
            values, position = np.zeros((1, width), np.float32), np.zeros(1, np.int64)
        values = values.reshape(-1) if width == 1 else values
        return SparseWeight(values, position.astype(np.int32), starts, (rows, columns))

    @property
    def format(self) -> str:
        """The name of the format."""
        return "csr" if self.quantized.ndim == 1 else "block1x16"

    @property
    def parts(self) -> dict[str, Array]:
        return {"values": self.quantized, "positions": self.positions, "starts": self.starts}

    @property
    def reading(self) -> tuple[Op, Mapping[str, Any]] | None:
        from mithril import ops

        return ops.sparse_to_dense, {"columns": self.shape[1]}

    @property
    def nbytes(self) -> int:
        """The bytes of the stored elements, of their positions and of the starts of rows."""
        return sum(int(x.nbytes) for x in self.parts.values())

    def decoded(self) -> Array:
        """Return all elements."""
        rows, columns = self.shape
        width, stored = WIDTHS[self.format], int(self.starts[-1])
        dense = np.zeros((rows, columns // width, width), np.float32)
        row = np.repeat(np.arange(rows), np.diff(self.starts))
        dense[row, self.positions[:stored]] = self.quantized[:stored].reshape(stored, width)
        return dense.reshape(rows, columns)

    def __repr__(self) -> str:
        return f"<{self.format} {list(self.shape)}, {self.nbytes:,} bytes>"


class PairWeight(EncodedWeight):
    """A matrix with at most two elements other than 0 in each four neighbors of a row: these, and two bits for each."""

    format = "2:4"

    def __init__(self, values: Array, positions: Array, shape: tuple[int, int]) -> None:
        super().__init__(values, shape)
        self.positions = positions

    @staticmethod
    def of(matrix: Array) -> PairWeight:
        """Return the two elements of each four neighbors, the first of those that are 0 where fewer are not."""
        rows, columns = matrix.shape
        fours = np.asarray(matrix, np.float32, order="C").reshape(-1, 4)
        places = np.sort(np.argsort(fours == 0, axis=1, kind="stable")[:, :2], axis=1).astype(np.uint8)
        bits = np.unpackbits(places.reshape(-1, 1), axis=1, bitorder="little")[:, :2]
        values = np.take_along_axis(fours, places.astype(np.int64), axis=1).reshape(rows, columns // 2)
        return PairWeight(values, np.packbits(bits.reshape(-1), bitorder="little"), (rows, columns))

    @property
    def parts(self) -> dict[str, Array]:
        return {"values": self.quantized, "positions": self.positions}

    @property
    def nbytes(self) -> int:
        """The bytes of the stored elements and of their positions."""
        return int(self.quantized.nbytes + self.positions.nbytes)

    def decoded(self) -> Array:
        """Return all elements."""
        bits = np.unpackbits(self.positions, count=self.quantized.size * 2, bitorder="little").reshape(-1, 2)
        fours = np.zeros((self.quantized.size // 2, 4), np.float32)
        places = (bits[:, 0] + 2 * bits[:, 1]).reshape(-1, 2).astype(np.int64)
        np.put_along_axis(fours, places, self.quantized.reshape(-1, 2), axis=1)
        return fours.reshape(self.shape)

    def __repr__(self) -> str:
        return f"<{self.format} {list(self.shape)}, {self.nbytes:,} bytes>"


def pruned_mask(weights: Array, sparsity: float, format: str) -> Array:
    """Return which elements stay: those, or the blocks, with the largest magnitudes; two of each four in "2:4"."""
    matrix = weights.reshape(len(weights), -1)
    if format == "2:4":
        fours = np.abs(matrix).reshape(-1, 4)
        mask = np.zeros(fours.shape, bool)
        np.put_along_axis(mask, np.argsort(-fours, axis=1, kind="stable")[:, :2], True, axis=1)
        return mask.reshape(weights.shape)
    width = WIDTHS.get(format, 1)
    sizes = np.square(matrix, dtype=np.float64).reshape(-1, width).sum(axis=1)
    mask = np.zeros(sizes.shape, bool)
    count = round(sizes.size * (1 - sparsity))
    mask[np.argpartition(-sizes, count - 1)[:count] if count else []] = True
    return np.repeat(mask, width).reshape(weights.shape)


def check_format(name: str, shape: tuple[int, ...], format: str) -> None:
    """Raise OptionError if the rows of a weight do not consist of whole groups of a format."""
    group = {**WIDTHS, "2:4": 4}.get(format, 1)
    columns = int(np.prod(shape[1:]))
    if columns % group:
        raise OptionError(
            f"format='{format}' needs rows of a multiple of {group} elements, but '{name}' has {columns}",
            facts=[f"shape {list(shape)}"],
            hint="exclude it by pattern=, or use format='csr' or 'auto', which fit all shapes",
        )


def packed(weights: Array, format: str) -> Array | EncodedWeight:
    """Return a matrix in a format; with ``"auto"`` in the smallest one, or itself if that saves too little."""
    if weights.ndim != 2:  # only products of matrices read stored elements
        return weights
    if format == "2:4":
        return PairWeight.of(weights)
    if format != "auto":
        return SparseWeight.of(weights, format)
    fitting = (name for name, width in WIDTHS.items() if weights.shape[1] % width == 0)
    best = min((SparseWeight.of(weights, name) for name in fitting), key=lambda w: w.nbytes)
    return best if best.nbytes <= MAX_SHARE * weights.size * 4 else weights
