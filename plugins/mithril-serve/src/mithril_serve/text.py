"""The text of tokens that arrive one by one: complete characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Text:
    """Turns tokens into pieces of text. A piece that may begin a stop string is held back."""

    def __init__(self, decode: Callable[[list[int]], str] | None, stops: Sequence[str] = ()) -> None:
        self.decode, self.stops = decode, stops
        self.tokens: list[int] = []
        self.begin = self.end = 0  # tokens that the next ones are decoded with, since spaces depend on them
        self.pending = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Return the text that is complete with this token, and whether a stop string ended it."""
        self.tokens.append(token)
        return self._cut(self._decoded(complete=False))

    def flush(self) -> str:
        """Return the text that was held back."""
        piece, ended = self._cut(self._decoded(complete=True))
        return piece if ended else piece + self.pending

    def _decoded(self, *, complete: bool) -> str:
        if self.decode is None:
            return ""
        before, after = self.decode(self.tokens[self.begin : self.end]), self.decode(self.tokens[self.begin :])
        if not complete and after.endswith("\ufffd"):  # a token can end within a character
            return ""
        self.begin, self.end = self.end, len(self.tokens)
        return after[len(before) :]

    def _cut(self, piece: str) -> tuple[str, bool]:
        text = self.pending + piece
        position = min((k for k in (text.find(stop) for stop in self.stops) if k >= 0), default=-1)
        if position >= 0:
            self.pending = ""
            return text[:position], True
        length = max((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self.pending = text[len(text) - length :]
        return text[: len(text) - length], False
