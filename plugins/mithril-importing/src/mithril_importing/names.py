"""Names of a source as identifiers and as paths of parameters, and numbers where several become equal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def identifier(name: str) -> str:
    """Return a name as an identifier: calls name inputs and outputs."""
    text = re.sub(r"\W", "_", name) or "_"
    return f"_{text}" if text[0].isdigit() else text


def path_name(name: str) -> str:
    """Return a name as a parameter's path: characters other than letters, digits and ``_.-`` become ``_``."""
    text = re.sub(r"[^0-9A-Za-z_.\-]+", "_", name.lstrip("/"))
    return ".".join(part or "_" for part in text.split(".")) or "_"


def unique_name(name: str, used: set[str]) -> str:
    """Return a name with a number if it is in ``used``, which receives the result."""
    text, k = name, 1
    while text in used:
        k += 1
        text = f"{name}_{k}"
    used.add(text)
    return text


def unique_names(
    names: Iterable[str], convert: Callable[[str], str] = str, used_names: Iterable[str] = ()
) -> dict[str, str]:
    """Return converted names by name; those that become equal to each other or to ``used_names`` are numbered."""
    used = {*used_names}
    return {name: unique_name(convert(name), used) for name in names}


def leaf_names(paths: Iterable[Sequence[Any]], separator: str = "_") -> list[str]:
    """Return the names of the leaves of a tree by their keys in PyTorch and JAX; equal ones are numbered."""
    used: set[str] = set()
    texts = (separator.join(re.sub(r"[^\w.]", "_", _key(key)) for key in path) for path in paths)
    return [unique_name(text, used) for text in texts]


def result_names(paths: Iterable[Sequence[Any]]) -> tuple[str, ...]:
    """Return a name per result: ``output``, ``output0`` and so on, or its keys in dictionaries and data classes."""
    used: set[str] = set()
    texts = ["_".join(map(_key, path)) for path in paths]
    names = (re.sub(r"\W", "_", "output" + text if not text or text[0].isdigit() else text) for text in texts)
    return tuple(unique_name(name, used) for name in names)


def _key(key: Any) -> str:
    """Return the key of a dictionary, of a sequence, or of an object with attributes."""
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
