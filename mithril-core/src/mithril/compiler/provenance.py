"""Provenance: the parts of third-party distributions that take part in a compilation, as decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mithril import plugins
from mithril.backend import plugin_of, third_parties
from mithril.base import Decisions
from mithril.ir import Graph, iterate
from mithril.plugins import CompileContext, Entry, PluginWarning
from mithril.runtime import PluginRecord


def record_providers(context: CompileContext, source: Any) -> None:
    """Record the backend, target, options, frontend and layers of third parties, and all deciders."""
    settings: Any = context.options
    options = {entry.spec.name: entry for entry in plugins.options()}
    parts = [
        *_of("backend", [context.backend.name], plugins.backends()),
        *_of("hardware target", [settings["target_hardware"]], plugins.targets()),
        *_of("option", settings.keywords, options),
        *([source.origin] if hasattr(source, "origin") else []),
        *_layers(source),
        *(f"{decider} takes part" for decider in plugins.deciders()),
    ]
    for part in parts:
        context.decisions.record("plugin", part)


# The hooks whose entries can change a program; a failing observer warns when it fails.
SHAPING = frozenset(
    f"mithril_{name}" for name in ("backends", "passes", "options", "ops", "lowerings", "targets", "frontends")
)
_warned: set[str] = set()


def record_absences(context: CompileContext) -> None:
    """Record the installed plugins that are not, or not entirely, in use; warn once per process.

    A plugin that the user disabled is not missed: it is recorded without a warning.
    """
    backend = context.backend.name
    plugins.lowerings(backend), plugins.op_names(), plugins.frontends()  # their problems count as well
    for plugin in plugins.found():
        for problem in plugin.losses(SHAPING, backend):
            if problem.state == "disabled":
                context.decisions.record("plugin", problem.what)
                continue
            extent = "not in use" if plugin.loaded is None else "only partly in use"
            reason = ": ".join((problem.what, *problem.facts[:1]))
            message = f"{plugin.origin} is {extent}: {reason} ({problem.hint})"
            context.decisions.record("ignored", message, warning=PluginWarning, warn=message not in _warned)
            _warned.add(message)


def inventory(backend: str) -> tuple[PluginRecord, ...]:
    """Return the installed plugins, present and absent, as programs for a backend depend on them."""
    return tuple(
        PluginRecord(
            plugin.name,
            plugin.distribution,
            plugin.version,
            plugin.module,
            "absent" if plugin.loaded is None else "present",
            tuple(problem.what for problem in plugin.losses(SHAPING, backend)),
        )
        for plugin in plugins.found()
    )


def _of(kind: str, names: Iterable[Any], entries: Mapping[str, Entry[Any]]) -> Iterator[str]:
    for name in names:
        entry = entries.get(name)
        if entry is not None and not entry.plugin.first_party:
            yield f"{kind} '{name}' by {entry.origin}"


def _layers(source: Any) -> Iterator[str]:
    if not third_parties():
        return
    for kind in sorted(getattr(source, "layer_types", ()), key=lambda kind: kind.__name__):
        plugin = plugin_of(kind.__module__)
        if plugin is not None:
            yield f"layer '{kind.__name__}' by {plugin.origin}"


def record_operations(graph: Graph, decisions: Decisions) -> None:
    """Record the operations of third parties in a graph."""
    for name in sorted({node.op.name for node, _ in iterate(graph)}):
        plugin = plugins.op_plugin(name)
        if plugin is not None and not plugin.first_party:
            decisions.record("plugin", f"operation '{name}' by {plugin.origin}")
