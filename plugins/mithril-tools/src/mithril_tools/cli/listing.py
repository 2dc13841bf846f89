"""``mithril plugins``, ``backends``, ``passes`` and ``options``: listings as tables or JSON."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from mithril import plugins as installed
from mithril.compiler import option_registry, option_rows
from mithril.graph import PASS_LEVELS
from mithril.plugins import Entry, PassSpec, Plugin, pip_hints
from mithril_tools.cli.output import console, json_option, print_json, show
from mithril_tools.cli.verify import summary_of, verify

if TYPE_CHECKING:
    from mithril.graph import Graph


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def plugins(context: click.Context, as_json: bool) -> None:
    """List the installed plugins, the things they provide, and their state.

    `mithril plugins verify FOLDER` checks a distribution before publication; the column "verified" has the result.
    A backend is registered until its framework is imported; `mithril doctor` imports it. The exit status is 1 if a
    plugin is not, or not entirely, in use.
    """
    if context.invoked_subcommand is not None:
        return
    option_registry()  # detects two owners of one option
    entries = installed.all()
    provides: dict[int, dict[str, list[str]]] = {id(plugin): {} for plugin in entries}
    for kind, name, plugin in installed.provided():
        provides[id(plugin)].setdefault(kind, []).append(name)
    if as_json:
        print_json([_plugin_data(plugin, provides[id(plugin)]) for plugin in entries])
    else:
        _show_plugins(entries, provides)
    if faults(entries):
        raise SystemExit(1)


plugins.add_command(verify)


def faults(entries: Iterable[Plugin]) -> list[str]:
    """Return the errors of plugins that are not, or not entirely, in use, and the doubts about others.

    The user disabled some on purpose.
    """
    problems = [
        problem for plugin in entries for problem in [*plugin.problems, *plugin.doubts] if problem.state != "disabled"
    ]
    return list(dict.fromkeys(str(problem.error()) for problem in problems))


def _show_plugins(entries: Sequence[Plugin], provides: Mapping[int, dict[str, list[str]]]) -> None:
    out = console()
    if not entries:
        out.print("No plugins are installed. A backend to begin with: pip install mithril-numpy")
        return
    rows = [
        {
            "name": plugin.name,
            "kind": _kinds(provides[id(plugin)]),
            "distribution": plugin.distribution,
            "version": plugin.version,
            "state": _state(plugin, provides[id(plugin)]),
            "verified": summary_of(plugin.distribution),
        }
        for plugin in entries
    ]
    verified = ["verified"] if any(row["verified"] for row in rows) else []
    show(rows, ["name", "kind", "distribution", "version", "state", *verified], out)
    for fault in faults(entries):
        out.print(f"\n{escape(fault)}")


def _plugin_data(plugin: Plugin, provides: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "module": plugin.module,
        "state": _state(plugin, provides),
        "provides": provides,
        "verified": summary_of(plugin.distribution),
        "problems": [
            {"state": p.state, "what": p.what, "facts": list(p.facts), "hint": p.hint}
            for p in [*plugin.problems, *plugin.doubts]
        ],
    }


def _state(plugin: Plugin, provides: dict[str, list[str]]) -> str:
    """Return the plugin's state: ``registered`` if the module of its backend, and its framework, are not imported."""
    specs = [installed.backends()[name].spec for name in provides.get("backend", ())]
    if plugin.state != "loaded" or not specs:
        return plugin.state
    missing = [module for spec in specs for module in spec.requires if find_spec(module) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    is_imported = all(spec.loads.partition(":")[0] in sys.modules for spec in specs)
    return "loaded" if is_imported else "registered"


def _kinds(provides: dict[str, list[str]]) -> str:
    """Return a summary such as ``backend, 12 passes, 4 options``; the export that every backend has is omitted."""
    words = []
    for kind, names in provides.items():
        count = len(names) - len(provides.get("backend", ())) if kind == "export" else len(names)
        plural = "passes" if kind == "pass" else f"{kind}s"
        if count == 1:
            words.append(kind)
        elif count > 1:
            words.append(f"{count} {plural}")
    return ", ".join(words)


@click.command()
@click.option(
    "--coverage", metavar="NAME", help="Show how this backend runs each operation: lowered, by its body, or missing."
)
@json_option
def backends(coverage: str | None, as_json: bool) -> None:
    """List backends: installed, usable, and how to install the others."""
    if coverage is not None:
        _coverage(coverage, as_json)
        return
    rows = []
    for name, entry in installed.backends().items():
        missing = [module for module in entry.spec.requires if find_spec(module) is None]
        rows.append(
            {
                "name": name,
                "class": f"ml.{entry.spec.class_name}",
                "distribution": entry.origin,
                "state": f"needs {', '.join(missing)}" if missing else "ready",
                "summary": entry.spec.summary,
            }
        )
    listed = {row["name"] for row in rows}
    absent = {name: home for name, home in pip_hints.BACKENDS.items() if name not in listed}
    for name, home in absent.items():
        if not installed.default.loader.named(home):
            rows.append({"name": name, "class": "", "distribution": "", "state": f"pip install {home}", "summary": ""})
    if as_json:
        print_json(rows)
    else:
        show(rows, ["name", "class", "distribution", "state", "summary"], console())


def _coverage(name: str, as_json: bool) -> None:
    """Print how a backend runs each operation, then the counts."""
    from mithril_tools.cli.coverage import coverage

    rows = coverage(name)
    if as_json:
        print_json(rows)
        return
    show(rows, ["operation", "kind", "state"], console())
    for kind in ("primitive", "composite"):
        states = Counter(row["state"].split(" needs ")[0] for row in rows if row["kind"] == kind)
        console().print(f"{kind}s: " + ", ".join(f"{count} {state}" for state, count in states.most_common()))


@click.command()
@json_option
def passes(as_json: bool) -> None:
    """List passes in the order in which they run, and the pipeline of each level."""
    entries = _in_order(installed.passes())
    rows = [
        {
            "name": entry.spec.name,
            "stage": entry.spec.stage,
            "level": entry.spec.level or "by name",
            "aliases": ", ".join(entry.spec.aliases),
            "distribution": entry.origin,
            "summary": entry.spec.summary,
        }
        for entry in entries
    ]
    levels = PASS_LEVELS
    pipelines = {
        level: [e.spec.name for e in entries if e.spec.level and levels.index(e.spec.level) <= levels.index(level)]
        for level in levels
    }
    if as_json:
        print_json({"passes": rows, "pipelines": pipelines})
        return
    out = console()
    if not rows:
        out.print("No passes are installed, so models compile unoptimized: pip install mithril-passes")
        return
    show(rows, ["name", "stage", "level", "aliases", "distribution", "summary"], out)
    out.print()
    for level, names in pipelines.items():
        out.print(f"[bold]{level}[/bold]: {escape(', '.join(names)) or 'nothing'}")


def _in_order(entries: Mapping[str, Entry[PassSpec]]) -> list[Entry[PassSpec]]:
    """Return all passes in the order of the pass manager."""
    from mithril.passes import Pass, sort_passes

    stand_ins = []
    for name, entry in entries.items():
        place = installed.pass_placement(name)
        stand_ins.append(Pass(name, _unused, entry.spec.stage, entry.spec.level, place.before, place.after))
    return [entries[one.name] for one in sort_passes(stand_ins)]


def _unused(graph: Graph) -> Graph:
    """Return the graph: a placeholder for a pass that is ordered, not run."""
    return graph


@click.command()
@json_option
def options(as_json: bool) -> None:
    """List every keyword of ml.compile, with its owner."""
    rows = option_rows()
    if as_json:
        print_json(rows)
        return
    texts = [{**row, "aliases": ", ".join(row["aliases"])} for row in rows]
    show(texts, ["name", "type", "default", "owner", "help"], console())
