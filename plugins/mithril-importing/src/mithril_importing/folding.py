"""Operators on constants, computed at import by their references."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mithril.graph import (
    Builder,
    Dim,
    Size,
    UnsupportedError,
    Value,
    allowed_memory,
    evaluate,
    shape_text,
)

FOLDED = 1 << 22  # elements; larger results, such as a mask of 2048 x 2048, are computed by the model
LARGEST = 1 << 28  # elements: 1 GiB of float32; a few bytes of a file could ask for more


class Folding:
    """The constants of one import, whose memory is limited by the size of the file."""

    def __init__(self, size: Callable[[], int]) -> None:
        self.size = size  # bytes of the file
        self.memory = 0  # bytes that the import has needed so far, beyond the file

    def fold(self, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...] | None:
        """Return the results of operations on constants as arrays, or None if they are too large to be worth it."""
        builder = Builder("fold")
        with builder:
            results = compute()
        if any(isinstance(r, (list, Value)) and _is_foreign(r, builder) for r in results):
            return None
        for node in builder.nodes:
            for r in node.results:
                if any(isinstance(d, Dim) for d in r.shape):
                    return None
                check_constant(r.shape)
                count = math.prod(map(int, r.shape))
                self.memory += count * r.dtype.itemsize
                # Nodes that are repeated in calls of functions could fill memory with results that each are small.
                if count > FOLDED or self.memory > allowed_memory(self.size()):
                    return None
        leaves = {str(k): r for k, r in enumerate(results) if isinstance(r, Value)}
        computed = evaluate(builder.build(leaves), {}) if leaves else {}
        return tuple(computed.get(str(k), r) for k, r in enumerate(results))


def check_constant(sizes: Sequence[Size]) -> None:
    """Raise UnsupportedError for a constant of too many elements."""
    numbers = [n for n in sizes if isinstance(n, int)]
    if len(numbers) == len(sizes) and (min(numbers, default=1) < 0 or math.prod(numbers) > LARGEST):
        raise UnsupportedError(
            f"a constant of the sizes {shape_text(tuple(sizes))} cannot be made",
            facts=[f"accepted: at most {LARGEST} elements"],
        )


def _is_foreign(result: Any, builder: Builder) -> bool:
    """Whether a result does not belong to the builder: a sequence, or a value that a body captured."""
    if isinstance(result, list):
        return True
    values = [*(r for n in builder.nodes for r in n.results), *(i.value for i in builder.inputs)]
    return all(result is not v for v in values)
