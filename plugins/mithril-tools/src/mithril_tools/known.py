"""Entries of ``registry.json``: the names that a distribution owns, read from the installed plugins.

``python -m mithril_tools.known`` rewrites the entries of the distributions that are installed, and keeps the others. A
new one is named once: ``python -m mithril_tools.known mithril-new``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from mithril import plugins
from mithril.plugins import pip_hints

KINDS = ("backends", "exports", "methods", "formats", "architectures", "options", "passes", "targets")
LOADED = ("exports", "methods")  # kinds whose names have the place of their object, for type checkers
Names = list[str] | dict[str, str]


def _targets() -> list[tuple[str, Any]]:
    """Return the names and aliases of hardware targets."""
    targets = plugins.targets().values()
    return [(name, registered) for registered in targets for name in (registered.spec.name, *registered.spec.aliases)]


def entry(distribution: str) -> dict[str, Names]:
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
    specs_of = {
        kind: {name: one.spec for name, one in tables[kind] if one.plugin.distribution == distribution}
        for kind in KINDS
    }
    return {
        kind: {name: specs[name].loads for name in sorted(specs)} if kind in LOADED else sorted(specs)
        for kind, specs in specs_of.items()
        if specs
    }


def known_text(more: Iterable[str] = ()) -> str:
    """Return the text of ``registry.json``, with the entries of the distributions in ``more``."""
    recorded = json.loads(pip_hints.REGISTRY.read_text(encoding="utf-8"))
    installed = {plugin.distribution for plugin in plugins.found()}
    recorded |= {name: entry(name) for name in {*recorded, *more} & installed}
    return json.dumps(dict(sorted(recorded.items())), indent=1) + "\n"


def main() -> None:
    pip_hints.REGISTRY.write_text(known_text(sys.argv[1:]), encoding="utf-8")


if __name__ == "__main__":
    main()
