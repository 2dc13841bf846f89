"""Malformed archives: seeded changes of valid ones, and the outcome of importing each."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mithril.base import MithrilError
from mithril_keras.archive import CONFIG, WEIGHTS
from mithril_keras.model import from_keras

STRANGE: tuple[Any, ...] = (
    None,
    -1,
    0,
    10**9,
    1 << 62,
    "",
    "Dense",
    [],
    {},
    [None],
    True,
    0.5,
    {"class_name": "__lambda__"},
)


@dataclass(frozen=True)
class Attempt:
    """One changed archive: ``error`` is None if it still imports."""

    mutation: str
    error: BaseException | None

    @property
    def fine(self) -> bool:
        return self.error is None or isinstance(self.error, MithrilError)


def attempts(files: Sequence[Path], rng: random.Random, count: int, folder: Path) -> Iterator[Attempt]:
    """Change and import ``count`` archives."""
    path = folder / "changed.keras"
    for _ in range(count):
        kind = rng.choice(("truncated", "flipped", "config", "config", "config", "weights", "members"))
        path.unlink(missing_ok=True)  # earlier imports map the old file
        path.write_bytes(_changed(rng.choice(files).read_bytes(), kind, rng))
        yield Attempt(kind, _outcome(path))


def _outcome(path: Path) -> BaseException | None:
    try:
        from_keras(path)
    except Exception as error:
        return error
    return None


def _changed(content: bytes, kind: str, rng: random.Random) -> bytes:
    if kind == "truncated":
        return content[: rng.randrange(len(content))]
    if kind == "flipped":
        return _flipped(content, rng)
    with zipfile.ZipFile(io.BytesIO(content)) as z:
        members = {i.filename: z.read(i) for i in z.infolist()}
    if kind == "config":
        config = json.loads(members[CONFIG])
        for _ in range(rng.randint(1, 3)):
            _replace(config, rng)
        members[CONFIG] = json.dumps(config).encode()
    elif kind == "weights":
        members[WEIGHTS] = _flipped(members[WEIGHTS], rng)
    else:
        members.pop(rng.choice(list(members)))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, data in members.items():
            z.writestr(name, data)
    return out.getvalue()


def _flipped(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _replace(config: Any, rng: random.Random) -> None:
    """Replace, remove or exchange a value somewhere in the configuration."""
    places: list[tuple[Any, Any]] = []
    stack = [config]
    while stack:
        node = stack.pop()
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in pairs:
            places.append((node, key))
            if isinstance(value, (dict, list)):
                stack.append(value)
    node, key = rng.choice(places)
    choice = rng.randrange(3)
    if choice == 0:
        del node[key]
    elif choice == 1:
        node[key] = rng.choice(STRANGE)
    else:
        other, name = rng.choice(places)
        value = other.get(name) if isinstance(other, dict) else other[name] if name < len(other) else None
        node[key] = deepcopy(value)
