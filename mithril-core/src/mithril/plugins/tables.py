"""Answers of plugins to listing hooks: checked, settled into tables by name, and loaded when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from mithril.base import MithrilError, PluginError, unknown
from mithril.plugins.loader import Loader, Plugin, Problem, missing_requirement, output_to_stderr

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Registered(Generic[S]):
    """A descriptor and the plugin that answered with it."""

    spec: S
    plugin: Plugin

    @property
    def origin(self) -> str:
        """Distribution and version."""
        return self.plugin.origin


@dataclass(frozen=True, slots=True)
class Table(Generic[S]):
    """Everything of one kind by name; ``aliases`` lead to names.

    ``clashes`` holds the rivals for names without an owner, ``losers`` those for names that belong to another plugin.
    """

    kind: str
    entries: Mapping[str, Registered[S]]
    aliases: Mapping[str, str]
    clashes: Mapping[str, tuple[Registered[S], ...]]
    losers: Mapping[str, tuple[Registered[S], ...]]

    def clash_text(self, name: str) -> str | None:
        """Why some plugin's entry of that name or alias is not in use; None without rivals."""
        if rivals := self.clashes.get(name):
            origins = ", ".join(sorted({r.origin for r in rivals}))
            return f"{self.kind} '{name}' is not available: claimed by {origins}"
        if losers := self.losers.get(name):
            origins = ", ".join(sorted({r.origin for r in losers}))
            owner = self.entries[self.aliases.get(name, name)].origin
            return f"{self.kind} '{name}' of {origins} is not used: the name belongs to {owner}"
        return None


class Answers:
    """The answers of all plugins, each hook asked once and its answers kept in a table."""

    loader: Loader
    _tables: dict[str, Any]
    _reserved: dict[str, frozenset[str]]

    def ask(self, hook: str, kind: type[S], only: Plugin | None = None, **given: Any) -> list[Registered[S]]:
        """Answers of all plugins (or one), by plugin name; a wrong or raising one is noted and left out."""
        if only is None:
            self.loader.load_all()
        answers = []
        for plugin, implementation in self.loader.implementations(hook):
            if only is not None and plugin is not only:
                continue
            try:
                with output_to_stderr():
                    answer = implementation(**given)
                specs = list(() if answer is None else answer)
                for spec in specs:
                    if not isinstance(spec, kind):
                        raise TypeError(f"expected {kind.__name__}, got {type(spec).__name__}: {spec!r}")
            except Exception as cause:
                self.loader.problem(plugin, answer_problem(plugin, hook, cause))
                continue
            answers += [Registered(spec, plugin) for spec in specs]
        return answers

    def table(self, hook: str, kind: type[S], what: str) -> Table[S]:
        with self.loader.lock:
            table: Table[S] | None = self._tables.get(hook)
            if table is None:
                answers = self.ask(hook, kind)
                table = self._tables[hook] = self.settle(what, answers, self._reserved.get(hook, ()))
        return table

    def reserve(self, hook: str, names: Iterable[str]) -> None:
        """Declare names that belong to mithril-core: a plugin that answers ``hook`` with one of them is at fault."""
        self._reserved[hook] = frozenset(names)
        self._tables.pop(hook, None)

    def settle(self, what: str, answers: list[Registered[S]], reserved: Container[str] = frozenset()) -> Table[S]:
        """Assign each name to its owner, see ``name_owner``. Names in ``reserved`` belong to mithril-core."""
        claims: dict[str, list[Registered[S]]] = {}
        for answer in answers:
            for name in (_name(answer.spec), *getattr(answer.spec, "aliases", ())):
                claims.setdefault(name, []).append(answer)
        entries: dict[str, Registered[S]] = {}
        aliases: dict[str, str] = {}
        clashes: dict[str, tuple[Registered[S], ...]] = {}
        losers: dict[str, tuple[Registered[S], ...]] = {}
        for name in sorted(claims):
            rivals = claims[name]
            if name in reserved:
                for rival in rivals:
                    self.loader.problem(rival.plugin, _reserved_problem(what, name, rival))
                continue
            owner = name_owner(name, rivals)
            others = tuple(r for r in rivals if r is not owner)
            for loser in others:
                self.loader.problem(loser.plugin, clash_problem(what, name, rivals, owner))
            if owner is None:
                clashes[name] = others
                continue
            if others:
                losers[name] = others
            if _name(owner.spec) == name:
                entries[name] = owner
            else:
                aliases[name] = _name(owner.spec)
        usable = {alias: name for alias, name in aliases.items() if name in entries}
        known_losers = {name: rivals for name, rivals in losers.items() if name in entries or name in usable}
        return Table(what, *map(MappingProxyType, (entries, usable, clashes, known_losers)))  # type: ignore[arg-type]

    def pick(self, table: Table[S], name: str, distribution: str | None = None) -> Registered[S]:
        """The entry of that name or alias, or the error that says why there is none."""
        if found := table.entries.get(table.aliases.get(name, name)):
            return found
        if rivals := table.clashes.get(name):
            raise clash_problem(table.kind, name, rivals).error()
        error = self._absent(table.kind, name, [*table.entries, *table.aliases], distribution)
        offered = [n for n, entry in table.entries.items() if name in (entry.plugin.name, entry.plugin.distribution)]
        raise error.with_hint(f"'{name}' is the plugin; did you mean '{offered[0]}'?") if offered else error

    def _absent(self, kind: str, name: str, names: list[str], distribution: str | None) -> PluginError:
        for plugin in self.loader.named(distribution or name):
            if plugin.loaded is None and plugin.problems:
                return plugin.problems[0].error()
        what, facts, hint = unknown(kind, name, names)
        if distribution is not None:
            installed = self.loader.named(distribution)
            if installed:
                what = f"{installed[0].origin} does not offer the {kind} '{name}'"
                hint = f"pip install --upgrade {distribution}"
            else:
                what, hint = f"the {kind} '{name}' is not installed", f"pip install {distribution}"
        elif not names:
            hint = f"no plugin that offers a {kind} is installed; see `mithril plugins`"
        broken = [p for p in self.loader.plugins if p.loaded is None and p.state not in ("disabled", "found")]
        facts += [f"not loaded: {p.origin} ({p.problems[0].what})" for p in broken]
        return PluginError(what, facts=facts, hint=hint)

    def load_named(self, kind: str, name: str, loads: str, registered: Registered[Any]) -> Any:
        """Import what a descriptor names; failures say whose they are and what to type."""
        module, _, path = loads.partition(":")
        plugin = registered.plugin
        try:
            with output_to_stderr():
                value = importlib.import_module(module)
            for part in path.split("."):
                value = getattr(value, part)
        except MithrilError:
            raise
        except Exception as cause:
            wanted = missing_requirement(plugin.requires) if isinstance(cause, ImportError) else None
            raise PluginError(
                f"the {kind} '{name}' of {plugin.origin} failed when it was loaded",
                facts=[f"{type(cause).__name__}: {cause}", f"loading: {loads}"],
                hint=f'pip install "{wanted}"' if wanted else f"report it to the authors of {plugin.distribution}",
            ) from cause
        return value


def _name(spec: Any) -> str:
    name: str = spec.name
    return name


def answer_problem(plugin: Plugin, hook: str, cause: Exception) -> Problem:
    return Problem(
        "broken",
        f"'{hook}' of plugin '{plugin.name}' ({plugin.origin}) failed",
        (f"{type(cause).__name__}: {cause}",),
        f"report it to the authors of {plugin.distribution}; {plugin.silence()}",
        cause,
    )


def name_owner(name: str, rivals: Sequence[Registered[Any]]) -> Registered[Any] | None:
    """Return the rival that owns a name: the only one, else the core, the first-party one, the one whose name it is."""
    if len(rivals) == 1:
        return rivals[0]
    core = [r for r in rivals if r.plugin.is_core]
    first_party = [r for r in rivals if r.plugin.first_party]
    namesakes = [r for r in rivals if r.plugin.name == name and getattr(r.spec, "name", name) == name]
    return next((found[0] for found in (core, first_party, namesakes) if len(found) == 1), None)


def clash_problem(
    kind: str, name: str, rivals: Sequence[Registered[Any]], owner: Registered[Any] | None = None
) -> Problem:
    origins = sorted({rival.origin for rival in rivals})
    facts = [f"claimed by: {', '.join(origins)}"]
    if owner is not None:
        reason = "a distribution of mithril itself" if owner.plugin.first_party else "whose plugin has that name"
        facts.append(f"it belongs to {owner.origin}, {reason}")
    silence = next((r for r in rivals if r is not owner), rivals[-1]).plugin
    what = f"the {kind} '{name}' is claimed " + ("by two plugins" if len(origins) > 1 else "twice")
    return Problem("clash", what, tuple(facts), f"pip uninstall one of them, or {silence.silence()}")


def _reserved_problem(kind: str, name: str, rival: Registered[Any]) -> Problem:
    return Problem(
        "clash",
        f"the {kind} '{name}' of {rival.origin} cannot be reached: mithril-core has that name",
        (),
        f"the authors of {rival.plugin.distribution} should rename it; {rival.plugin.silence()}",
    )
