"""Entries of ``known.json``: the names that a distribution provides, read from the installed plugins.

The core prints pip lines from that file; ``python -m mithril_tools.known`` rewrites it in an environment where every
distribution of the project is installed. A new one is named once: ``python -m mithril_tools.known mithril-new``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mithril import plugins
from mithril.plugins import pip_hints

KINDS = ("backends", "exports", "methods", "formats", "architectures", "options", "passes", "targets")


def _targets() -> list[tuple[str, Any]]:
    """Return the names and aliases of hardware targets."""
    targets = plugins.targets().values()
    return [(name, registered) for registered in targets for name in (registered.spec.name, *registered.spec.aliases)]


def entry(distribution: str) -> dict[str, list[str]]:
    """Return the names that an installed distribution provides, by kind."""
    tables: dict[str, Iterable[tuple[str, Any]]] = {
        "backends": plugins.backends().items(),
        "exports": plugins.exports().items(),
        "methods": plugins.extensions().items(),
        "formats": plugins.formats().items(),
        "architectures": plugins.architectures().items(),
        "options": ((registered.spec.name, registered) for registered in plugins.options()),
        "passes": plugins.passes().items(),
        "targets": _targets(),
    }
    names = {
        kind: sorted(name for name, registered in tables[kind] if registered.plugin.distribution == distribution)
        for kind in KINDS
    }
    return {kind: listed for kind, listed in names.items() if listed}


def known_text(more: Iterable[str] = ()) -> str:
    """Return the text of ``known.json`` for the distributions of the project and those in ``more``."""
    return json.dumps({name: entry(name) for name in sorted({*pip_hints.DISTRIBUTIONS, *more})}, indent=1) + "\n"


def main() -> None:
    Path(pip_hints.__file__).with_name("known.json").write_text(known_text(sys.argv[1:]), encoding="utf-8")


if __name__ == "__main__":
    main()
