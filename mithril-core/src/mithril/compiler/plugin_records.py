"""The plugins that a program was compiled with, and those that differ where it is loaded or taken from the cache."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mithril import plugins
from mithril.graph import InputError, iterate
from mithril.plugins import PluginWarning
from mithril.system import package_content

# The hooks whose entries can change a program; a failing observer warns when it fails.
SHAPING = frozenset(
    f"mithril_{name}" for name in ("backends", "passes", "options", "ops", "lowerings", "targets", "frontends")
)
OF_BACKEND = frozenset({"backend", "lowerings"})  # parts that concern programs of one backend only
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """A plugin that was installed when a model was compiled: present or absent, with the reasons."""

    name: str
    distribution: str
    version: str
    module: str
    state: str  # "present" or "absent"
    problems: tuple[str, ...]  # why it, or a part of it, was not in use, or its doubts
    parts: tuple[str, ...] = ()  # how it can change programs: "backend", "deciders", "lowerings", "passes"

    @property
    def content(self) -> str:
        """A hash of the code of the plugin's package."""
        return package_content(self.module.partition(".")[0])

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}: {'; '.join((self.state, *self.problems))}"


def inventory(backend: str) -> tuple[PluginRecord, ...]:
    """Return the installed plugins, present and absent, as programs for a backend depend on them."""
    parts = plugins.parts_of_programs(backend)
    records = []
    for plugin in plugins.found():
        problems = [*(plugin.losses(SHAPING, backend) if plugin.problems else ()), *plugin.doubts]
        records.append(
            PluginRecord(
                plugin.name,
                plugin.distribution,
                plugin.version,
                plugin.module,
                "absent" if plugin.loaded is None else "present",
                tuple([problem.what for problem in problems]) if problems else (),
                parts.get(plugin.origin, ()),
            )
        )
    return tuple(records)


def manifest(records: Iterable[PluginRecord], backend: str, operations: Iterable[str] = ()) -> str:
    """Return the plugins that can have changed a program, and the absent ones, as text for a file."""
    owners = {plugin.name for name in operations if (plugin := plugins.op_plugin(name)) is not None}
    rows = []
    for record in records:
        parts = [*record.parts, *(["operations"] if record.name in owners else [])]
        if parts or record.state == "absent":
            rows.append([record.name, record.distribution, record.version, record.state, record.content, parts])
    return json.dumps({"backend": backend, "plugins": rows})


def manifest_of(compiled: Any) -> str:
    """Return the plugins of a compiled model as text, for the metadata of a file format."""
    operations = {node.op.name for program in compiled.programs for node, _ in iterate(program.graph)}
    return manifest(compiled.plugins, compiled.backend.name, operations)


def differences(text: str, backend: str, *, compiles: bool = True) -> list[str]:
    """Compare a manifest with the installed plugins; ``compiles`` tells whether passes run again."""
    saved = _parsed(text)
    is_same_backend = saved["backend"] == backend
    then = {(row[0], row[1]): row for row in saved["plugins"]}
    now = {(record.name, record.distribution): record for record in inventory(backend)}
    changes = []

    def counts(parts: Collection[str]) -> bool:
        return any(is_same_backend if p in OF_BACKEND else compiles or p == "operations" for p in parts)

    for key, (_, distribution, version, state, content, parts) in then.items():
        record = now.get(key)
        if state == "absent" or not counts(parts):
            continue
        if record is None or record.state == "absent":
            changes.append(f"{distribution} {version} is not {'installed' if record is None else 'in use'}")
        elif record.version != version:
            changes.append(f"{distribution} was {version} and is {record.version}")
        elif record.content != content:
            changes.append(f"{distribution} {version} has other code")
    for key, record in now.items():
        was_present = key in then and then[key][3] == "present"
        if record.state == "present" and not was_present and counts(record.parts):
            changes.append(f"{record.distribution} {record.version} was not in use")
    return changes


def compare_plugins(compiled: Any, text: str | None, path: object, *, compiles: bool = True) -> None:
    """Record plugins that differ from those of a file: an ``ignored`` decision, a warning once per process.

    ``text`` is the manifest that the file holds, or None if it has none.
    """
    if text is None:
        return
    try:
        changes = differences(text, compiled.backend.name, compiles=compiles)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"the list of plugins in '{path}' is damaged", facts=[str(error)]) from None
    if changes:
        message = f"plugins differ from those that '{path}' was written with: {'; '.join(changes)}"
        compiled.decisions.record("ignored", message, warning=PluginWarning, warn=message not in _warned)
        _warned.add(message)


def _parsed(text: str) -> Mapping[str, Any]:
    saved = json.loads(text)
    for row in saved["plugins"]:
        *words, parts = row
        if len(words) != 5 or not all(isinstance(word, str) for word in (*words, *parts)):
            raise ValueError(f"row {row!r}")
    if not isinstance(saved["backend"], str):
        raise ValueError(f"backend {saved['backend']!r}")
    return saved  # type: ignore[no-any-return]
