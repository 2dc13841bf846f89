"""The plugins of one process and everything they offer: one typed method per kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any

from mithril.base import OperationError, PluginError, registry
from mithril.plugins import pip_hints
from mithril.plugins.hook_calls import HookCalls, LastAnswers
from mithril.plugins.loader import Loader, Plugin, Problem
from mithril.plugins.pass_places import Placement, placement
from mithril.plugins.plugin_lowering import PluginLowering
from mithril.plugins.specs import (
    BackendSpec,
    Command,
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
from mithril.plugins.tables import Answers, Registered, Table, clash_problem, name_owner


class Plugins(Answers, HookCalls):
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
        self._last = LastAnswers()
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

    # -------------------------------------------------------------------------------------------------- backends
    def backends(self) -> Mapping[str, Registered[BackendSpec]]:
        """Installed backends by name."""
        return self.table("mithril_backends", BackendSpec, "backend").entries

    def backend(self, name: str) -> Registered[BackendSpec]:
        """The descriptor of one backend; imports only that plugin's module where plugin and backend share a name."""
        if "mithril_backends" not in self._tables:
            for plugin in self.loader.named(name):
                if plugin.name == name and self.loader.load(plugin):
                    for answer in self.ask("mithril_backends", BackendSpec, only=plugin):
                        if answer.spec.name == name:
                            return answer
        return self.pick(self.table("mithril_backends", BackendSpec, "backend"), name, pip_hints.BACKENDS.get(name))

    def backend_class(self, name: str) -> type[Any]:
        """The class of one backend, importing its framework."""
        found = self.backend(name)
        loaded: type[Any] = self.load_named("backend", name, found.spec.loads, found)
        return loaded

    # ---------------------------------------------------------------------------------------------------- passes
    def pass_table(self) -> Table[PassSpec]:
        """Installed passes, their aliases, and the names that several plugins claim."""
        with self.loader.lock:
            is_new = "mithril_passes" not in self._tables
            table = self.table("mithril_passes", PassSpec, "pass")
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
        return self.pick(self.pass_table(), name)

    def pass_placement(self, name: str) -> Placement:
        """The passes that an installed pass must precede and follow, with aliases resolved."""
        return placement(self.pass_spec(name), self.pass_table())

    def load_pass(self, name: str) -> Any:
        """The pass itself: a function ``graph -> graph`` or a pass class."""
        found = self.pass_spec(name)
        return self.load_named("pass", name, found.spec.loads, found)

    def clash_text(self, hook: str, name: str) -> str | None:
        """Return why a plugin's backend or hardware target of that name is not in use; None without rivals."""
        tables: dict[str, Callable[[], Table[Any]]] = {
            "mithril_backends": lambda: self.table("mithril_backends", BackendSpec, "backend"),
            "mithril_targets": lambda: self.table("mithril_targets", HardwareTarget, "hardware target"),
        }
        return tables[hook]().clash_text(name)

    # ------------------------------------------------------------------------------------- targets and profilers
    def targets(self) -> Mapping[str, Registered[HardwareTarget]]:
        """Installed hardware targets by name."""
        return self.table("mithril_targets", HardwareTarget, "hardware target").entries

    def target(self, name: str) -> Registered[HardwareTarget]:
        """One hardware target by name or alias."""
        table = self.table("mithril_targets", HardwareTarget, "hardware target")
        return self.pick(table, name, pip_hints.TARGETS.get(name))

    def detect_targets(self) -> list[Registered[Found]]:
        """Targets that this machine has, best first: by rank, then by name."""
        found = self.ask("mithril_detect_targets", Found)
        return sorted(found, key=lambda f: (-f.spec.rank, f.spec.name))

    def profilers(self) -> Mapping[str, Registered[ProfilerSpec]]:
        """Installed profilers by name."""
        return self.table("mithril_profilers", ProfilerSpec, "profiler").entries

    def load_profiler(self, name: str) -> Any:
        """The profiler itself."""
        found = self.pick(self.table("mithril_profilers", ProfilerSpec, "profiler"), name)
        return self.load_named("profiler", name, found.spec.loads, found)

    # ------------------------------------------------------------------------------------ options, ops, lowerings
    def options(self) -> list[Registered[Option]]:
        """Options of ``ml.compile`` that plugins declare, by plugin; those of the core among them."""
        with self.loader.lock:
            if "mithril_options" not in self._tables:
                self._tables["mithril_options"] = self.ask("mithril_options", Option)
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
                self.loader.problem(loser.plugin, clash_problem("operation", name, found, owner))
        if owner is None:
            raise clash_problem("operation", name, found).error()
        self.load_named("operation", name, f"{owner.spec.module}:__name__", owner)
        return True

    def _ops(self) -> dict[str, list[Registered[OpsSpec]]]:
        with self.loader.lock:
            if "mithril_ops" not in self._tables:
                table: dict[str, list[Registered[OpsSpec]]] = {}
                for answer in self.ask("mithril_ops", OpsSpec):
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
                for answer in self.ask("mithril_lowerings", Lowering, backend=backend):
                    if self._is_of_an_operation(answer):
                        offers.setdefault(answer.spec.op, []).append(answer)
                self._tables[key] = {op: self._lowerings_of(op, backend, some) for op, some in sorted(offers.items())}
            table: Mapping[str, tuple[PluginLowering, ...]] = self._tables[key]
        return table

    def _is_of_an_operation(self, answer: Registered[Lowering]) -> bool:
        try:
            registry.named(answer.spec.op, self._ops())
        except OperationError as error:
            what = f"{answer.origin} lowers an {error.what}"
            self.loader.problem(answer.plugin, Problem("broken", what, tuple(error.facts), error.hint or None))
            return False
        return True

    def _lowerings_of(self, op: str, backend: str, offers: list[Registered[Lowering]]) -> tuple[PluginLowering, ...]:
        """Return the lowerings of one plugin, those with a condition first, or one that raises the clash."""
        rivals = {id(offer.plugin): offer for offer in offers}
        owner = name_owner(op, list(rivals.values())) or self._declares(op, list(rivals.values()))
        own = sorted((o for o in offers if owner and o.plugin is owner.plugin), key=lambda o: o.spec.when is None)
        clash = None
        if len(rivals) > 1 or len([o for o in own if o.spec.when is None]) > 1:
            clash = clash_problem(f"lowering on '{backend}' of", op, offers, owner)
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
                names = [answer for answer in self.ask("mithril_exports", Export) if not answer.spec.on]
                answers = [*map(_class_export, self.backends().values()), *names]
                self._tables["mithril_exports"] = self.settle("name", answers, frozenset(registry.face_names()))
            table: Table[Export] = self._tables["mithril_exports"]
        return table

    def export(self, name: str) -> Any:
        """What ``ml.<name>`` is, loaded; the exact pip line where a known distribution would bring it."""
        home = pip_hints.EXPORTS.get(name)
        if home and "mithril_exports" not in self._tables:
            for plugin in self.loader.named(home):
                if self.loader.load(plugin):
                    answers = [*map(_class_export, self.ask("mithril_backends", BackendSpec, only=plugin))]
                    for answer in [*answers, *self.ask("mithril_exports", Export, only=plugin)]:
                        if answer.spec.name == name and not answer.spec.on:
                            return self.load_named("name", f"ml.{name}", answer.spec.loads, answer)
        table = self._exports()
        if home is None and name not in table.entries and name not in table.clashes:
            raise AttributeError(f"module 'mithril' has no attribute '{name}', and no installed plugin brings it")
        found = self.pick(table, name, home)
        return self.load_named("name", f"ml.{name}", found.spec.loads, found)

    def extensions(self) -> dict[str, Registered[Export]]:
        """Methods that plugins add to compiled models, by name."""
        answers = self.ask("mithril_exports", Export)
        return {answer.spec.name: answer for answer in answers if answer.spec.on == "CompiledModel"}

    def extension(self, kind: str, name: str) -> Callable[..., Any]:
        """Return the function that a plugin adds to a class of the core as the method ``name``."""
        if not name.startswith("_"):
            for answer in self.ask("mithril_exports", Export):
                if answer.spec.on == kind and answer.spec.name == name:
                    function: Callable[..., Any] = self.load_named(
                        "method", f"{kind}.{name}", answer.spec.loads, answer
                    )
                    return function
        home = pip_hints.METHODS.get(name)
        hint = f"; it comes with {home}: pip install {home}" if home else ""
        raise AttributeError(f"'{kind}' object has no attribute '{name}'{hint}")

    def formats(self) -> Mapping[str, Registered[FileFormat]]:
        """File formats by name."""
        return self.table("mithril_formats", FileFormat, "file format").entries

    def format_of(self, path: str, name: str | None = None) -> Registered[FileFormat]:
        """The format of that name, else the one that the path's suffix belongs to."""
        table = self.table("mithril_formats", FileFormat, "file format")
        if name is not None:
            return self.pick(table, name, pip_hints.FORMATS.get(name))
        for entry in table.entries.values():
            if any(path.endswith(suffix) for suffix in entry.spec.suffixes):
                return entry
        suffix = PurePath(path).suffix
        home = next((home for home in pip_hints.FORMATS if suffix == f".{home}"), None)
        if home is not None:
            return self.pick(table, home, pip_hints.FORMATS[home])
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
        return self.load_named("file format", spec.name, named, found)

    def frontends(self) -> Mapping[str, Registered[FrontendSpec]]:
        """Kinds of models that plugins add, by name."""
        return self.table("mithril_frontends", FrontendSpec, "frontend").entries

    def load_frontend(self, name: str) -> Any:
        """The function that makes the source of a model."""
        found = self.pick(self.table("mithril_frontends", FrontendSpec, "frontend"), name)
        return self.load_named("frontend", name, found.spec.loads, found)

    def commands(self) -> Mapping[str, Registered[Command]]:
        """Sub-commands that plugins add to the command line."""
        return self.table("mithril_commands", Command, "command").entries

    def load_command(self, name: str) -> Any:
        """The ``click.Command`` of a plugin."""
        found = self.pick(self.table("mithril_commands", Command, "command"), name)
        return self.load_named("command", name, found.spec.loads, found)

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
        rows += [("option", answer.spec.name, answer.plugin) for answer in self.options() if not answer.plugin.is_core]
        rows += [("op", name, found[0].plugin) for name, found in self._ops().items()]
        return rows


def _class_export(backend: Registered[BackendSpec]) -> Registered[Export]:
    return Registered(Export(backend.spec.class_name, backend.spec.loads), backend.plugin)


default = Plugins()
