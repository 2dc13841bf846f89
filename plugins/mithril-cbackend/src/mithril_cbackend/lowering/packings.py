"""Orders in which kernels read weights: those of constants are packed at compile time, others when they are bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.graph import bfloat16

Array = np.ndarray[Any, Any]
Pack = Callable[[Array], Array]
# The transform of the kernels of a Winograd convolution F(2x2, 3x3).
WINOGRAD = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


@dataclass(frozen=True)
class Packing:
    """An order of weights: a key of ``PACKINGS``, and its sizes. Programs on disk contain it."""

    name: str
    sizes: tuple[int, ...]

    def __call__(self, weights: Array) -> Array:
        return PACKINGS[self.name](weights, *self.sizes)


@dataclass(frozen=True)
class PackedParameter:
    """The packed copy of a bound parameter, which is reshaped and transposed before."""

    parameter: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    packing: Packing

    @property
    def name(self) -> str:
        return f"{self.parameter} as {self.shape} of axes {self.axes} in {self.packing.name} of {self.packing.sizes}"

    def of(self, params: Mapping[str, Any]) -> Array:
        return self.packing(np.asarray(params[self.parameter]).reshape(self.shape).transpose(self.axes))

    @staticmethod
    def load(fields: Mapping[str, Any]) -> PackedParameter:
        """Return it from its fields in JSON."""
        packing = fields["packing"]
        order = Packing(packing["name"], tuple(packing["sizes"]))
        return PackedParameter(fields["parameter"], tuple(fields["shape"]), tuple(fields["axes"]), order)


def pack_columns(matrix: Array, columns: int) -> Array:
    """Pack a [k, n] matrix as ``copy_packed_block`` does, with zeros after the last column."""
    k, n = matrix.shape
    padded = np.zeros((k, -(-n // columns) * columns), matrix.dtype)
    padded[:, :n] = matrix
    return np.asarray(padded.reshape(k, -1, columns).swapaxes(0, 1), order="C").reshape(-1)


def pack_int8x4(matrix: Array, columns: int, depth: int) -> Array:
    """Pack a [k, n] matrix of bfloat16 or small integers into packed blocks of ``depth`` int8x4 groups, as uint32."""
    matrix = matrix.view(np.uint16) if matrix.dtype == bfloat16.numpy else matrix.astype(np.int8)
    k, n = matrix.shape
    per = 4 // matrix.itemsize
    padded = np.zeros((depth * per, -(-n // columns) * columns), matrix.dtype)
    padded[:k, :n] = matrix
    int8x4s = padded.reshape(depth, per, -1, columns).transpose(2, 0, 3, 1)
    return np.asarray(int8x4s, order="C").reshape(-1).view(np.uint32)


def pack_channels(kernels: Array, groups: int, columns: int) -> Array:
    """Pack the kernels of a convolution into packed blocks of output channels."""
    matrices = kernels.reshape(groups, kernels.shape[0] // groups, -1)
    return np.concatenate([pack_columns(m.T, columns) for m in matrices])


def pack_rows(kernels: Array, groups: int, block: int, rows: int) -> Array:
    """Pack the kernels of a convolution as ``PackedRows`` reads them, ``block`` contracted elements at a time."""
    matrices = kernels.reshape(groups, kernels.shape[0] // groups, -1)
    starts = range(0, matrices.shape[2], block)
    return np.concatenate([tiles_of_rows(m[:, k : k + block], rows) for m in matrices for k in starts])


def tiles_of_rows(matrix: Array, rows: int) -> Array:
    """Return the tiles of ``rows`` of a [m, k] matrix, each transposed; the last one can have fewer."""
    full = len(matrix) // rows * rows
    tiles = matrix[:full].reshape(-1, rows, matrix.shape[1]).swapaxes(1, 2)
    return np.concatenate([tiles.reshape(-1), matrix[full:].T.reshape(-1)])


def pack_tiles(kernels: Array, groups: int, rows: int) -> Array:
    """Pack the kernels of a direct convolution: [tile of ``rows`` output channels][depth][row]."""
    out_channels, depth = kernels.shape[0] // groups, math.prod(kernels.shape[1:])
    tiles = kernels.reshape(groups * out_channels // rows, rows, depth).swapaxes(1, 2)
    return np.asarray(tiles, order="C").reshape(-1)


def pack_winograd(kernels: Array, columns: int) -> Array:
    """Transform kernels of a Winograd convolution to [packed block, point, image channel, channel]."""
    channels, inner = kernels.shape[:2]
    transformed = np.einsum("ia,jb,mcab->ijcm", WINOGRAD, WINOGRAD, kernels.astype(np.float64)).astype(np.float32)
    points = transformed.reshape(-1, inner, channels)
    packed = [pack_columns(m, columns).reshape(-1, inner, columns) for m in points]
    return np.asarray(np.stack(packed, axis=1), order="C").reshape(-1)


PACKINGS: dict[str, Callable[..., Array]] = {
    "columns": pack_columns,
    "int8x4": pack_int8x4,
    "channels": pack_channels,
    "rows": pack_rows,
    "tiles": pack_tiles,
    "winograd": pack_winograd,
}
