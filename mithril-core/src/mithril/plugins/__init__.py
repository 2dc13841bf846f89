"""What installed plugins offer: one typed method per hook, each checking what came back and naming the plugin.

``from mithril import plugins; plugins.backends()``. Nobody else touches pluggy. Listing names imports light plugin
modules only; asking for one backend imports the module of that plugin and no other.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mithril.base import registry
from mithril.base.errors import MithrilError, OptionError, PluginError, closest, unknown
from mithril.plugins import pip_hints
from mithril.plugins.hookspecs import (
    STAGES,
    BackendSpec,
    Command,
    CompileContext,
    Export,
    FileFormat,
    Found,
    FrontendSpec,
    HardwareTarget,
    Lowering,
    OpsSpec,
    Option,
    PassSpec,
    PipelineDraft,
    ProfilerSpec,
    hookimpl,
)
from mithril.plugins.loader import (
    Loader,
    Plugin,
    PluginWarning,
    Problem,
    missing_requirement,
    output_to_stderr,
)
from mithril.plugins.plugin_lowering import PluginLowering

if TYPE_CHECKING:
    from mithril.ir import Graph

S = TypeVar("S")
Runner = Callable[[Any, "Graph", Any], "Graph"]


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


class _Core:
    """The core's own answers to the two deciding hooks: last in line, doing what the caller handed in."""

    def __init__(self) -> None:
        self.calls = threading.local()

    @hookimpl(trylast=True)
    def mithril_run_pass(self, pass_: Any, graph: Graph, context: Any) -> Any:
        return self._last(pass_, graph, context)

    @hookimpl(trylast=True)
    def mithril_build(self, graph: Graph, backend: Any, target: HardwareTarget | None) -> Any:
        return self._last(graph, backend, target)

    def _last(self, *arguments: Any) -> Any:
        return self.calls.stack[-1](*arguments)


class Plugins:
    """The plugins of one process and what they offer. The module's functions are those of one default instance."""

    def __init__(self, disable: Iterable[str] = (), *, strict: bool | None = None, autoload: bool = True) -> None:
        self._arguments = (tuple(disable), strict, autoload)
        self._reserved: dict[str, frozenset[str]] = {}
        self.reload()

    def reload(self, disable: Iterable[str] | None = None) -> None:
        """Forget everything and look again: after installing a plugin in a running process, or to disable some."""
        if disable is not None:
            self._arguments = (tuple(disable), *self._arguments[1:])
        names, strict, autoload = self._arguments
        self.loader = Loader(names, strict=strict, autoload=autoload)
        self._core = _Core()
        self._forget()

    def generation(self) -> object:
        """An object that is another one after every reload: what was derived from plugins is stale then."""
        return self._generation

    def _forget(self) -> None:
        self._generation = object()
        self._tables: dict[str, Any] = {}
        self._hooks: dict[str, Any] = {}

    def register(self, plugin: Any, name: str) -> None:
        """Use a module or object as a plugin without installing it (tests, notebooks)."""
        self.loader.add(plugin, name)
        self._forget()

    def unregister(self, name: str) -> None:
        """Forget a plugin that was registered by hand."""
        for plugin in self.loader.named(name):
            if not plugin.version:
                self.loader.remove(plugin)
        self._forget()

    def found(self) -> list[Plugin]:
        """Every plugin, sorted by name, without importing any."""
        return list(self.loader.plugins)

    def all(self) -> list[Plugin]:
        """Every plugin, loaded where that is possible; ``state`` and ``problems`` tell the rest."""
        self.loader.load_all()
        self.provided()  # asking every hook is what brings the remaining problems to light
        return list(self.loader.plugins)

    # ------------------------------------------------------------------------------------------------ collecting
    def _ask(self, hook: str, kind: type[S], only: Plugin | None = None, **given: Any) -> list[Registered[S]]:
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
                self.loader.problem(plugin, _answer_problem(plugin, hook, cause))
                continue
            answers += [Registered(spec, plugin) for spec in specs]
        return answers

    def _table(self, hook: str, kind: type[S], what: str) -> Table[S]:
        with self.loader.lock:
            table: Table[S] | None = self._tables.get(hook)
            if table is None:
                answers = self._ask(hook, kind)
                table = self._tables[hook] = self._settle(what, answers, self._reserved.get(hook, ()))
        return table

    def reserve(self, hook: str, names: Iterable[str]) -> None:
        """Declare names that belong to mithril-core: a plugin that answers ``hook`` with one of them is at fault."""
        self._reserved[hook] = frozenset(names)
        self._tables.pop(hook, None)

    def _settle(self, what: str, answers: list[Registered[S]], reserved: Container[str] = frozenset()) -> Table[S]:
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
                self.loader.problem(loser.plugin, _clash_problem(what, name, rivals, owner))
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

    def clash_text(self, hook: str, name: str) -> str | None:
        """Return why a plugin's backend or hardware target of that name is not in use; None without rivals."""
        tables: dict[str, Callable[[], Table[Any]]] = {
            "mithril_backends": lambda: self._table("mithril_backends", BackendSpec, "backend"),
            "mithril_targets": lambda: self._table("mithril_targets", HardwareTarget, "hardware target"),
        }
        return tables[hook]().clash_text(name)

    def _pick(self, table: Table[S], name: str, distribution: str | None = None) -> Registered[S]:
        """The entry of that name or alias, or the error that says why there is none."""
        if found := table.entries.get(table.aliases.get(name, name)):
            return found
        if rivals := table.clashes.get(name):
            raise _clash_problem(table.kind, name, rivals).error()
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

    def _load(self, kind: str, name: str, loads: str, registered: Registered[Any]) -> Any:
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

    # -------------------------------------------------------------------------------------------------- backends
    def backends(self) -> Mapping[str, Registered[BackendSpec]]:
        """Installed backends by name."""
        return self._table("mithril_backends", BackendSpec, "backend").entries

    def backend(self, name: str) -> Registered[BackendSpec]:
        """The descriptor of one backend; imports only that plugin's module where plugin and backend share a name."""
        if "mithril_backends" not in self._tables:
            for plugin in self.loader.named(name):
                if plugin.name == name and self.loader.load(plugin):
                    for answer in self._ask("mithril_backends", BackendSpec, only=plugin):
                        if answer.spec.name == name:
                            return answer
        return self._pick(self._table("mithril_backends", BackendSpec, "backend"), name, pip_hints.BACKENDS.get(name))

    def backend_class(self, name: str) -> type[Any]:
        """The class of one backend, importing its framework."""
        found = self.backend(name)
        loaded: type[Any] = self._load("backend", name, found.spec.loads, found)
        return loaded

    # ---------------------------------------------------------------------------------------------------- passes
    def pass_table(self) -> Table[PassSpec]:
        """Installed passes, their aliases, and the names that several plugins claim."""
        with self.loader.lock:
            is_new = "mithril_passes" not in self._tables
            table = self._table("mithril_passes", PassSpec, "pass")
            if is_new:
                for entry in table.entries.values():
                    for fault in placement(entry, table).faults:
                        self.loader.problem(entry.plugin, fault)
        return table

    def passes(self) -> Mapping[str, Registered[PassSpec]]:
        """Installed passes by name."""
        return self.pass_table().entries

    def pass_aliases(self) -> Mapping[str, str]:
        """Other names of passes."""
        return self.pass_table().aliases

    def pass_spec(self, name: str) -> Registered[PassSpec]:
        """The descriptor of one pass, by name or alias."""
        return self._pick(self.pass_table(), name)

    def pass_placement(self, name: str) -> Placement:
        """The passes that an installed pass must precede and follow, with aliases resolved."""
        return placement(self.pass_spec(name), self.pass_table())

    def load_pass(self, name: str) -> Any:
        """The pass itself: a function ``graph -> graph`` or a pass class."""
        found = self.pass_spec(name)
        return self._load("pass", name, found.spec.loads, found)

    def amend_pipeline(self, draft: PipelineDraft, target: HardwareTarget | None, level: str) -> PipelineDraft:
        """Collect what plugins want changed into ``draft``; contradictions are errors that name both plugins."""
        self.loader.load_all()
        said: dict[str, tuple[Plugin, str]] = {}  # pass -> who spoke of its fate, and what they said
        for plugin, implementation in self.loader.implementations("mithril_amend_pipeline"):
            own = PipelineDraft(draft.names)
            try:
                implementation(draft=own, target=target, level=level)
            except Exception as cause:
                raise _decider_error(plugin, "mithril_amend_pipeline", cause) from cause
            fates = dict.fromkeys(own.removed, "leave it out") | {
                name: f"run '{by}' instead" for name, by in own.replaced.items()
            }
            for name, fate in fates.items():
                other, other_fate = said.setdefault(name, (plugin, fate))
                if other_fate != fate:
                    raise PluginError(
                        f"two plugins disagree about the pass '{name}'",
                        facts=[f"{other.origin}: {other_fate}", f"{plugin.origin}: {fate}"],
                        hint=f"set MITHRIL_DISABLE_PLUGINS={plugin.name} to leave one of them out",
                    )
            verbs = {"add": own.added, "leave out": own.removed}
            changes = [f"{verb} '{name}'" for verb, names in verbs.items() for name in names]
            changes += [f"run '{by}' for '{name}'" for name, by in own.replaced.items()]
            if changes:
                draft.changes.append(f"passes amended by {plugin.origin}: {', '.join(changes)}")
            draft.added += [name for name in own.added if name not in draft.added]
            draft.removed += [name for name in own.removed if name not in draft.removed]
            draft.replaced |= own.replaced
        return draft

    # ------------------------------------------------------------------------------------- targets and profilers
    def targets(self) -> Mapping[str, Registered[HardwareTarget]]:
        """Installed hardware targets by name."""
        return self._table("mithril_targets", HardwareTarget, "hardware target").entries

    def target(self, name: str) -> Registered[HardwareTarget]:
        """One hardware target by name or alias."""
        table = self._table("mithril_targets", HardwareTarget, "hardware target")
        return self._pick(table, name, pip_hints.TARGETS.get(name))

    def detect_targets(self) -> list[Registered[Found]]:
        """Targets that this machine has, best first: by rank, then by name."""
        found = self._ask("mithril_detect_targets", Found)
        return sorted(found, key=lambda f: (-f.spec.rank, f.spec.name))

    def profilers(self) -> Mapping[str, Registered[ProfilerSpec]]:
        """Installed profilers by name."""
        return self._table("mithril_profilers", ProfilerSpec, "profiler").entries

    def load_profiler(self, name: str) -> Any:
        """The profiler itself."""
        found = self._pick(self._table("mithril_profilers", ProfilerSpec, "profiler"), name)
        return self._load("profiler", name, found.spec.loads, found)

    # ------------------------------------------------------------------------------------ options, ops, lowerings
    def options(self) -> list[Registered[Option]]:
        """Options of ``ml.compile`` that plugins declare, by plugin; ``option_table`` joins them with the core's."""
        with self.loader.lock:
            if "mithril_options" not in self._tables:
                self._tables["mithril_options"] = self._ask("mithril_options", Option)
            answers: list[Registered[Option]] = self._tables["mithril_options"]
        return answers

    def op_names(self) -> tuple[str, ...]:
        """Names of operations that plugins declare."""
        return tuple(sorted(self._ops()))

    def import_op(self, name: str) -> bool:
        """Import the module that declares the operation ``name``; False where no plugin has it."""
        found = self._ops().get(name)
        if found is None:
            return False
        owner = found[0] if len(found) == 1 else name_owner(name, found)
        for loser in found:
            if loser is not owner:
                self.loader.problem(loser.plugin, _clash_problem("operation", name, found, owner))
        if owner is None:
            raise _clash_problem("operation", name, found).error()
        self._load("operation", name, f"{owner.spec.module}:__name__", owner)
        return True

    def _ops(self) -> dict[str, list[Registered[OpsSpec]]]:
        with self.loader.lock:
            if "mithril_ops" not in self._tables:
                table: dict[str, list[Registered[OpsSpec]]] = {}
                for answer in self._ask("mithril_ops", OpsSpec):
                    for name in answer.spec.names:
                        table.setdefault(name, []).append(answer)
                self._tables["mithril_ops"] = table
            known_ops: dict[str, list[Registered[OpsSpec]]] = self._tables["mithril_ops"]
        return known_ops

    def lowerings(self, backend: str) -> Mapping[str, tuple[PluginLowering, ...]]:
        """Plugins' lowerings for ``backend`` by operation. One that several plugins claim raises where it is used."""
        key = f"mithril_lowerings {backend}"
        with self.loader.lock:
            if key not in self._tables:
                offers: dict[str, list[Registered[Lowering]]] = {}
                for answer in self._ask("mithril_lowerings", Lowering, backend=backend):
                    offers.setdefault(answer.spec.op, []).append(answer)
                self._tables[key] = {op: self._lowerings_of(op, backend, some) for op, some in sorted(offers.items())}
            table: Mapping[str, tuple[PluginLowering, ...]] = self._tables[key]
        return table

    def _lowerings_of(self, op: str, backend: str, offers: list[Registered[Lowering]]) -> tuple[PluginLowering, ...]:
        """Return the lowerings of one plugin, those with a condition first, or one that raises the clash."""
        rivals = {id(offer.plugin): offer for offer in offers}
        owner = name_owner(op, list(rivals.values())) or self._declares(op, list(rivals.values()))
        own = sorted((o for o in offers if owner and o.plugin is owner.plugin), key=lambda o: o.spec.when is None)
        clash = None
        if len(rivals) > 1 or len([o for o in own if o.spec.when is None]) > 1:
            clash = _clash_problem(f"lowering on '{backend}' of", op, offers, owner)
            for loser in offers:
                if loser not in own or len(rivals) == 1:
                    self.loader.problem(loser.plugin, clash)
        if clash is not None and (owner is None or len(rivals) == 1):
            return (PluginLowering(op, backend, offers[0].origin, offers[0].spec.loads, clash=clash.error),)
        return tuple(PluginLowering(op, backend, o.origin, o.spec.loads, o.spec.when) for o in own)

    def _declares(self, op: str, rivals: list[Registered[Lowering]]) -> Registered[Lowering] | None:
        """Return the rival whose plugin declares the operation itself."""
        homes = [found.plugin for found in self._ops().get(op, ())]
        return next((r for r in rivals if homes == [r.plugin]), None)

    # ------------------------------------------------------------------------------------------ names and commands
    def exports(self) -> Mapping[str, Registered[Export]]:
        """Names that plugins add to the public face; each backend's class is one of them."""
        return self._exports().entries

    def _exports(self) -> Table[Export]:
        with self.loader.lock:
            if "mithril_exports" not in self._tables:
                names = [answer for answer in self._ask("mithril_exports", Export) if not answer.spec.on]
                answers = [*map(_class_export, self.backends().values()), *names]
                self._tables["mithril_exports"] = self._settle("name", answers, frozenset(registry.face_names()))
            table: Table[Export] = self._tables["mithril_exports"]
        return table

    def export(self, name: str) -> Any:
        """What ``ml.<name>`` is, loaded; the exact pip line where a known distribution would bring it."""
        home = pip_hints.EXPORTS.get(name)
        if home and "mithril_exports" not in self._tables:
            for plugin in self.loader.named(home):
                if self.loader.load(plugin):
                    answers = [*map(_class_export, self._ask("mithril_backends", BackendSpec, only=plugin))]
                    for answer in [*answers, *self._ask("mithril_exports", Export, only=plugin)]:
                        if answer.spec.name == name and not answer.spec.on:
                            return self._load("name", f"ml.{name}", answer.spec.loads, answer)
        table = self._exports()
        if home is None and name not in table.entries and name not in table.clashes:
            raise AttributeError(f"module 'mithril' has no attribute '{name}', and no installed plugin brings it")
        found = self._pick(table, name, home)
        return self._load("name", f"ml.{name}", found.spec.loads, found)

    def extensions(self) -> dict[str, Registered[Export]]:
        """Methods that plugins add to compiled models, by name."""
        answers = self._ask("mithril_exports", Export)
        return {answer.spec.name: answer for answer in answers if answer.spec.on == "CompiledModel"}

    def extension(self, kind: str, name: str) -> Callable[..., Any]:
        """Return the function that a plugin adds to a class of the core as the method ``name``."""
        if not name.startswith("_"):
            for answer in self._ask("mithril_exports", Export):
                if answer.spec.on == kind and answer.spec.name == name:
                    function: Callable[..., Any] = self._load("method", f"{kind}.{name}", answer.spec.loads, answer)
                    return function
        home = pip_hints.METHODS.get(name)
        hint = f"; it comes with {home}: pip install {home}" if home else ""
        raise AttributeError(f"'{kind}' object has no attribute '{name}'{hint}")

    def formats(self) -> Mapping[str, Registered[FileFormat]]:
        """File formats by name."""
        return self._table("mithril_formats", FileFormat, "file format").entries

    def format_of(self, path: str, name: str | None = None) -> Registered[FileFormat]:
        """The format of that name, else the one that the path's suffix belongs to."""
        table = self._table("mithril_formats", FileFormat, "file format")
        if name is not None:
            return self._pick(table, name, pip_hints.FORMATS.get(name))
        for entry in table.entries.values():
            if any(path.endswith(suffix) for suffix in entry.spec.suffixes):
                return entry
        suffix = PurePath(path).suffix
        home = next((home for home in pip_hints.FORMATS if suffix == f".{home}"), None)
        if home is not None:
            return self._pick(table, home, pip_hints.FORMATS[home])
        offered = [f"{n}: {', '.join(e.spec.suffixes) or 'a folder'}" for n, e in table.entries.items()]
        raise PluginError(
            f"no file format has the suffix of '{path}'",
            facts=[f"formats: {'; '.join(offered) or 'none is installed'}"],
            hint="name one with format=",
        )

    def load_format(self, found: Registered[FileFormat], way: str) -> Any:
        """The function that saves or loads a format."""
        spec = found.spec
        named = spec.saves if way == "saves" else spec.loads
        if named is None:
            verb = "be written" if way == "saves" else "be read back"
            raise PluginError(f"files of the format '{spec.name}' cannot {verb}", facts=[f"offered by {found.origin}"])
        return self._load("file format", spec.name, named, found)

    def frontends(self) -> Mapping[str, Registered[FrontendSpec]]:
        """Kinds of models that plugins add, by name."""
        return self._table("mithril_frontends", FrontendSpec, "frontend").entries

    def load_frontend(self, name: str) -> Any:
        """The function that makes the source of a model."""
        found = self._pick(self._table("mithril_frontends", FrontendSpec, "frontend"), name)
        return self._load("frontend", name, found.spec.loads, found)

    def commands(self) -> Mapping[str, Registered[Command]]:
        """Sub-commands that plugins add to the command line."""
        return self._table("mithril_commands", Command, "command").entries

    def load_command(self, name: str) -> Any:
        """The ``click.Command`` of a plugin."""
        found = self._pick(self._table("mithril_commands", Command, "command"), name)
        return self._load("command", name, found.spec.loads, found)

    def provided(self) -> list[tuple[str, str, Plugin]]:
        """Kind, name and plugin of everything that plugins offer, for listings."""
        tables: dict[str, Mapping[str, Registered[Any]]] = {
            "backend": self.backends(),
            "pass": self.passes(),
            "target": self.targets(),
            "frontend": self.frontends(),
            "profiler": self.profilers(),
            "export": self.exports(),
            "format": self.formats(),
            "command": self.commands(),
        }
        rows = [(kind, name, entry.plugin) for kind, table in tables.items() for name, entry in table.items()]
        rows += [("option", answer.spec.name, answer.plugin) for answer in self.options()]
        rows += [("op", name, found[0].plugin) for name, found in self._ops().items()]
        return rows

    # ------------------------------------------------------------------------------------- deciders and observers
    def run_pass(self, pass_: Any, graph: Graph, context: Any, last: Runner) -> Graph:
        """The graph after ``pass_``: ``last(pass_, graph, context)``, inside whatever plugins wrap around it."""
        hook = self._hooks.get("mithril_run_pass", self)
        if hook is self:
            hook = self._decider("mithril_run_pass")
        if hook is None:
            return last(pass_, graph, context)
        result: Graph = self._decide(hook, last, pass_=pass_, graph=graph, context=context)
        return result

    def build(
        self, graph: Graph, backend: Any, target: HardwareTarget | None, last: Callable[[Graph, Any, Any], Any]
    ) -> Any:
        """The executable for ``graph``: ``last(graph, backend, target)``, inside whatever plugins wrap around it."""
        hook = self._hooks.get("mithril_build", self)
        if hook is self:
            hook = self._decider("mithril_build")
        if hook is None:
            return last(graph, backend, target)
        return self._decide(hook, last, graph=graph, backend=backend, target=target)

    def _decider(self, name: str) -> Any:
        with self.loader.lock:
            self.loader.load_all()
            manager = self.loader.manager
            hook = getattr(manager.hook, name)
            if hook.get_hookimpls() and not manager.is_registered(self._core):
                manager.register(self._core, "mithril-core")
            self._hooks[name] = hook if hook.get_hookimpls() else None
            return self._hooks[name]

    def deciders(self) -> list[str]:
        """Hook and origin of each plugin that takes part in running passes or in building executables."""
        hooks = ("mithril_run_pass", "mithril_build")
        self.loader.load_all()
        return [f"{hook} of {plugin.origin}" for hook in hooks for plugin, _ in self.loader.implementations(hook)]

    def _decide(self, hook: Any, last: Callable[..., Any], **given: Any) -> Any:
        stack = self._core.calls.__dict__.setdefault("stack", [])
        stack.append(last)
        try:
            return hook(**given)
        except Exception as error:
            plugin = self._culprit(hook, error)
            if plugin is None:
                raise
            raise _decider_error(plugin, hook.name, error) from error
        finally:
            stack.pop()

    def _culprit(self, hook: Any, error: BaseException) -> Plugin | None:
        """The plugin whose implementation of ``hook`` the error came out of; None where it was the pass or backend."""
        codes = {i.function.__code__: i.plugin_name for i in hook.get_hookimpls() if hasattr(i.function, "__code__")}
        trace, name = error.__traceback__, None
        while trace is not None:
            name = codes.get(trace.tb_frame.f_code, name)
            trace = trace.tb_next
        return next((plugin for plugin in self.loader.plugins if plugin.name == name), None)

    def advise(
        self, model: Any, backend: Any, options: Mapping[str, Any], given: Mapping[str, Any]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the options that plugins advise for a model, with the origin of each advice."""
        advice = self._observe("mithril_advise", model=model, backend=backend, options=options, given=given)
        return [(plugin.origin, dict(answer)) for plugin, answer in advice if answer]

    def observers(self, context: CompileContext) -> list[Any]:
        """Return the observers of a compilation."""
        return [one for _, answer in self._observe("mithril_observers", context=context) for one in answer or ()]

    def compile_begin(self, context: CompileContext) -> None:
        """Tell observers that a compile begins."""
        self._observe("mithril_compile_begin", context=context)

    def compile_stage(self, context: CompileContext, stage: str, graph: Graph | None) -> None:
        """Tell observers that a stage has ended."""
        self._observe("mithril_compile_stage", context=context, stage=stage, graph=graph)

    def compile_end(self, context: CompileContext, result: Any, error: BaseException | None) -> None:
        """Tell observers how the compile ended."""
        self._observe("mithril_compile_end", context=context, result=result, error=error)

    def _observe(self, hook: str, **given: Any) -> list[tuple[Plugin, Any]]:
        """Call every implementation of a hook; an error of one is reported and stops nothing."""
        answers = []
        observers = self._hooks.get(hook)
        if observers is None:
            self.loader.load_all()
            observers = self._hooks[hook] = self.loader.implementations(hook)
        for plugin, implementation in observers:
            try:
                answers.append((plugin, implementation(**given)))
            except (TimeoutError, OptionError):
                raise  # the compile's own time limit, which may strike anywhere; what the user asked for is wrong
            except Exception as cause:
                problem = _answer_problem(plugin, hook, cause)
                self.loader.problem(plugin, problem)
                warnings.warn(str(problem.error()), PluginWarning, stacklevel=3)
        return answers


@dataclass(frozen=True, slots=True)
class Placement:
    """``before`` and ``after`` of an installed pass, by real names; ``faults`` describe the names that mean nothing."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    faults: tuple[Problem, ...]


def placement(entry: Registered[PassSpec], table: Table[PassSpec]) -> Placement:
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
    entry: Registered[PassSpec], field: str, word: str, other: Registered[PassSpec] | None, table: Table[PassSpec]
) -> Problem:
    spec = entry.spec
    if other is None:
        near = closest(word, [*table.entries, *table.aliases])
        reason, hint = "no installed pass has that name", f"did the author mean '{near[0]}'? " if near else ""
    else:
        reason, hint = f"that pass runs in stage '{other.spec.stage}', not in '{spec.stage}'", ""
    return Problem(
        "broken",
        f"pass '{spec.name}' of {entry.origin} says {field}='{word}': {reason}",
        (f"stages, in order: {', '.join(STAGES)}",) if other is not None else (),
        f"{hint}report it to the authors of {entry.plugin.distribution}",
    )


def _name(spec: Any) -> str:
    name: str = spec.name
    return name


def _class_export(backend: Registered[BackendSpec]) -> Registered[Export]:
    return Registered(Export(backend.spec.class_name, backend.spec.loads), backend.plugin)


def _answer_problem(plugin: Plugin, hook: str, cause: Exception) -> Problem:
    return Problem(
        "broken",
        f"'{hook}' of plugin '{plugin.name}' ({plugin.origin}) failed",
        (f"{type(cause).__name__}: {cause}",),
        f"report it to the authors of {plugin.distribution}; {plugin.silence()}",
        cause,
    )


def name_owner(name: str, rivals: Sequence[Registered[Any]]) -> Registered[Any] | None:
    """Return the rival that owns a name: the only one, else the first-party one, else the one whose name it is."""
    if len(rivals) == 1:
        return rivals[0]
    first_party = [r for r in rivals if r.plugin.first_party]
    namesakes = [r for r in rivals if r.plugin.name == name and getattr(r.spec, "name", name) == name]
    return next((found[0] for found in (first_party, namesakes) if len(found) == 1), None)


def _clash_problem(
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


def _decider_error(plugin: Plugin, hook: str, cause: Exception) -> PluginError:
    return _answer_problem(plugin, hook, cause).error()


default = Plugins()

reload = default.reload
register = default.register
unregister = default.unregister
generation = default.generation
found = default.found
all = default.all
backends = default.backends
backend = default.backend
backend_class = default.backend_class
reserve = default.reserve
clash_text = default.clash_text
pass_table = default.pass_table
pass_placement = default.pass_placement
deciders = default.deciders
passes = default.passes
pass_aliases = default.pass_aliases
pass_spec = default.pass_spec
load_pass = default.load_pass
amend_pipeline = default.amend_pipeline
targets = default.targets
target = default.target
detect_targets = default.detect_targets
profilers = default.profilers
load_profiler = default.load_profiler
options = default.options
op_names = default.op_names
import_op = default.import_op
lowerings = default.lowerings
exports = default.exports
formats = default.formats
format_of = default.format_of
load_format = default.load_format
export = default.export
commands = default.commands
frontends = default.frontends
load_frontend = default.load_frontend
load_command = default.load_command
provided = default.provided
run_pass = default.run_pass
build = default.build
advise = default.advise
observers = default.observers
extension = default.extension
extensions = default.extensions
compile_begin = default.compile_begin
compile_stage = default.compile_stage
compile_end = default.compile_end
