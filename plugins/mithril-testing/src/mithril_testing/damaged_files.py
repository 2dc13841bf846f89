"""Damaged files: seeded changes of valid ones, and the outcome of reading each; for the tests of every file format."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mithril.graph import MithrilError

Change = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Attempt:
    """One changed file: ``error`` is None if it can still be read."""

    change: str
    error: BaseException | None

    @property
    def is_foreign(self) -> bool:
        return self.error is not None and not isinstance(self.error, MithrilError)

    def __str__(self) -> str:
        return f"{self.change}: {self.error!r}"


def attempts(
    sources: Sequence[bytes], changes: Mapping[str, Change], read: Callable[[bytes], object], *, seed: int, count: int
) -> Iterator[Attempt]:
    """Change and read ``count`` files, one change each."""
    rng = random.Random(seed)
    names = list(changes)
    for _ in range(count):
        content, name = rng.choice(sources), rng.choice(names)
        changed = changes[name](content, rng)
        try:
            read(changed)
        except Exception as error:
            yield Attempt(name, error)
        else:
            yield Attempt(name, None)


def check(tried: Sequence[Attempt], *, refused: int) -> None:
    """Fail unless every error is one of mithril, and at least ``refused`` files were refused."""
    foreign = [str(a) for a in tried if a.is_foreign]
    assert not foreign, "\n".join(foreign)
    assert sum(a.error is not None for a in tried) >= refused, f"few of {len(tried)} changed files are refused"


def truncated(content: bytes, rng: random.Random) -> bytes:
    """Return the beginning of a file."""
    return content[: rng.randrange(len(content))]


def flipped(content: bytes, rng: random.Random, *, first: int | None = None) -> bytes:
    """Return the file with up to eight other bytes, among the ``first`` ones where a header is aimed at."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data) if first is None else min(first, len(data)))] = rng.randrange(256)
    return bytes(data)
