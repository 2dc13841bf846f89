"""The input of an encoder, of which a decoder generates text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril.base import InputError


class Source:
    """Sequences of tokens, whose lengths may differ, or an array such as the spectra of Whisper: one row per text."""

    def __init__(self, source: Any, terminals: Sequence[str]) -> None:
        self.name = next(n for n in ("input_ids", "input_features") if n in terminals)
        self.arrays = self._tokens(source) if self.name == "input_ids" else self._array(source)

    @property
    def rows(self) -> int:
        """The number of texts."""
        return len(self.arrays[self.name])

    def key(self, n: int) -> bytes:
        """Return the content of a row, which does not depend on the padding that the others require."""
        array = self.arrays[self.name][n]
        mask = self.arrays.get("attention_mask")
        content: bytes = (array if mask is None else array[: int(mask[n].sum())]).tobytes()
        return content

    def row(self, n: int) -> Source:
        """Return the source of one text."""
        other: Source = object.__new__(Source)
        other.name, other.arrays = self.name, {k: a[n : n + 1] for k, a in self.arrays.items()}
        return other

    def _array(self, source: Any) -> dict[str, Any]:
        array = np.asarray(source, np.float32)
        if array.ndim not in (2, 3):
            raise InputError(f"generate: source has rank {array.ndim}, expected [batch, bins, frames]")
        self.single = array.ndim == 2
        return {self.name: array[None] if self.single else array}

    def _tokens(self, source: Any) -> dict[str, Any]:
        rows = source.tolist() if isinstance(source, np.ndarray) else list(source)
        self.single = bool(rows) and all(isinstance(t, (int, np.integer)) for t in rows)
        batch = [rows] if self.single else [list(r) for r in rows]
        if not batch or not all(batch):
            raise InputError("generate: source has no tokens", hint="pass a list of tokens, or a list of such lists")
        longest = max(map(len, batch))
        tokens, mask = np.zeros((2, len(batch), longest), np.int32)
        for n, row in enumerate(batch):
            tokens[n, : len(row)], mask[n, : len(row)] = row, 1
        return {self.name: tokens, "attention_mask": mask}
