"""The plugins of one process, with one typed method per kind of entry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mithril.graph import OperationError, PluginError, registry
from mithril.plugins import pip_hints
from mithril.plugins.hook_calls import HookCalls, LastAnswers
from mithril.plugins.loader import Loader, Plugin, PluginProblem
from mithril.plugins.private_names import private_imports
from mithril.plugins.specs import (
    Architecture,
    BackendSpec,
    Command,
    DeviceSpec,
    Export,
    FileFormat,
    Found,
    FrontendSpec,
    HardwareTarget,
    Lowering,
    OpsSpec,
    Option,
    PassSpec,
    ProfilerSpec,
)
from mithril.plugins.tables import Answers, Entry, Listing, Placement, Table, clash_problem, name_owner, placement

S = TypeVar("S")
BACKENDS = Listing("mithril_backends", BackendSpec, "backend")
PASSES = Listing("mithril_passes", PassSpec, "pass")
TARGETS = Listing("mithril_targets", HardwareTarget, "hardware target")
DEVICES = Listing("mithril_devices", DeviceSpec, "device")
PROFILERS = Listing("mithril_profilers", ProfilerSpec, "profiler")
FORMATS = Listing("mithril_formats", FileFormat, "file format")
FRONTENDS = Listing("mithril_frontends", FrontendSpec, "frontend")
COMMANDS = Listing("mithril_commands", Command, "command")
ARCHITECTURES = Listing("mithril_architectures", Architecture, "architecture")


@dataclass(frozen=True, slots=True)
class LoweringOffer:
    """A lowering of a plugin; ``clash`` returns the error if several plugins provide it and none owns it."""

    spec: Lowering
    origin: str
    clash: Callable[[], PluginError] | None = None


class Plugins(Answers, HookCalls):
    """The plugins of one process and their entries. The module's functions are methods of one default instance."""

    def __init__(self, disable: Iterable[str] = (), *, strict: bool | None = None, autoload: bool = True) -> None:
        self._arguments = (tuple(disable), strict, autoload)
        self._reserved: dict[str, frozenset[str]] = {}
        self.reload()

    def reload(self, disable: Iterable[str] | None = None) -> None:
        """Discover plugins again, after one was installed in a running process or to disable some."""
        if disable is not None:
            self._arguments = (tuple(disable), *self._arguments[1:])
        names, strict, autoload = self._arguments
        self.loader = Loader(names, strict=strict, autoload=autoload)
        self._last = LastAnswers()
        self._forget()

    def generation(self) -> object:
        """Return an object that changes with every reload; caches derived from plugins are keyed by it."""
        return self._generation

    def _forget(self) -> None:
        self._generation = object()
        self._tables: dict[str, Any] = {}
        self._placements: dict[str, Placement] = {}
        self._hooks: dict[str, Any] = {}

    def register(self, plugin: Any, name: str) -> None:
        """Use a module or object as a plugin without installing it (tests, notebooks)."""
        self.loader.add(plugin, name)
        self._forget()

    def unregister(self, name: str) -> None:
        """Remove a plugin that was registered manually."""
        for plugin in self.loader.named(name):
            if not plugin.version:
                self.loader.remove(plugin)
        self._forget()

    def found(self) -> list[Plugin]:
        """Return all plugins, sorted by name, without importing them."""
        return list(self.loader.plugins)

    def all(self) -> list[Plugin]:
        """Return all plugins after loading them; see ``state`` and ``problems`` of those that failed."""
        self.loader.load_all()
        self.provided()  # calls listing hooks, which records the remaining problems
        self.architectures()
        self.detect_targets()
        for backend in self.backends():
            self.lowerings(backend)
        return list(self.loader.plugins)

    def _load(self, listing: Listing[Any], name: str) -> Any:
        """Import the object that the descriptor of this name refers to."""
        entry = self.look_up(self.table(listing), name)
        return self.load_named(listing.label, name, entry.spec.loads, entry)

    # -------------------------------------------------------------------------------------------------- backends
    def backends(self) -> Mapping[str, Entry[BackendSpec]]:
        """Return the installed backends by name."""
        return self.table(BACKENDS).entries

    def backend(self, name: str) -> Entry[BackendSpec]:
        """Return the descriptor of one backend; imports only its plugin if that has the name of the backend."""
        if "mithril_backends" not in self._tables:
            for plugin in self.loader.named(name):
                # A plugin named like its backend is imported alone: listing all would import every
                # installed plugin.
                if plugin.name == name and self.loader.load(plugin):
                    for answer in self.call_hook("mithril_backends", BackendSpec, only=plugin):
                        if answer.spec.name == name:
                            return answer
        return self.look_up(self.table(BACKENDS), name, pip_hints.BACKENDS.get(name))

    def backend_class(self, name: str) -> type[Any]:
        """Import the framework of one backend and return the backend class."""
        entry = self.backend(name)
        loaded: type[Any] = self.load_named("backend", name, entry.spec.loads, entry)
        return loaded

    # ---------------------------------------------------------------------------------------------------- passes
    def pass_table(self) -> Table[PassSpec]:
        """Return the installed passes, their aliases, and the names that several plugins claim."""
        return self.once("pass table", self._placed_passes)

    def _placed_passes(self) -> Table[PassSpec]:
        table = self.table(PASSES)
        for name, entry in table.entries.items():
            self._placements[name] = placement(entry, table)
            for fault in self._placements[name].faults:
                self.loader.problem(entry.plugin, fault)
        return table

    def passes(self) -> Mapping[str, Entry[PassSpec]]:
        """Return the installed passes by name."""
        return self.pass_table().entries

    def pass_aliases(self) -> Mapping[str, str]:
        """Return the aliases of passes, mapped to names."""
        return self.pass_table().aliases

    def pass_spec(self, name: str) -> Entry[PassSpec]:
        """Return the descriptor of one pass, by name or alias."""
        return self.look_up(self.pass_table(), name)

    def pass_placement(self, name: str) -> Placement:
        """Return the passes that an installed pass must precede and follow, with aliases resolved."""
        return self._placements[self.pass_spec(name).spec.name]

    def load_pass(self, name: str) -> Any:
        """Import a pass: a function ``graph -> graph`` or a pass class."""
        entry = self.pass_spec(name)
        return self.load_named("pass", name, entry.spec.loads, entry)

    def clash_text(self, hook: str, name: str) -> str | None:
        """Return the reason that a backend or hardware target of that name is not used, or None without conflict."""
        listing: Listing[Any] = {one.hook: one for one in (BACKENDS, TARGETS)}[hook]
        return self.table(listing).clash_text(name)

    # ------------------------------------------------------------------------------------- targets and profilers
    def targets(self) -> Mapping[str, Entry[HardwareTarget]]:
        """Return the installed hardware targets by name."""
        return self.table(TARGETS).entries

    def target(self, name: str) -> Entry[HardwareTarget]:
        """Return one hardware target by name or alias."""
        table = self.table(TARGETS)
        return self.look_up(table, name, pip_hints.TARGETS.get(name))

    def detect_targets(self) -> list[Entry[Found]]:
        """Return the targets present on this machine, best first: by rank, then by name."""
        detected = self.call_hook("mithril_detect_targets", Found)
        return sorted(detected, key=lambda f: (-f.spec.rank, f.spec.name))

    def devices(self) -> Mapping[str, Entry[DeviceSpec]]:
        """Return the devices that backends compile for, by name."""
        return self.table(DEVICES).entries

    def load_device(self, name: str) -> Any:
        """Import the backend class of a device."""
        return self._load(DEVICES, name)

    def profilers(self) -> Mapping[str, Entry[ProfilerSpec]]:
        """Return the installed profilers by name."""
        return self.table(PROFILERS).entries

    def load_profiler(self, name: str) -> Any:
        """Import a profiler."""
        return self._load(PROFILERS, name)

    # ------------------------------------------------------------------------------------ options, ops, lowerings
    def options(self) -> list[Entry[Option]]:
        """Return the options of ``ml.compile`` that the core and plugins declare, by plugin."""
        return self.once("mithril_options", lambda: self.call_hook("mithril_options", Option))

    def op_plugin(self, name: str) -> Plugin | None:
        """Return the plugin that declares an operation, or None for operations of the core."""
        claims = self._ops().get(name, ())
        return claims[0].plugin if claims else None

    def op_names(self) -> tuple[str, ...]:
        """Return the names of operations that plugins declare."""
        return tuple(sorted(self._ops()))

    def import_op(self, name: str) -> bool:
        """Import the module that declares the operation ``name``; return False if no plugin declares it."""
        claims = self._ops().get(name)
        if claims is None:
            return False
        owner = claims[0] if len(claims) == 1 else name_owner(name, claims)
        for loser in claims:
            if loser is not owner:
                self.loader.problem(loser.plugin, clash_problem("operation", name, claims, owner))
        if owner is None:
            raise clash_problem("operation", name, claims).error()
        self.load_named("operation", name, f"{owner.spec.module}:__name__", owner)
        return True

    def _ops(self) -> dict[str, list[Entry[OpsSpec]]]:
        return self.once(
            "mithril_ops",
            lambda: _by_name((n, a) for a in self.call_hook("mithril_ops", OpsSpec) for n in a.spec.names),
        )

    def lowerings(self, backend: str) -> Mapping[str, tuple[LoweringOffer, ...]]:
        """Return the lowerings that plugins offer for ``backend``, by operation."""

        def ask() -> dict[str, tuple[LoweringOffer, ...]]:
            answers = self.call_hook("mithril_lowerings", Lowering, backend=backend)
            offers = _by_name((a.spec.op, a) for a in answers if self._is_of_an_operation(a, backend))
            return {op: self._lowerings_of(op, backend, group) for op, group in sorted(offers.items())}

        return self.once(f"mithril_lowerings {backend}", ask)

    def parts_of_programs(self, backend: str) -> dict[str, tuple[str, ...]]:
        """Return how plugins can change programs for ``backend``, by their origin: "backend", "deciders", ..."""

        def ask() -> dict[str, tuple[str, ...]]:
            self.loader.load_all()
            hooks = ("mithril_amend_pipeline", "mithril_run_pass", "mithril_build")
            entry = self.backends().get(backend)
            parts: dict[str, set[str]] = {
                "backend": {entry.origin} if entry is not None else set(),
                "deciders": {plugin.origin for hook in hooks for plugin, _ in self.loader.implementations(hook)},
                "lowerings": {offer.origin for offers in self.lowerings(backend).values() for offer in offers},
                "passes": {one.origin for one in self.passes().values() if one.spec.level is not None},
            }
            origins = sorted(set().union(*parts.values()))
            return {origin: tuple(part for part, owners in parts.items() if origin in owners) for origin in origins}

        return self.once(f"parts of programs for {backend}", ask)

    def _is_of_an_operation(self, answer: Entry[Lowering], backend: str) -> bool:
        try:
            registry.operation_name(answer.spec.op, self._ops())
        except OperationError as error:
            problem = PluginProblem(
                "broken",
                f"{answer.origin} lowers an {error.what}",
                tuple(error.facts),
                error.hint or None,
                hook="mithril_lowerings",
                backend=backend,
            )
            self.loader.problem(answer.plugin, problem)
            return False
        return True

    def _lowerings_of(self, op: str, backend: str, offers: list[Entry[Lowering]]) -> tuple[LoweringOffer, ...]:
        """Return the lowerings of one plugin, conditional ones first, or one lowering that raises the conflict."""
        rivals = {id(offer.plugin): offer for offer in offers}
        owner = name_owner(op, list(rivals.values())) or self._declares(op, list(rivals.values()))
        # Tables use the first that applies: the unconditional one would hide the others.
        owned = sorted((o for o in offers if owner and o.plugin is owner.plugin), key=lambda o: o.spec.when is None)
        clash = None
        if len(rivals) > 1 or len([o for o in owned if o.spec.when is None]) > 1:
            clash = replace(
                clash_problem(f"lowering on '{backend}' of", op, offers, owner),
                hook="mithril_lowerings",
                backend=backend,
            )
            for loser in offers:
                if loser not in owned or len(rivals) == 1:
                    self.loader.problem(loser.plugin, clash)
        if clash is not None and (owner is None or len(rivals) == 1):
            return (LoweringOffer(offers[0].spec, offers[0].origin, clash.error),)
        return tuple(LoweringOffer(o.spec, o.origin) for o in owned)

    def _declares(self, op: str, rivals: list[Entry[Lowering]]) -> Entry[Lowering] | None:
        """Return the claim of the plugin that declares the operation."""
        homes = [entry.plugin for entry in self._ops().get(op, ())]
        return next((r for r in rivals if homes == [r.plugin]), None)

    # ------------------------------------------------------------------------------------------ names and commands
    def exports(self) -> Mapping[str, Entry[Export]]:
        """Names that plugins export from ``mithril``, including backend classes."""
        return self._exports().entries

    def _exports(self) -> Table[Export]:
        def ask() -> Table[Export]:
            names = [answer for answer in self._all_exports() if not answer.spec.on]
            answers = [*map(_class_export, self.backends().values()), *names]
            return self.assign_owners("name", answers, frozenset(registry.host.public_names()))

        return self.once("mithril_exports", ask)

    def _all_exports(self) -> list[Entry[Export]]:
        return self.once("names and methods", lambda: self.call_hook("mithril_exports", Export))

    def export(self, name: str) -> Any:
        """Load and return ``ml.<name>``; the error names the pip command if a known distribution provides it."""
        home = pip_hints.EXPORTS.get(name)
        # The first name that a program reads must not import all plugins: the registry tells the
        # distribution that has it.
        if home and "mithril_exports" not in self._tables:
            for plugin in self.loader.named(home):
                if self.loader.load(plugin):
                    answers = [*map(_class_export, self.call_hook("mithril_backends", BackendSpec, only=plugin))]
                    for answer in [*answers, *self.call_hook("mithril_exports", Export, only=plugin)]:
                        if answer.spec.name == name and not answer.spec.on:
                            return self.load_named("name", f"ml.{name}", answer.spec.loads, answer)
        table = self._exports()
        if home is None and name not in table.entries and name not in table.clashes:
            raise AttributeError(f"module 'mithril' has no attribute '{name}', and no installed plugin provides it")
        entry = self.look_up(table, name, home)
        return self.load_named("name", f"ml.{name}", entry.spec.loads, entry)

    def extensions(self) -> dict[str, Entry[Export]]:
        """Return the methods that plugins add to compiled models, by name."""
        return {answer.spec.name: answer for answer in self._all_exports() if answer.spec.on == "CompiledModel"}

    def extension(self, kind: str, name: str) -> tuple[Callable[..., Any], Plugin]:
        """Return the function that a plugin adds to a class of the core as the method ``name``, and the plugin."""
        if not name.startswith("_"):
            for answer in self._all_exports():
                if answer.spec.on == kind and answer.spec.name == name:
                    return self.load_named("method", f"{kind}.{name}", answer.spec.loads, answer), answer.plugin
        home = pip_hints.METHODS.get(name)
        hint = f"; {home} provides it: pip install {home}" if home else ""
        raise AttributeError(f"'{kind}' object has no attribute '{name}'{hint}")

    def packages(self) -> Mapping[str, Plugin]:
        """Return the plugins of third parties by the top-level packages of their code."""

        def ask() -> dict[str, Plugin]:
            entries = [
                entry for table in (self.passes(), self.backends(), self.frontends()) for entry in table.values()
            ]
            loads = [(entry.spec.loads, entry.plugin) for entry in [*entries, *self._all_exports()]]
            loads += [(claim.spec.module, claim.plugin) for claims in self._ops().values() for claim in claims]
            loads += [(plugin.module, plugin) for plugin in self.found()]
            return {path.partition(":")[0].partition(".")[0]: owner for path, owner in loads if not owner.first_party}

        return self.once("packages", ask)

    def architectures(self) -> Mapping[str, Entry[Architecture]]:
        """Return the installed model families of GGUF files by name."""
        return self.table(ARCHITECTURES).entries

    def load_architecture(self, name: str, way: str) -> Any:
        """Import the function that ``loads`` or ``saves`` a model family of GGUF files."""
        table = self.table(ARCHITECTURES)
        entry = self.look_up(table, name, pip_hints.ARCHITECTURES.get(name))
        return self.load_named("architecture", name, getattr(entry.spec, way), entry)

    def formats(self) -> Mapping[str, Entry[FileFormat]]:
        """Return the installed file formats by name."""
        return self.table(FORMATS).entries

    def format_of(self, path: str, name: str | None = None) -> Entry[FileFormat]:
        """Return the file format with that name or, without a name, the format of the path's suffix."""
        table = self.table(FORMATS)
        if name is not None:
            return self.look_up(table, name, pip_hints.FORMATS.get(name))
        for entry in table.entries.values():
            if any(path.endswith(suffix) for suffix in entry.spec.suffixes):
                return entry
            if entry.spec.marker and Path(path, entry.spec.marker).is_file():
                return entry
        suffix = Path(path).suffix
        home = next((home for home in pip_hints.FORMATS if suffix == f".{home}"), None)
        if home is not None:
            return self.look_up(table, home, pip_hints.FORMATS[home])
        offered = [f"{n}: {_shown(e.spec)}" for n, e in table.entries.items()]
        raise PluginError(
            f"no file format has the suffix of '{path}'",
            facts=[f"formats: {'; '.join(offered) or 'none is installed'}"],
            hint="pass format=; weights alone are written by compiled.save(path) and read by compiled.load(path)",
        )

    def load_format(self, entry: Entry[FileFormat], way: str) -> Any:
        """Import the function of a format: ``saves``, ``loads`` or ``models``."""
        spec, loads = entry.spec, getattr(entry.spec, way)
        if loads is None:
            verb = {"saves": "be written", "loads": "be read back", "models": "be compiled"}[way]
            raise PluginError(f"files of the format '{spec.name}' cannot {verb}", facts=[f"offered by {entry.origin}"])
        return self.load_named("file format", spec.name, loads, entry)

    def frontends(self) -> Mapping[str, Entry[FrontendSpec]]:
        """Return the frontends of plugins by name."""
        return self.table(FRONTENDS).entries

    def load_frontend(self, name: str) -> Any:
        """Import the function that converts a model to a source."""
        return self._load(FRONTENDS, name)

    def commands(self) -> Mapping[str, Entry[Command]]:
        """Return the subcommands that plugins add to the command line."""
        return self.table(COMMANDS).entries

    def load_command(self, name: str) -> Any:
        """Import the ``click.Command`` of a plugin."""
        return self._load(COMMANDS, name)

    def private_imports(self, plugin: Plugin) -> PluginProblem | None:
        """Return the doubt about a plugin that imports private modules or names of mithril."""

        def search() -> PluginProblem | None:
            packages = {package for package, owner in self.packages().items() if owner is plugin}
            return private_imports(plugin, sorted({plugin.module.partition(".")[0], *packages}))

        return self.once(f"private imports of {plugin.name} of {plugin.origin}", search)

    def provided(self) -> list[tuple[str, str, Plugin]]:
        """Return kind, name and plugin of all entries of plugins, for listings."""
        tables: dict[str, Mapping[str, Entry[Any]]] = {
            "backend": self.backends(),
            "pass": self.passes(),
            "target": self.targets(),
            "frontend": self.frontends(),
            "device": self.devices(),
            "profiler": self.profilers(),
            "export": self.exports(),
            "format": self.formats(),
            "command": self.commands(),
        }
        rows = [(kind, name, entry.plugin) for kind, table in tables.items() for name, entry in table.items()]
        rows += [("option", answer.spec.name, answer.plugin) for answer in self.options() if not answer.plugin.is_core]
        rows += [("op", name, claims[0].plugin) for name, claims in self._ops().items()]
        return rows


def _shown(file: FileFormat) -> str:
    """Return the suffixes of a format, or the description of its folders."""
    return ", ".join(file.suffixes) or (f"a folder with {file.marker}" if file.marker else "a folder")


def _by_name(pairs: Iterable[tuple[str, Entry[S]]]) -> dict[str, list[Entry[S]]]:
    groups: dict[str, list[Entry[S]]] = {}
    for name, entry in pairs:
        groups.setdefault(name, []).append(entry)
    return groups


def _class_export(backend: Entry[BackendSpec]) -> Entry[Export]:
    return Entry(Export(backend.spec.class_name, backend.spec.loads), backend.plugin)


default = Plugins()
