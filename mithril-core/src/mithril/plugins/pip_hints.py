"""The registry: distributions of the project, and the names that they own.

``registry.json`` is located in the root of the repository. A third party adds its names there by a pull request, and
``mithril describe NAME --json`` prints its entry; the core's build hook copies the file into wheels.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

_BUNDLED = Path(__file__).with_name("registry.json")
REGISTRY = _BUNDLED if _BUNDLED.exists() else Path(__file__).parents[4] / "registry.json"  # of a clone
_KNOWN: Mapping[str, Mapping[str, Collection[str]]] = json.loads(REGISTRY.read_text(encoding="utf-8"))


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
