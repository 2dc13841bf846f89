"""Results of the listing hooks: checked, stored in tables by name, and loaded on first use."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from mithril.graph import STAGES, CompileTimeoutError, MithrilError, PluginError, closest, unknown
from mithril.plugins.loader import Loader, Plugin, PluginProblem, missing_requirement, named_if_slow, normalized
from mithril.plugins.specs import PassSpec

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[S]):
    """A descriptor and the plugin that returned it."""

    spec: S
    plugin: Plugin

    @property
    def origin(self) -> str:
        """Distribution and version."""
        return self.plugin.origin


@dataclass(frozen=True, slots=True)
class Listing(Generic[S]):
    """A hook that lists descriptors with unique names, and the word for an entry in error messages."""

    hook: str
    spec: type[S]
    label: str


@dataclass(frozen=True, slots=True)
class Table(Generic[S]):
    """All entries of one kind by name; ``aliases`` maps other names to names.

    ``clashes`` holds the entries that claim a name without an owner, ``losers`` those whose name another plugin owns.
    """

    kind: str
    entries: Mapping[str, Entry[S]]
    aliases: Mapping[str, str]
    clashes: Mapping[str, tuple[Entry[S], ...]]
    losers: Mapping[str, tuple[Entry[S], ...]]

    def clash_text(self, name: str) -> str | None:
        """Return the reason that an entry with that name or alias is not used, or None without conflict."""
        if rivals := self.clashes.get(name):
            origins = ", ".join(sorted({r.origin for r in rivals}))
            return f"{self.kind} '{name}' is not available: claimed by {origins}"
        if losers := self.losers.get(name):
            origins = ", ".join(sorted({r.origin for r in losers}))
            owner = self.entries[self.aliases.get(name, name)].origin
            return f"{self.kind} '{name}' of {origins} is not used: the name belongs to {owner}"
        return None


class Answers:
    """The results of all plugins; each hook is called once and cached in a table."""

    loader: Loader
    _tables: dict[str, Any]
    _reserved: dict[str, frozenset[str]]

    def call_hook(self, hook: str, kind: type[S], only: Plugin | None = None, **arguments: Any) -> list[Entry[S]]:
        """Return the results of all plugins (or one), by plugin name; invalid results are recorded as problems."""
        if only is None:
            self.loader.load_all()
        answers = []
        with redirect_stdout(sys.stderr), named_if_slow(hook) as begin:
            for plugin, implementation in self.loader.implementations(hook):
                if only is not None and plugin is not only:
                    continue
                begin(plugin)
                try:
                    answer = implementation(**arguments)
                    specs = list(() if answer is None else answer)
                    for spec in specs:
                        if not isinstance(spec, kind):
                            raise TypeError(f"expected {kind.__name__}, got {type(spec).__name__}: {spec!r}")
                except CompileTimeoutError:
                    raise
                # A plugin that calls sys.exit must not end the process of its user.
                except (Exception, SystemExit) as cause:
                    self.loader.problem(plugin, answer_problem(plugin, hook, cause, arguments.get("backend", "")))
                    continue
                answers += [Entry(spec, plugin) for spec in specs]
        return answers

    def table(self, listing: Listing[S]) -> Table[S]:
        """Return the entries of one listing hook by name."""
        hook, reserved = listing.hook, self._reserved.get(listing.hook, ())
        return self.once(hook, lambda: self.assign_owners(listing.label, self.call_hook(hook, listing.spec), reserved))

    def once(self, key: str, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``, called once until plugins change."""
        with self.loader.lock:
            if key not in self._tables:
                self._tables[key] = compute()
            value: T = self._tables[key]
        return value

    def reserve(self, hook: str, names: Iterable[str]) -> None:
        """Reserve names for mithril-core: plugins that return one of them from ``hook`` get a problem."""
        self._reserved[hook] = frozenset(names)
        self._tables.pop(hook, None)

    def assign_owners(self, label: str, answers: list[Entry[S]], reserved: Container[str] = frozenset()) -> Table[S]:
        """Assign each name to its owner, see ``name_owner``. Names in ``reserved`` belong to mithril-core."""
        claims: dict[str, list[Entry[S]]] = {}
        for answer in answers:
            for name in (_name(answer.spec), *getattr(answer.spec, "aliases", ())):
                claims.setdefault(name, []).append(answer)
        entries: dict[str, Entry[S]] = {}
        aliases: dict[str, str] = {}
        clashes: dict[str, tuple[Entry[S], ...]] = {}
        losers: dict[str, tuple[Entry[S], ...]] = {}
        for name in sorted(claims):
            rivals = claims[name]
            if name in reserved:
                for rival in rivals:
                    self.loader.problem(rival.plugin, _reserved_problem(label, name, rival))
                continue
            owner = name_owner(name, rivals)
            losing = tuple(r for r in rivals if r is not owner)
            for loser in losing:
                self.loader.problem(loser.plugin, clash_problem(label, name, rivals, owner))
            if owner is None:
                clashes[name] = losing
                continue
            if losing:
                losers[name] = losing
            if _name(owner.spec) == name:
                entries[name] = owner
            else:
                aliases[name] = _name(owner.spec)
        usable = {alias: name for alias, name in aliases.items() if name in entries}
        known_losers = {name: rivals for name, rivals in losers.items() if name in entries or name in usable}
        return Table(label, *map(MappingProxyType, (entries, usable, clashes, known_losers)))  # type: ignore[arg-type]

    def look_up(self, table: Table[S], name: str, distribution: str | None = None) -> Entry[S]:
        """Return the entry with that name or alias, or raise the reason that it is missing."""
        if registered := table.entries.get(table.aliases.get(name, name)):
            return registered
        if rivals := table.clashes.get(name):
            raise clash_problem(table.kind, name, rivals).error()
        error = self._absent(table.kind, name, [*table.entries, *table.aliases], distribution)
        offered = [n for n, entry in table.entries.items() if name in (entry.plugin.name, entry.plugin.distribution)]
        raise error.with_hint(f"'{name}' is the plugin; did you mean '{offered[0]}'?") if offered else error

    def _absent(self, kind: str, name: str, names: list[str], distribution: str | None) -> PluginError:
        for plugin in self.loader.named(distribution or name):
            if plugin.loaded is None and plugin.problems:
                return plugin.problems[0].error()
        message, facts, hint = unknown(kind, name, names)
        if distribution is not None:
            installed = self.loader.named(distribution)
            if installed:
                message = f"{installed[0].origin} does not provide the {kind} '{name}'"
                hint = f"pip install --upgrade {distribution}"
            else:
                message, hint = f"the {kind} '{name}' is not installed", f"pip install {distribution}"
        elif not names:
            hint = f"no installed plugin provides a {kind}; see `mithril plugins`"
        broken = [p for p in self.loader.plugins if p.loaded is None and p.state not in ("disabled", "found")]
        facts += [f"not loaded: {p.origin} ({p.problems[0].what})" for p in broken]
        return PluginError(message, facts=facts, hint=hint)

    def load_named(self, kind: str, name: str, loads: str, registered: Entry[Any]) -> Any:
        """Import the object that a descriptor names; errors name the plugin and a remedy."""
        module, _, path = loads.partition(":")
        plugin = registered.plugin
        try:
            with redirect_stdout(sys.stderr):
                value = importlib.import_module(module)
            for part in path.split("."):
                value = getattr(value, part)
        except MithrilError:
            raise
        except Exception as cause:
            missing = _missing(plugin, cause) if isinstance(cause, ImportError) else None
            raise PluginError(
                f"cannot load the {kind} '{name}' of {plugin.origin}",
                facts=[f"{type(cause).__name__}: {cause}", f"loading: {loads}"],
                hint=f'pip install "{missing}"' if missing else f"report it to the authors of {plugin.distribution}",
            ) from cause
        return value


def _missing(plugin: Plugin, cause: ImportError) -> str | None:
    """Return what to install for an import to work: the extra that provides the module, or a requirement."""
    package = normalized((cause.name or "").partition(".")[0])
    for line in plugin.requires:
        match = re.match(r"""([\w.-]+).*extra == ["']([\w.-]+)["']""", line)
        if match and normalized(match[1]) == package:
            return f"{plugin.distribution}[{match[2]}]"
    return missing_requirement(plugin.requires)


def _name(spec: Any) -> str:
    name: str = spec.name
    return name


def answer_problem(plugin: Plugin, hook: str, cause: BaseException, backend: str = "") -> PluginProblem:
    for_backend = f" for the backend '{backend}'" * bool(backend)
    return PluginProblem(
        "broken",
        f"'{hook}'{for_backend} of plugin '{plugin.name}' ({plugin.origin}) failed",
        (f"{type(cause).__name__}: {cause}",),
        f"report it to the authors of {plugin.distribution}; {plugin.disable_hint()}",
        cause,
        hook,
        backend,
    )


def name_owner(name: str, rivals: Sequence[Entry[Any]]) -> Entry[Any] | None:
    """Return the owner of a name: the only claim, else the core, the first-party one, or the plugin of that name."""
    if len(rivals) == 1:
        return rivals[0]
    core = [r for r in rivals if r.plugin.is_core]
    first_party = [r for r in rivals if r.plugin.first_party]
    namesakes = [r for r in rivals if r.plugin.name == name and getattr(r.spec, "name", name) == name]
    return next((candidates[0] for candidates in (core, first_party, namesakes) if len(candidates) == 1), None)


def clash_problem(kind: str, name: str, rivals: Sequence[Entry[Any]], owner: Entry[Any] | None = None) -> PluginProblem:
    origins = sorted({rival.origin for rival in rivals})
    facts = [f"claimed by: {', '.join(origins)}"]
    if owner is not None:
        reason = "a distribution of mithril itself" if owner.plugin.first_party else "whose plugin has that name"
        facts.append(f"the name belongs to {owner.origin}, {reason}")
    silence = next((r for r in rivals if r is not owner), rivals[-1]).plugin
    message = f"the {kind} '{name}' is claimed " + ("by two plugins" if len(origins) > 1 else "twice")
    return PluginProblem("clash", message, tuple(facts), f"pip uninstall one of them, or {silence.disable_hint()}")


def _reserved_problem(kind: str, name: str, rival: Entry[Any]) -> PluginProblem:
    return PluginProblem(
        "clash",
        f"the {kind} '{name}' of {rival.origin} cannot be reached: mithril-core has that name",
        (),
        f"the authors of {rival.plugin.distribution} should rename it; {rival.plugin.disable_hint()}",
    )


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
