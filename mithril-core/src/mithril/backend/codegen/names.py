"""Allocation of readable, unique identifiers that avoid keywords and reserved names."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

_BAD = re.compile(r"[^0-9A-Za-z_]+")
RESERVED = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | {"params", "inputs", "outputs", "forward"}


class NameAllocator:
    """An allocator of unique identifiers."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self.used = set(RESERVED) | set(reserved)
        self.allocated: set[str] = set()

    def fresh(self, wish: str) -> str:
        """Return an unused identifier similar to ``wish``."""
        stem = _BAD.sub("_", wish).strip("_") or "v"
        if stem[0].isdigit():
            stem = "v" + stem
        name, n = stem, 1
        while name in self.used:
            name, n = f"{stem}_{n}", n + 1
        self.used.add(name)
        self.allocated.add(name)
        return name
