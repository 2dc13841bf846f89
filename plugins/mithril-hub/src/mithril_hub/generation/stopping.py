"""When the text of a row ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mithril.base import InputError


class Stopping:
    """Ends a row after a stop sequence, on request of a callback, or at the largest number of tokens."""

    def __init__(self, stop: Sequence[Any], on_token: Callable[[int, int], Any] | None, limit: int) -> None:
        self.sequences = [[s] if isinstance(s, int) else [int(t) for t in s] for s in stop]
        if not all(self.sequences):
            raise InputError("generate: a stop sequence is empty")
        self.on_token = on_token
        self.limit = limit

    def ends(self, row: int, tokens: Sequence[int]) -> bool:
        """Report the latest token of a row, and return whether the row has ended."""
        requested = self.on_token is not None and self.on_token(row, tokens[-1]) is True
        return requested or len(tokens) >= self.limit or self.stops(tokens)

    def stops(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens end with a stop sequence."""
        return any(list(tokens[-len(s) :]) == s for s in self.sequences)
