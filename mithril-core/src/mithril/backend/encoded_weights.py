"""Weights as codes, such as quantized matrices of files: NumPy decodes them, and a backend may read the codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class EncodedWeight(ABC):
    """An array of float32 that is stored as bytes [rows, bytes of a row]; ``order`` selects the row of each row."""

    dtype = np.dtype(np.float32)

    def __init__(self, codes: Array, shape: tuple[int, ...], order: Array | None = None) -> None:
        self.codes, self.shape, self.order = codes, shape, order

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the codes."""
        return int(self.codes.nbytes)

    @abstractmethod
    def decoded(self) -> Array:
        """Return the numbers."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.decoded(), dtype)
