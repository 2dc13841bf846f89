"""Provenance: the parts of third-party distributions that take part in a compilation, as decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mithril import plugins
from mithril.backend import plugin_of, third_parties
from mithril.base import Decisions
from mithril.ir import Graph, iterate
from mithril.plugins import CompileContext, Entry


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
