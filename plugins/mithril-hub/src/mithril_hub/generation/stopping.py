"""When the text of a row ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mithril.graph import InputError
from mithril_hub.generation.prompts import is_token


class Stopping:
    """Ends a row after a stop sequence, on request of a callback, or at the largest number of tokens."""

    def __init__(self, stop: Sequence[Any], on_token: Callable[[int, int], Any] | None, limit: int) -> None:
        self.sequences = [_sequence(s) for s in stop]
        self.on_token = on_token
        self.limit = limit

    def ends(self, row: int, tokens: Sequence[int]) -> bool:
        """Report the latest token of a row, and return whether the row has ended."""
        answer = None if self.on_token is None else self.on_token(row, tokens[-1])
        requested = isinstance(answer, (bool, np.bool_)) and bool(
            answer
        )  # other results, of print or write, end nothing
        return requested or len(tokens) >= self.limit or self.stops(tokens)

    def stops(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens end with a stop sequence."""
        return any(list(tokens[-len(s) :]) == s for s in self.sequences)


def _sequence(stop: Any) -> list[int]:
    """Return the tokens of a stop sequence."""
    tokens = [stop] if is_token(stop) else list(stop) if hasattr(stop, "__iter__") else []
    if not tokens or not all(map(is_token, tokens)):
        raise InputError(
            f"generate: stop contains {str(stop)[:80]!r}, expected a token or a list of at least one token",
            hint="stop=[2, [13, 13]] ends a row after token 2, or after two tokens 13",
        )
    return [int(t) for t in tokens]
