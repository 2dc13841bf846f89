"""Plugin discovery and lazy import; a broken plugin does not affect the others.

Replaces pluggy's loader, which aborts at the first broken plugin, silently drops the second of two equal names,
loads in file-system order and accepts misspelled hooks.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from mithril.graph import CompileTimeoutError, PluginError, __version__, closest, registry
from mithril.plugins import hooks, pip_hints

if TYPE_CHECKING:
    from importlib.metadata import Distribution

    from mithril.graph import Graph

GROUP = "mithril"
# ``api_version`` in the module of an entry point, a number or a range (lowest, highest) that the plugin supports; it
# grows with each incompatible change of hooks.
API_VERSION = 1
OLDEST_API = 1  # the oldest version whose plugins still run
CORE = "core"  # name of the built-in plugin
# The names of all hooks.
HOOKS = tuple(name for name in vars(hooks) if name.startswith("mithril_"))
SLOW = 5.0  # seconds of import time after which a plugin is reported
# The hooks that a plugin may wrap with @hookimpl(wrapper=True).
WRAPPABLE = ("mithril_run_pass", "mithril_build")
MARK = f"{GROUP}_impl"  # the attribute by which pluggy marks a hook function
UNMARKED = getattr(hooks.hookimpl(lambda: None), MARK)  # the options of a function without ``@hookimpl``


@lru_cache(maxsize=1024)
def normalized(distribution: str) -> str:
    """Return the name of a distribution in the normalized form of package indexes."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True, slots=True)
class PluginProblem:
    """The reason that a plugin, or one of its entries, cannot be used."""

    state: str  # "disabled", "broken", "incompatible" or "clash"; "doubtful" does not prevent the use
    what: str
    facts: tuple[str, ...] = ()
    hint: str | None = None
    cause: BaseException | None = field(default=None, compare=False)
    hook: str = ""  # the hook whose entries are lost; all of the plugin is without one
    backend: str = ""  # the backend that the hook was called for

    @property
    def line(self) -> str:
        """The problem in one line, for decisions."""
        return f"{': '.join((self.what, *self.facts[:1]))} ({self.hint})"

    def error(self) -> PluginError:
        """Return a new error with this message, chained to the cause."""
        error = PluginError(self.what, facts=self.facts, hint=self.hint)
        error.__cause__ = self.cause
        return error


@dataclass(slots=True)
class Plugin:
    """An entry point of the group ``mithril``, or an object registered manually."""

    name: str
    distribution: str
    version: str
    module: str  # dotted path in the entry point
    requires: tuple[str, ...] = ()
    is_core: bool = False  # whether this is the built-in plugin of the core
    loaded: Any = None
    hooks: dict[str, pluggy.HookImpl] = field(default_factory=dict, compare=False)
    problems: list[PluginProblem] = field(default_factory=list)
    doubts: list[PluginProblem] = field(default_factory=list)  # it is in use nonetheless
    # whether an installed distribution of this project provides the plugin: it owns the names it claims
    first_party: bool = field(init=False)
    origin: str = field(init=False)  # distribution and version, for error messages and records

    def __post_init__(self) -> None:
        is_of_project = bool(self.version) and normalized(self.distribution) in pip_hints.DISTRIBUTIONS
        self.first_party = self.is_core or is_of_project
        self.origin = f"{self.distribution} {self.version}".rstrip()

    @property
    def state(self) -> str:
        """``found`` (not imported yet), ``loaded``, or the state of the first problem."""
        return self.problems[0].state if self.problems else "found" if self.loaded is None else "loaded"

    @property
    def usable(self) -> bool:
        """Whether the plugin is loaded or can still be loaded."""
        return self.loaded is not None or not self.problems

    def losses(self, hooks: Collection[str], backend: str) -> list[PluginProblem]:
        """Return the problems by which this plugin, or its entries of these hooks for a backend, are not in use."""
        if self.loaded is None:
            return self.problems[:1]
        return [p for p in self.problems if p.hook in hooks and p.backend in ("", backend)]

    @contextmanager
    def observing(self, hook: str, *graphs: Graph | None) -> Iterator[None]:
        """Raise PluginError if an observer of a third party changes the graphs that it looks at, or a node of them."""
        seen = [] if self.first_party else [graph for graph in graphs if graph is not None]
        parts = [(graph.inputs, graph.nodes, graph.results) for graph in seen]
        nodes = [node for graph in seen for node in graph.nodes]
        before = [(dict(node.attributes), node.operands, node.results, node.regions) for node in nodes]
        yield
        for graph, first in zip(seen, parts, strict=True):
            if any(one is not two for one, two in zip((graph.inputs, graph.nodes, graph.results), first, strict=True)):
                raise PluginError(
                    f"'{hook}' of plugin '{self.name}' ({self.origin}) changed the graph that it observes",
                    hint="its authors should write a pass instead, which returns a new graph; " + self.disable_hint(),
                )
        for node, fields in zip(nodes, before, strict=True):
            if fields != (node.attributes, node.operands, node.results, node.regions):
                raise PluginError(
                    f"'{hook}' of plugin '{self.name}' ({self.origin}) changed a node of the graph that it observes",
                    facts=[f"node: {node}"],
                    hint="its authors should write a pass instead, which returns a new graph; " + self.disable_hint(),
                )

    def disable_hint(self) -> str:
        """Return the hint for disabling the plugin."""
        return f"set MITHRIL_DISABLE_PLUGINS={self.name} to leave it out"


class Manager(pluggy.PluginManager):
    """pluggy's manager, which also accepts ``mithril_*`` functions without ``@hookimpl``."""

    def __init__(self) -> None:
        super().__init__(GROUP)
        self.add_hookspecs(hooks)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if not name.startswith("mithril_"):
            # Pluggy would examine every name of a module, which takes as long as its import.
            return None
        # The attributes of a module run no code, so that pluggy's careful access is not needed.
        is_module = isinstance(plugin, ModuleType)
        options = (
            getattr(vars(plugin).get(name), MARK, None) if is_module else super().parse_hookimpl_opts(plugin, name)
        )
        if options is None:
            function = getattr(plugin, name)
            home = getattr(plugin, "__name__", type(plugin).__module__)
            # A hook that a plugin imports from another module, to call it, is none of the plugin's own
            # hooks.
            if inspect.isroutine(function) and getattr(function, "__module__", None) == home:
                return dict(UNMARKED)
        return options

    def hooks_of(self, plugin: Any) -> dict[str, pluggy.HookImpl]:
        """Return the hook functions of ``plugin`` by name, with their options."""
        pairs = ((name, self.parse_hookimpl_opts(plugin, name)) for name in dir(plugin) if name.startswith("mithril_"))
        return {
            name: pluggy.HookImpl(plugin, "", getattr(plugin, name), options)
            for name, options in pairs
            if options is not None
        }

    def accepted(self, hook: str) -> tuple[str, ...]:
        """Return the parameters of a hook."""
        names: tuple[str, ...] = getattr(self.hook, hook).spec.argnames
        return names


def find() -> list[Plugin]:
    """Return all installed plugins, sorted by name and distribution, without importing them."""
    from importlib.metadata import distributions

    plugins: dict[tuple[str, str], Plugin] = {}
    first: dict[str, Distribution] = {}  # of a name on sys.path, which Python imports from
    versions: dict[str, dict[Any, str]] = {}  # by the folders of metadata next to the first one
    for distribution in distributions():
        text = _text(distribution, "entry_points.txt")
        if not text or f"[{GROUP}]" not in text:
            continue
        headers = _headers(distribution)
        name = headers["Name"][0]
        owner = first.setdefault(normalized(name), distribution)
        # Two copies of a distribution on sys.path: Python imports the first, so that the metadata of
        # the second do not apply.
        if owner is not distribution and owner.locate_file("") != distribution.locate_file(""):
            continue
        # A folder that is twice on sys.path describes the plugin once.
        place = getattr(distribution, "_path", distribution)
        versions.setdefault(normalized(name), {})[place] = headers["Version"][0]
        for plugin in _entries(headers, text):
            plugins.setdefault((plugin.name, normalized(name)), plugin)
    for (_, name), plugin in plugins.items():
        if len(versions[name]) > 1:
            plugin.doubts.append(_described_twice(plugin, sorted(versions[name].values()), first[name]))
    return [plugins[key] for key in sorted(plugins)]


def _text(distribution: Distribution, name: str) -> str | None:
    """Return the text of a metadata file, or None; an absent folder or one that is not readable has none."""
    folder = getattr(distribution, "_path", None)
    try:
        return _read(f"{folder}/{name}") if isinstance(folder, Path) else distribution.read_text(name)
    except OSError:
        return None


def _read(path: str) -> str:
    # Metadata are read for each installed distribution, and most of that time is in system calls: these are half of
    # those of ``open``, and a sixth of the time of ``read_text``.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(descriptor, 65536), b"")).decode(errors="replace")
    finally:
        os.close(descriptor)


def _headers(distribution: Distribution) -> dict[str, list[str]]:
    """Return name, version and requirements; skipping the long description is 10x faster than the email parser."""
    text = _text(distribution, "METADATA") or _text(distribution, "PKG-INFO") or ""
    headers: dict[str, list[str]] = {}
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        headers.setdefault(key, []).append(value.strip())
    return {"Name": ["unnamed"], "Version": ["?"], "Requires-Dist": []} | headers


def _entries(headers: dict[str, list[str]], text: str) -> Iterator[Plugin]:
    name, version, requires = headers["Name"][0], headers["Version"][0], tuple(headers["Requires-Dist"])
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
        elif section == GROUP and line and line[0] not in "#;":
            entry, equals, module = (part.strip() for part in line.partition("="))
            plugin = Plugin(entry, name, version, module, requires)
            if not equals or not re.fullmatch(r"[\w.]+", module):
                plugin.problems.append(
                    PluginProblem(
                        "broken",
                        f"plugin '{entry}' of {plugin.origin} has a malformed entry point",
                        (f"entry point: {line}", "expected: name = package.module"),
                        f"report it to the authors of {name}; {plugin.disable_hint()}",
                    )
                )
            if doubt := _invalid_version(plugin):
                plugin.doubts.append(doubt)
            yield plugin


def _invalid_version(plugin: Plugin) -> PluginProblem | None:
    if re.fullmatch(r"\d+(\.\d+)*", plugin.version):
        return None  # avoids the import of packaging (25 ms)
    from packaging.version import InvalidVersion, Version

    try:
        Version(plugin.version)
    except InvalidVersion:
        return PluginProblem(
            "doubtful",
            f"the version '{plugin.version}' of {plugin.distribution} is not valid",
            ("expected: a version of PEP 440, such as 1.0",),
            f"report it to the authors of {plugin.distribution}; {plugin.disable_hint()}",
        )
    return None


def _described_twice(plugin: Plugin, versions: Sequence[str], distribution: Distribution) -> PluginProblem:
    """Return the doubt about two folders of metadata next to each other, as after an upgrade that failed."""
    return PluginProblem(
        "doubtful",
        f"{len(versions)} folders of metadata describe {plugin.distribution}",
        (f"versions {', '.join(versions)} in {distribution.locate_file('')}",),
        f"pip uninstall {plugin.distribution}, until pip finds none, and install it again",
    )


def incompatibility(plugin: Plugin, core: str) -> PluginProblem | None:
    """Return the problem if the plugin's ``Requires-Dist: mithril-core`` excludes this core; does not import it."""
    for line in plugin.requires:
        if not re.match(r"mithril[-_.]+core(?![\w.-])", line, re.IGNORECASE):
            continue
        if _plainly_fits(line, core):
            continue
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.version import Version

        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            return PluginProblem(
                "broken",
                f"plugin '{plugin.name}' of {plugin.origin} has an invalid requirement",
                (f"required: {line}",),
                f"report it to the authors of {plugin.distribution}; {plugin.disable_hint()}",
            )
        # True: by default a specifier excludes prereleases, but this core is installed already.
        if (requirement.marker and not requirement.marker.evaluate({"extra": ""})) or requirement.specifier.contains(
            core, True
        ):
            continue
        floors = [
            Version(s.version.removesuffix(".*"))
            for s in requirement.specifier
            if s.operator in (">=", ">", "~=", "==")
        ]
        older = any(Version(core) < floor for floor in floors)
        return PluginProblem(
            "incompatible",
            f"plugin '{plugin.name}' of {plugin.origin} is incompatible with mithril-core {core}",
            (f"required: {line}",),
            f"pip install --upgrade {'mithril-core' if older else plugin.distribution}; or {plugin.disable_hint()}",
        )
    return None


@lru_cache(maxsize=64)  # most plugins require the same
def _plainly_fits(line: str, core: str) -> bool:
    """Whether a simple requirement (``mithril-core>=0.1,<0.2``) holds; avoids the import of packaging (25 ms)."""
    clauses = re.sub(r"^[A-Za-z0-9._-]+", "", line).strip(" ()").split(",")
    matches = [re.fullmatch(r"\s*(>=|<)\s*(\d+(?:\.\d+)*)\s*", clause) for clause in clauses]
    if not all(matches) or not re.fullmatch(r"\d+(\.\d+)*", core):
        return False
    parts = [(match[1], _numbers(match[2])) for match in matches if match]
    return all(_numbers(core) >= floor if sign == ">=" else _numbers(core) < floor for sign, floor in parts)


def _numbers(version: str) -> list[int]:
    """Parse a version without its trailing zeros: ``0.10.0`` is ``[0, 10]``."""
    return [int(part) for part in re.sub(r"(\.0+)+$", "", version).split(".")]


def missing_requirement(requires: Iterable[str]) -> str | None:
    """Return the first requirement that is not installed, as an argument of pip."""
    return next((line for line, installed in _unmet(requires) if installed is None), None)


def violated_requirements(requires: Iterable[str]) -> list[str]:
    """Return the requirements that are not installed, or in an excluded version, each with the installed version."""
    return [
        f"{line}, but {'it is not installed' if version is None else f'{version} is installed'}"
        for line, version in _unmet(requires)
    ]


def _unmet(requires: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the requirements that are not met, as arguments of pip, with the installed version or None."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import InvalidRequirement, Requirement

    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = None
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement.name}{extras}{requirement.specifier}", installed


@contextmanager
def named_if_slow(doing: str) -> Iterator[Callable[[Plugin], None]]:
    """Yield a function that begins the turn of a plugin: if it takes some seconds, or hangs, stderr names it."""
    turns: list[tuple[Plugin, float]] = []
    is_over = threading.Event()

    def watch() -> None:
        left, reported = SLOW, 0
        while not is_over.wait(left):
            left = SLOW
            if len(turns) == reported:
                continue
            turn, (plugin, start) = len(turns), turns[-1]
            left += start - time.monotonic()
            if left <= 0:
                left, reported = SLOW, turn
                text = f"mithril: '{doing}' of plugin '{plugin.name}' of {plugin.origin} takes longer than"
                print(f"{text} {SLOW:g} seconds; {plugin.disable_hint()}", file=sys.stderr, flush=True)

    # A hanging import must not keep the process alive after the user ends it.
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield lambda plugin: turns.append((plugin, time.monotonic()))
    except (KeyboardInterrupt, CompileTimeoutError) as error:
        if turns:
            plugin = turns[-1][0]
            place = f"in '{doing}' of plugin '{plugin.name}' of {plugin.origin}"
            if isinstance(error, KeyboardInterrupt):
                error.add_note(f"{place}; {plugin.disable_hint()}")
            elif not error.facts:
                error.with_facts(place).with_hint(f"{error.hint}; or {plugin.disable_hint()}")
        raise
    finally:
        is_over.set()


def _names(setting: str) -> frozenset[str]:
    names = (part.strip() for part in setting.split(","))
    return frozenset(name if name == "*" else normalized(name) for name in names if name)


class Loader:
    """The plugins of one process, discovered once, imported on first use, with separate errors for each."""

    def __init__(self, disable: Iterable[str] = (), *, strict: bool | None = None, autoload: bool = True) -> None:
        self._disabled = _names(",".join(disable) + "," + os.environ.get("MITHRIL_DISABLE_PLUGINS", ""))
        if not autoload:
            self._disabled |= {"*"}
        self.strict = os.environ.get("MITHRIL_STRICT_PLUGINS", "") not in ("", "0") if strict is None else strict
        self.manager = Manager()
        # Reentrant: the import of a plugin may list plugins itself.
        self.lock = threading.RLock()
        self.core = Plugin(CORE, "mithril-core", __version__, registry.host.core_plugin, is_core=True)
        self._plugins: list[Plugin] | None = None
        self._complete = False
        self._importing: list[Plugin] = []
        self._begin: Callable[[Plugin], None] | None = None  # the turn of a plugin, while imports are watched

    @property
    def plugins(self) -> list[Plugin]:
        """All plugins, imported or not, sorted by name."""
        with self.lock:
            if self._plugins is None:
                self._plugins = find()
                for plugin in self._plugins:
                    if {"*", normalized(plugin.name), normalized(plugin.distribution)} & self._disabled:
                        plugin.problems.append(_disabled(plugin))
                self._find_clashes()
            return self._plugins

    def _find_clashes(self) -> None:
        enabled: dict[str, list[Plugin]] = {CORE: [self.core]}
        for plugin in self._plugins or ():
            if not plugin.problems:
                enabled.setdefault(plugin.name, []).append(plugin)
        for name, rivals in enabled.items():
            if len(rivals) > 1:
                first_party = [plugin for plugin in rivals if plugin.first_party]
                for plugin in rivals:
                    if [plugin] == first_party:
                        # The first-party plugin owns the name, so third parties cannot disable it.
                        continue
                    other = next(rival for rival in rivals if rival is not plugin)
                    plugin.problems.append(
                        PluginProblem(
                            "clash",
                            f"two distributions provide a plugin named '{name}'",
                            tuple(rival.origin for rival in rivals),
                            f"pip uninstall one of them, or set MITHRIL_DISABLE_PLUGINS={other.distribution}",
                        )
                    )

    def unknown_disabled(self) -> list[str]:
        """Return the disabled names that match no plugin."""
        names = {normalized(name) for p in self.plugins for name in (p.name, p.distribution)}
        return sorted(self._disabled - names - {"*"})

    def named(self, name: str) -> list[Plugin]:
        """Return the plugins whose entry point or distribution has this name."""
        key = normalized(name)
        return [p for p in self.plugins if key in (normalized(p.name), normalized(p.distribution))]

    def problem(self, plugin: Plugin, problem: PluginProblem) -> None:
        """Record a problem of a plugin; raise it instead if ``strict``."""
        if problem not in plugin.problems:
            plugin.problems.append(problem)
        if self.strict:
            raise problem.error()

    def load(self, plugin: Plugin) -> bool:
        """Import one plugin; return False if it cannot be used (see its ``problems``)."""
        with self.lock:
            if plugin.loaded is not None:
                return True
            if plugin.problems:
                if self.strict and plugin.state != "disabled":
                    raise plugin.problems[0].error()
                return False
            # The import of the plugin asks for something of mithril.
            if any(one is plugin for one in self._importing):
                return False
            if problem := incompatibility(plugin, __version__):
                self.problem(plugin, problem)
                return False
            self._importing.append(plugin)
            try:
                with self._watched() as begin:
                    begin(plugin)
                    module = importlib.import_module(plugin.module)
                    if len(self._importing) > 1:
                        begin(self._importing[-2])
            except CompileTimeoutError:
                raise  # the time limit of the compilation; the next one imports the plugin again
            # An import may call sys.exit; a broken plugin must not end the user's program.
            except (Exception, SystemExit) as cause:
                self.problem(plugin, _import_problem(plugin, cause))
                return False
            finally:
                self._importing.pop()
            return self._register(plugin, module)

    @contextmanager
    def _watched(self) -> Iterator[Callable[[Plugin], None]]:
        """Watch imports, all by one thread: starting one takes as long as a small plugin."""
        if self._begin is not None:
            yield self._begin
            return
        # Programs read the output of the command line; a print of a plugin's import would be in the middle of it.
        with redirect_stdout(sys.stderr), named_if_slow("import") as self._begin:
            try:
                yield self._begin
            finally:
                self._begin = None

    def _register(self, plugin: Plugin, module: Any) -> bool:
        implemented = self.manager.hooks_of(module)
        problem = self._hook_error(plugin, module, implemented) or self._signature_error(plugin, implemented)
        # pluggy calls the deciding hooks only, and its registration takes as long as a small import.
        if problem is None and not implemented.keys().isdisjoint(WRAPPABLE):
            try:
                self.manager.register(module, plugin.name)
            except (pluggy.PluginValidationError, ValueError) as cause:
                # pluggy registers the hooks one by one, so that the valid ones before the invalid one are
                # registered when it raises.
                if self.manager.has_plugin(plugin.name):
                    self.manager.unregister(name=plugin.name)
                problem = _signature_problem(plugin, [str(cause)], cause)
        if problem is None:
            plugin.loaded, plugin.hooks = module, implemented
            return True
        self.problem(plugin, problem)
        return False

    def _signature_error(self, plugin: Plugin, implemented: dict[str, pluggy.HookImpl]) -> PluginProblem | None:
        wrong = []
        for name, one in implemented.items():
            accepted = self.manager.accepted(name)
            if not set(one.argnames) <= set(accepted):
                parameters = ", ".join(one.argnames + one.kwargnames)
                wrong.append(f"{name}({parameters}); accepted: {', '.join(accepted) or 'no parameters'}")
        return _signature_problem(plugin, wrong) if wrong else None

    def _hook_error(self, plugin: Plugin, module: Any, implemented: dict[str, pluggy.HookImpl]) -> PluginProblem | None:
        version = getattr(module, "api_version", API_VERSION)
        supported: Any = version if isinstance(version, tuple) and len(version) == 2 else (version, version)
        lowest, highest = supported
        is_valid = isinstance(lowest, int) and isinstance(highest, int) and lowest <= highest
        if not is_valid or lowest > API_VERSION or highest < OLDEST_API:
            is_newer = is_valid and lowest > API_VERSION
            upgrade = f"pip install --upgrade {'mithril-core' if is_newer else plugin.distribution}"
            return PluginProblem(
                "incompatible",
                f"plugin '{plugin.name}' of {plugin.origin} requires the plugin API {version!r}",
                (f"mithril-core {__version__} supports {OLDEST_API} to {API_VERSION}",),
                f"{upgrade}; or {plugin.disable_hint()}",
            )
        if not implemented:
            return PluginProblem(
                "broken",
                f"plugin '{plugin.name}' of {plugin.origin} implements no hook of mithril",
                (f"module: {plugin.module}",),
                f"report it to the authors of {plugin.distribution}: a hook is a function such as mithril_passes; "
                f"{plugin.disable_hint()}",
            )
        for name, one in implemented.items():
            if name not in HOOKS:
                similar = closest(name, HOOKS)
                return PluginProblem(
                    "broken",
                    f"plugin '{plugin.name}' of {plugin.origin} defines '{name}', which is not a hook of mithril",
                    ("hooks: " + ", ".join([*similar, *(hook for hook in HOOKS if hook not in similar)]),),
                    (f"did the author mean '{similar[0]}'? " if similar else "")
                    + f"report it to the authors of {plugin.distribution}; {plugin.disable_hint()}",
                )
            if (one.wrapper or one.hookwrapper) and name not in WRAPPABLE:
                return PluginProblem(
                    "broken",
                    f"plugin '{plugin.name}' of {plugin.origin} wraps '{name}', which cannot be wrapped",
                    ("hooks that can be wrapped: " + ", ".join(WRAPPABLE),),
                    f"report it to the authors of {plugin.distribution}; {plugin.disable_hint()}",
                )
        return None

    def load_all(self) -> list[Plugin]:
        """Import all usable plugins and return the loaded ones, sorted by name."""
        with self.lock:
            if not self._complete:
                with self._watched():
                    for plugin in self._everything():
                        self.load(plugin)
                self._sort_deciders()
                self._complete = not self._importing
            return [plugin for plugin in self.plugins if plugin.loaded is not None]

    def _everything(self) -> list[Plugin]:
        """Return the installed plugins and the built-in plugin, if there is one."""
        return [*([self.core] if self.core.module else []), *self.plugins]

    def _sort_deciders(self) -> None:
        """Register plugins with deciding hooks again by name, so that pluggy's order does not depend on first use."""
        for plugin in reversed(self._everything()):  # pluggy calls the last registered first
            if plugin.loaded is not None and not plugin.hooks.keys().isdisjoint(WRAPPABLE):
                self.manager.unregister(name=plugin.name)
                self.manager.register(plugin.loaded, plugin.name)

    def add(self, module: Any, name: str) -> Plugin:
        """Register an object manually, as a plugin of a distribution with that name."""
        with self.lock:
            if any(plugin.name == name and plugin.usable for plugin in self.plugins):
                raise PluginError(f"a plugin named '{name}' already exists", hint="choose another name")
            plugin = Plugin(name, name, "", getattr(module, "__name__", type(module).__name__))
            if not self._register(plugin, module):
                raise plugin.problems[0].error()
            self.plugins.append(plugin)
            self.plugins.sort(key=lambda p: (p.name, normalized(p.distribution)))
            if self._complete:
                self._sort_deciders()
            return plugin

    def remove(self, plugin: Plugin) -> None:
        """Unregister an object that was registered manually."""
        with self.lock:
            self.plugins.remove(plugin)
            if self.manager.has_plugin(plugin.name):
                self.manager.unregister(name=plugin.name)

    def implementations(self, hook: str) -> list[tuple[Plugin, Callable[..., Any]]]:
        """Return the loaded plugins that implement ``hook`` by name, each with a function of the hook's keywords."""
        loaded = [plugin for plugin in self._everything() if plugin.loaded is not None]
        pairs = [(plugin, _adapted(plugin.hooks[hook])) for plugin in loaded if hook in plugin.hooks]
        return sorted(pairs, key=lambda pair: pair[0].name)


def _adapted(implementation: pluggy.HookImpl) -> Callable[..., Any]:
    function, names = implementation.function, implementation.argnames
    return lambda **arguments: function(*(arguments[name] for name in names))


def _disabled(plugin: Plugin) -> PluginProblem:
    return PluginProblem(
        "disabled",
        f"plugin '{plugin.name}' of {plugin.origin} is disabled",
        (),
        "remove it from MITHRIL_DISABLE_PLUGINS (or from the argument that disables it)",
    )


def _import_problem(plugin: Plugin, cause: BaseException) -> PluginProblem:
    hint = f"report it to the authors of {plugin.distribution}; {plugin.disable_hint()}"
    if isinstance(cause, ImportError) and (missing := missing_requirement(plugin.requires)):
        hint = f'pip install "{missing}"; or {plugin.disable_hint()}'
    elif isinstance(cause, ModuleNotFoundError) and cause.name and plugin.module.startswith(cause.name):
        hint = f"pip install --force-reinstall {plugin.distribution}; or {plugin.disable_hint()}"
    return PluginProblem(
        "broken",
        f"cannot import plugin '{plugin.name}' of {plugin.origin}",
        (f"{type(cause).__name__}: {cause}", f"importing: {plugin.module}"),
        hint,
        cause,
    )


def _signature_problem(plugin: Plugin, facts: list[str], cause: Exception | None = None) -> PluginProblem:
    return PluginProblem(
        "broken",
        f"plugin '{plugin.name}' of {plugin.origin} implements a hook with invalid parameters",
        tuple(facts),
        f"report it to the authors of {plugin.distribution}; {plugin.disable_hint()}",
        cause,
    )
