"""Large results: arrays of their own that the program writes into directly, and again once the caller let them go."""

from __future__ import annotations

from collections import Counter
from sys import getrefcount
from typing import Any

import numpy as np

from mithril_ggml.program.strided_tensor import Tensor

LARGE = 1 << 16  # bytes from which copying a result out of the arena costs more than keeping track


class Result:
    """The array that the caller gets. It is new where the last one is still in use; else it is written again, which
    spares the system from finding memory, a cost like that of the computation itself.
    """

    __slots__ = ("cached", "fields", "idle", "tensor", "views")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.cached: np.ndarray[Any, Any] | None = None
        self.idle = 0  # references to the array where the caller has none
        self.fields: tuple[tuple[Any, int], ...] = ()
        self.views: tuple[tuple[str, Tensor], ...] = ()

    @property
    def free(self) -> bool:
        """Whether the program holds the only reference to the array."""
        return self.cached is not None and getrefcount(self.cached) <= self.idle

    def replace_if_escaped(self) -> np.ndarray[Any, Any]:
        self.cached = np.empty(self.tensor.shape, self.tensor.dtype.numpy)
        return self.cached

    def count_references(self) -> None:
        """Count the references that the program itself holds."""
        self.idle = getrefcount(self.cached)


def own_results(outputs: list[Tensor]) -> None:
    """Take large results out of the arena: those that fill a piece of memory which no other result shows."""
    shown = Counter(t.storage for t in outputs)
    for t in outputs:
        s = t.storage
        if s.role == "planned" and s.start >= 0 and s.size >= LARGE and t.covers_storage and shown[s] == 1:
            s.role = "result"
