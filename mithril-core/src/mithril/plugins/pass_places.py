"""Placement of installed passes: ``before`` and ``after`` resolved against the other installed passes."""

from __future__ import annotations

from dataclasses import dataclass

from mithril.base import STAGES, closest
from mithril.plugins.loader import PluginProblem
from mithril.plugins.specs import PassSpec
from mithril.plugins.tables import Entry, Table


@dataclass(frozen=True, slots=True)
class Placement:
    """``before`` and ``after`` of an installed pass without aliases; ``faults`` describe names that do not resolve."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    faults: tuple[PluginProblem, ...]


def placement(entry: Entry[PassSpec], table: Table[PassSpec]) -> Placement:
    """Resolve the names in ``before`` and ``after`` of a pass against the installed passes."""
    names: dict[str, list[str]] = {"before": [], "after": []}
    faults = []
    for field, resolved in names.items():
        for word in getattr(entry.spec, field):
            name = table.aliases.get(word, word)
            other = table.entries.get(name)
            if other is not None and other.spec.stage == entry.spec.stage:
                resolved.append(name)
            elif name not in table.clashes:
                faults.append(_placement_problem(entry, field, word, other, table))
    return Placement(tuple(names["before"]), tuple(names["after"]), tuple(faults))


def _placement_problem(
    entry: Entry[PassSpec], field: str, word: str, other: Entry[PassSpec] | None, table: Table[PassSpec]
) -> PluginProblem:
    spec = entry.spec
    if other is None:
        similar = closest(word, [*table.entries, *table.aliases])
        reason = "no installed pass has that name"
        hint = f"did the author mean '{similar[0]}'? " if similar else ""
    else:
        reason, hint = f"that pass runs in stage '{other.spec.stage}', not in '{spec.stage}'", ""
    return PluginProblem(
        "broken",
        f"pass '{spec.name}' of {entry.origin} says {field}='{word}': {reason}",
        (f"stages, in order: {', '.join(STAGES)}",) if other is not None else (),
        f"{hint}report it to the authors of {entry.plugin.distribution}",
    )
