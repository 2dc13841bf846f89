"""The memory of a program: its parts, the limit, and aligned blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.backend import ALIGNMENT, format_bytes
from mithril.graph import MemoryLimitError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Memory:
    """Bytes that a program needs, known before allocation."""

    arena: int
    work: int  # scratch of ggml
    graphs: int  # descriptions of tensors and nodes
    constants: int  # constants and packed weights
    regions: int = 0  # all of this, of the bodies of branches and loops

    @property
    def total(self) -> int:
        return self.arena + self.work + self.graphs + self.constants + self.regions


def aligned(size: int) -> Array:
    """Memory that begins at a multiple of the alignment."""
    try:
        raw = np.empty(size + ALIGNMENT, np.uint8)
    except MemoryError:
        raise MemoryLimitError(f"the system gives no {format_bytes(size)} for this program") from None
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def check_limit(limit: int | None, memory: Memory) -> None:
    """Raise MemoryLimitError if a program needs more than ``mem_size``."""
    if limit is not None and memory.total > limit:
        raise MemoryLimitError(
            f"this program needs {format_bytes(memory.total)}, but mem_size allows {format_bytes(limit)}",
            facts=[
                f"intermediate values {format_bytes(memory.arena)}, scratch {format_bytes(memory.work)}",
                f"graphs {format_bytes(memory.graphs)}, constants and packed weights {format_bytes(memory.constants)}",
                f"inside of branches and loops {format_bytes(memory.regions)}" if memory.regions else "",
            ],
            hint="raise mem_size, or make the batch smaller",
        )
