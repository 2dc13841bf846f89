"""Distributions that provide missing names, for pip hints only; ``python -m mithril_tools.known`` writes known.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_KNOWN: Mapping[str, Mapping[str, list[str]]] = json.loads(
    Path(__file__).with_name("known.json").read_text(encoding="utf-8")
)


def _homes(kind: str) -> dict[str, str]:
    return {name: home for home, entry in _KNOWN.items() for name in entry.get(kind, ())}


DISTRIBUTIONS = tuple(_KNOWN)
BACKENDS = _homes("backends")
EXPORTS = _homes("exports")
METHODS = _homes("methods")  # of compiled models
FORMATS = _homes("formats")
ARCHITECTURES = _homes("architectures")  # of GGUF files
TARGETS = _homes("targets")
OPTIONS = {home: tuple(entry["options"]) for home, entry in _KNOWN.items() if "options" in entry}
