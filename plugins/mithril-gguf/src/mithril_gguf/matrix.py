"""Quantized matrices of GGUF files as arrays, which stay in the file."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril.backend import EncodedWeight
from mithril_gguf.formats import BY_CODE, Format
from mithril_gguf.reader import PLAIN, StoredTensor

Array = np.ndarray[Any, Any]
STEP = 1 << 20  # elements that are decoded at a time


class BlockMatrix(EncodedWeight):
    """An array of float32 whose rows are blocks of quantized values: a view of a file that ``numpy.asarray`` decodes.

    ``order`` has the number of the stored row for each row. With ``transposed`` these are its columns.
    """

    def __init__(
        self,
        quantized: Array,
        format: Format,
        shape: tuple[int, ...],
        order: Array | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__(quantized, shape, order)
        self.format, self.transposed = format, transposed

    def decoded(self) -> Array:
        """Return the numbers as float32."""
        shape = self.shape[::-1] if self.transposed else self.shape
        rows = len(self.quantized) if self.order is None else len(self.order)
        result = np.empty((rows, shape[-1]), np.float32)
        step = max(1, STEP // max(1, shape[-1]))
        for first in range(0, rows, step):
            part = slice(first, first + step)
            result[part] = self.format.decoded(self.quantized[part if self.order is None else self.order[part]])
        result = result.reshape(shape)
        return result.T if self.transposed else result

    def __repr__(self) -> str:
        return f"<{self.format.name} {list(self.shape)}, {self.nbytes} bytes>"


def array_of(tensor: StoredTensor) -> Array | BlockMatrix:
    """Return a tensor of a file as a read-only array, or as a matrix of blocks if it is quantized."""
    data, shape = tensor.data, tensor.shape
    if tensor.code not in PLAIN:
        kind = BY_CODE[tensor.code]
        return BlockMatrix(data.reshape(-1, kind.row(shape[-1])), kind, shape)
    array = tensor.plain
    array.setflags(write=False)
    return array
