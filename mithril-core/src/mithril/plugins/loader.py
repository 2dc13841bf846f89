"""Finding plugins, importing them one by one, and keeping a broken one from hurting the others.

Written here rather than left to pluggy, whose loader aborts at the first broken plugin, drops the second of two equal
names in silence, visits in file-system order and accepts misspelt hooks.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

from mithril.base import PluginError, __version__, closest, registry
from mithril.plugins import hooks, pip_hints

if TYPE_CHECKING:
    from importlib.metadata import Distribution

GROUP = "mithril"
CORE = "core"  # name of the built-in plugin
HOOKS = tuple(name for name in vars(hooks) if name.startswith("mithril_"))
SLOW = 5.0  # seconds of importing one plugin after which it is named
WRAPPABLE = ("mithril_run_pass", "mithril_build")


class PluginWarning(UserWarning):
    """A plugin misbehaved where that need not stop anything."""


def normalized(distribution: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a plugin, or one thing it offers, cannot be used."""

    state: str  # "disabled", "broken", "incompatible" or "clash"
    what: str
    facts: tuple[str, ...] = ()
    hint: str | None = None
    cause: BaseException | None = None

    def error(self) -> PluginError:
        """A fresh error that says so, chained to the cause."""
        error = PluginError(self.what, facts=self.facts, hint=self.hint)
        error.__cause__ = self.cause
        return error


@dataclass(slots=True)
class Plugin:
    """One entry point of the group ``mithril``, or an object registered by hand."""

    name: str
    distribution: str
    version: str
    module: str  # what the entry point names
    requires: tuple[str, ...] = ()
    is_core: bool = False  # the built-in plugin, which answers for the core itself
    loaded: Any = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def origin(self) -> str:
        """Distribution and version, as errors name it."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def first_party(self) -> bool:
        """Whether an installed distribution of this project provides it: names it claims belong to it."""
        return self.is_core or (bool(self.version) and normalized(self.distribution) in pip_hints.DISTRIBUTIONS)

    @property
    def state(self) -> str:
        """``found`` (not imported yet), ``loaded``, or the state of the first problem."""
        return self.problems[0].state if self.problems else "found" if self.loaded is None else "loaded"

    @property
    def usable(self) -> bool:
        """Whether it may still be, or has been, loaded."""
        return self.loaded is not None or not self.problems

    def silence(self) -> str:
        """What to type to be rid of it."""
        return f"set MITHRIL_DISABLE_PLUGINS={self.name} to leave it out"


class Manager(pluggy.PluginManager):
    """pluggy's manager, where ``mithril_*`` functions count as hooks even if the ``@hookimpl`` was forgotten."""

    def __init__(self) -> None:
        super().__init__(GROUP)
        self.add_hookspecs(hooks)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None and name.startswith("mithril_"):
            function = getattr(plugin, name)
            home = getattr(plugin, "__name__", type(plugin).__module__)
            if inspect.isroutine(function) and getattr(function, "__module__", None) == home:
                return {}
        return options

    def hooks_of(self, plugin: Any) -> dict[str, Any]:
        """Names of the functions of ``plugin`` that are meant as hooks, with their options."""
        found = ((name, self.parse_hookimpl_opts(plugin, name)) for name in dir(plugin) if name.startswith("mithril_"))
        return {name: options for name, options in found if options is not None}


def find() -> list[Plugin]:
    """Every installed plugin, sorted by name and distribution; imports none of them."""
    from importlib.metadata import distributions

    found: dict[tuple[str, str], Plugin] = {}
    shadowing: dict[str, str] = {}  # the first distribution of a name on sys.path is the one Python imports from
    for distribution in distributions():
        try:
            text = distribution.read_text("entry_points.txt")
        except OSError:
            continue  # a folder that vanished or may not be read belongs to nobody's plugin
        if not text or f"[{GROUP}]" not in text:
            continue
        headers = _headers(distribution)
        name = headers["Name"][0]
        where = str(distribution.locate_file(""))
        if shadowing.setdefault(normalized(name), where) != where:
            continue
        for plugin in _entries(headers, text):
            found.setdefault((plugin.name, normalized(name)), plugin)
    return [found[key] for key in sorted(found)]


def _headers(distribution: Distribution) -> dict[str, list[str]]:
    """Name, version and requirements; the e-mail parser would also read the long description, for ten times as long."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
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
                    Problem(
                        "broken",
                        f"plugin '{entry}' of {plugin.origin} has a malformed entry point",
                        (f"it reads: {line}", "expected: name = package.module"),
                        f"report it to the authors of {name}; {plugin.silence()}",
                    )
                )
            yield plugin


def core_version() -> str:
    """The version of this core."""
    return __version__


def incompatibility(plugin: Plugin, core: str) -> Problem | None:
    """The problem of a plugin whose ``Requires-Dist: mithril-core`` excludes this core, read before importing it."""
    for line in plugin.requires:
        if normalized(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) != "mithril-core":
            continue
        if _plainly_fits(line, core):
            continue
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.version import Version

        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue  # pip would have refused it; nothing can be concluded from it
        if (wanted.marker and not wanted.marker.evaluate({"extra": ""})) or wanted.specifier.contains(core, True):
            continue
        floors = [
            Version(s.version.removesuffix(".*")) for s in wanted.specifier if s.operator in (">=", ">", "~=", "==")
        ]
        older = any(Version(core) < floor for floor in floors)
        return Problem(
            "incompatible",
            f"plugin '{plugin.name}' of {plugin.origin} does not fit mithril-core {core}",
            (f"it requires: {line}",),
            f"pip install --upgrade {'mithril-core' if older else plugin.distribution}; or {plugin.silence()}",
        )
    return None


def _plainly_fits(line: str, core: str) -> bool:
    """Whether a requirement like ``mithril-core>=0.1,<0.2`` obviously holds: importing packaging takes 25 ms."""
    clauses = re.sub(r"^[A-Za-z0-9._-]+", "", line).strip(" ()").split(",")
    found = [re.fullmatch(r"\s*(>=|<)\s*(\d+(?:\.\d+)*)\s*", clause) for clause in clauses]
    if not all(found) or not re.fullmatch(r"\d+(\.\d+)*", core):
        return False
    parts = [(match[1], _numbers(match[2])) for match in found if match]
    return all(_numbers(core) >= floor if sign == ">=" else _numbers(core) < floor for sign, floor in parts)


def _numbers(version: str) -> list[int]:
    """``0.10.0`` as ``[0, 10]``: trailing zeros mean nothing."""
    return [int(part) for part in re.sub(r"(\.0+)+$", "", version).split(".")]


def missing_requirement(requires: Iterable[str]) -> str | None:
    """The first requirement that is not installed at all, as pip would be told it."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import InvalidRequirement, Requirement

    for line in requires:
        try:
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                version(wanted.name)
        except InvalidRequirement:
            continue
        except PackageNotFoundError:
            extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
            return f"{wanted.name}{extras}{wanted.specifier}"
    return None


def output_to_stderr() -> AbstractContextManager[Any]:
    """Send what plugins print to stderr: stdout belongs to results, such as those of ``--json``."""
    return redirect_stdout(sys.stderr)


@contextmanager
def _named_if_slow(plugin: Plugin) -> Iterator[None]:
    """Name a plugin on stderr that takes seconds to import: otherwise a hang would have no author."""

    def tell() -> None:
        sys.stderr.write(
            f"mithril: importing plugin '{plugin.name}' of {plugin.origin} takes longer than {SLOW:g} seconds; "
            f"{plugin.silence()}\n"
        )
        sys.stderr.flush()

    timer = threading.Timer(SLOW, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _names(setting: str) -> frozenset[str]:
    names = (part.strip() for part in setting.split(","))
    return frozenset(name if name == "*" else normalized(name) for name in names if name)


class Loader:
    """The plugins of one process: found once, imported one by one when asked for, each failure kept apart."""

    def __init__(self, disable: Iterable[str] = (), *, strict: bool | None = None, autoload: bool = True) -> None:
        self._disabled = _names(",".join(disable) + "," + os.environ.get("MITHRIL_DISABLE_PLUGINS", ""))
        if not autoload:
            self._disabled |= {"*"}
        self.strict = os.environ.get("MITHRIL_STRICT_PLUGINS", "") not in ("", "0") if strict is None else strict
        self.manager = Manager()
        self.lock = threading.RLock()
        self.core = Plugin(CORE, "mithril-core", __version__, registry.core_plugin, is_core=True)
        self._plugins: list[Plugin] | None = None
        self._complete = False

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
                        continue  # the name is its own: a stranger must not switch it off
                    other = next(rival for rival in rivals if rival is not plugin)
                    plugin.problems.append(
                        Problem(
                            "clash",
                            f"two distributions bring a plugin named '{name}'",
                            tuple(rival.origin for rival in rivals),
                            f"pip uninstall one of them, or set MITHRIL_DISABLE_PLUGINS={other.distribution}",
                        )
                    )

    def unknown_disabled(self) -> list[str]:
        """Return the names that were to be disabled and that no plugin has."""
        names = {normalized(name) for p in self.plugins for name in (p.name, p.distribution)}
        return sorted(self._disabled - names - {"*"})

    def named(self, name: str) -> list[Plugin]:
        """Plugins whose entry point or distribution has this name."""
        wanted = normalized(name)
        return [p for p in self.plugins if wanted in (normalized(p.name), normalized(p.distribution))]

    def problem(self, plugin: Plugin, problem: Problem) -> None:
        """Note what is wrong with a plugin; under ``strict`` it is raised instead."""
        if problem not in plugin.problems:
            plugin.problems.append(problem)
        if self.strict:
            raise problem.error()

    def load(self, plugin: Plugin) -> bool:
        """Import one plugin; False where it cannot be used (its ``problems`` say why)."""
        with self.lock:
            if plugin.loaded is not None:
                return True
            if plugin.problems:
                if self.strict and plugin.state != "disabled":
                    raise plugin.problems[0].error()
                return False
            if problem := incompatibility(plugin, core_version()):
                self.problem(plugin, problem)
                return False
            try:
                with output_to_stderr(), _named_if_slow(plugin):
                    module = importlib.import_module(plugin.module)
            except (Exception, SystemExit) as cause:
                self.problem(plugin, _import_problem(plugin, cause))
                return False
            return self._register(plugin, module)

    def _register(self, plugin: Plugin, module: Any) -> bool:
        problem = self._misuse(plugin, module)
        if problem is None:
            try:
                self.manager.register(module, plugin.name)
            except (pluggy.PluginValidationError, ValueError) as cause:
                if self.manager.has_plugin(plugin.name):
                    self.manager.unregister(name=plugin.name)
                problem = _signature_problem(plugin, module, cause)
        if problem is None:
            plugin.loaded = module
            return True
        self.problem(plugin, problem)
        return False

    def _misuse(self, plugin: Plugin, module: Any) -> Problem | None:
        for name, options in self.manager.hooks_of(module).items():
            if name not in HOOKS:
                near = closest(name, HOOKS)
                return Problem(
                    "broken",
                    f"plugin '{plugin.name}' of {plugin.origin} defines '{name}', which is no hook of mithril",
                    ("hooks: " + ", ".join([*near, *(hook for hook in HOOKS if hook not in near)]),),
                    (f"did the author mean '{near[0]}'? " if near else "")
                    + f"report it to the authors of {plugin.distribution}; {plugin.silence()}",
                )
            if (options.get("wrapper") or options.get("hookwrapper")) and name not in WRAPPABLE:
                return Problem(
                    "broken",
                    f"plugin '{plugin.name}' of {plugin.origin} wraps '{name}', which cannot be wrapped",
                    ("hooks that can be wrapped: " + ", ".join(WRAPPABLE),),
                    f"report it to the authors of {plugin.distribution}; {plugin.silence()}",
                )
        return None

    def load_all(self) -> list[Plugin]:
        """Import every plugin that can be; those that are loaded, sorted by name."""
        with self.lock:
            if not self._complete:
                for plugin in self._everything():
                    self.load(plugin)
                self._sort_manager()
                self._complete = True
            return [plugin for plugin in self.plugins if plugin.loaded is not None]

    def _everything(self) -> list[Plugin]:
        """The installed plugins and, where the core has one, the built-in one."""
        return [*([self.core] if self.core.module else []), *self.plugins]

    def _sort_manager(self) -> None:
        """Register anew in one order: what was asked for first must not decide in which order hooks are called."""
        self.manager = Manager()
        loaded = [plugin for plugin in self._everything() if plugin.loaded is not None]
        for plugin in reversed(loaded):  # pluggy calls the last registered first
            self.manager.register(plugin.loaded, plugin.name)

    def add(self, module: Any, name: str) -> Plugin:
        """Register an object by hand, as if a distribution of that name had brought it."""
        with self.lock:
            if any(plugin.name == name and plugin.usable for plugin in self.plugins):
                raise PluginError(f"there is a plugin named '{name}' already", hint="choose another name")
            plugin = Plugin(name, name, "", getattr(module, "__name__", type(module).__name__))
            if not self._register(plugin, module):
                raise plugin.problems[0].error()
            self.plugins.append(plugin)
            self.plugins.sort(key=lambda p: (p.name, normalized(p.distribution)))
            if self._complete:
                self._sort_manager()
            return plugin

    def remove(self, plugin: Plugin) -> None:
        """Forget an object registered by hand."""
        with self.lock:
            self.plugins.remove(plugin)
            self.manager.unregister(name=plugin.name)

    def implementations(self, hook: str) -> list[tuple[Plugin, Callable[..., Any]]]:
        """The loaded plugins that implement ``hook``, by name, each with a function that takes the hook's keywords."""
        by_name = {plugin.name: plugin for plugin in self._everything() if plugin.loaded is not None}
        found = [(by_name[i.plugin_name], _caller(i)) for i in getattr(self.manager.hook, hook).get_hookimpls()]
        return sorted(found, key=lambda pair: pair[0].name)


def _caller(implementation: pluggy.HookImpl) -> Callable[..., Any]:
    function, names = implementation.function, implementation.argnames
    return lambda **given: function(*(given[name] for name in names))


def _disabled(plugin: Plugin) -> Problem:
    return Problem(
        "disabled",
        f"plugin '{plugin.name}' of {plugin.origin} is disabled",
        (),
        "take it out of MITHRIL_DISABLE_PLUGINS (or of the argument that disables it)",
    )


def _import_problem(plugin: Plugin, cause: BaseException) -> Problem:
    hint = f"report it to the authors of {plugin.distribution}; {plugin.silence()}"
    if isinstance(cause, ImportError) and (wanted := missing_requirement(plugin.requires)):
        hint = f'pip install "{wanted}"; or {plugin.silence()}'
    elif isinstance(cause, ModuleNotFoundError) and cause.name and plugin.module.startswith(cause.name):
        hint = f"pip install --force-reinstall {plugin.distribution}; or {plugin.silence()}"
    return Problem(
        "broken",
        f"plugin '{plugin.name}' of {plugin.origin} failed when it was imported",
        (f"{type(cause).__name__}: {cause}", f"importing: {plugin.module}"),
        hint,
        cause,
    )


def _signature_problem(plugin: Plugin, module: Any, cause: Exception) -> Problem:
    wrong = []
    for name in HOOKS:
        function = getattr(module, name, None)
        if inspect.isroutine(function):
            accepted = list(inspect.signature(getattr(hooks, name)).parameters)
            given = [p for p in inspect.signature(function).parameters if p != "self"]
            if set(given) - set(accepted):
                wrong.append(f"{name}({', '.join(given)}); it may take: {', '.join(accepted) or 'nothing'}")
    return Problem(
        "broken",
        f"plugin '{plugin.name}' of {plugin.origin} implements a hook wrongly",
        tuple(wrong) or (str(cause),),
        f"report it to the authors of {plugin.distribution}; {plugin.silence()}",
        cause,
    )
