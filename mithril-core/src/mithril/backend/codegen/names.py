"""Readable identifiers for values: unique, and never a keyword or a name of the library."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

_BAD = re.compile(r"[^0-9A-Za-z_]+")
RESERVED = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | {"params", "inputs", "outputs", "forward"}


class Names:
    """Gives every wish a name of its own."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = set(RESERVED) | set(taken)
        self.given: set[str] = set()

    def fresh(self, wish: str) -> str:
        """An identifier like ``wish``."""
        stem = _BAD.sub("_", wish).strip("_") or "v"
        if stem[0].isdigit():
            stem = "v" + stem
        name, n = stem, 1
        while name in self.taken:
            name, n = f"{stem}_{n}", n + 1
        self.taken.add(name)
        self.given.add(name)
        return name
