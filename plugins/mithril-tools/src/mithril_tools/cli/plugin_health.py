"""``mithril doctor --plugins``: each plugin in a process of its own, watched for hangs, output and global changes.

A plugin that calls ``np.seterr``, filters warnings or replaces a function of mithril affects every program that has it
installed. Such changes are found by comparing the process before and after the plugin and all its code are imported.
"""

from __future__ import annotations

import builtins
import contextlib
import decimal
import gc
import json
import locale
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules, resolve_name
from types import ModuleType
from typing import Any

import mithril
from mithril import plugins
from mithril.plugins import Plugin

HANG = 30.0  # seconds after which a plugin is stopped
WATCHED = ("mithril", "numpy", "builtins")  # packages whose functions and classes must not be replaced
OWN = "sys.exit(__import__('mithril_tools.cli.plugin_health', fromlist=['main']).main(*sys.argv[1:]))"


def examine(plugin: Plugin, hang: float = HANG) -> dict[str, Any]:
    """Import a plugin and all its code in a new process; report time, output, and changes of global state."""
    command = [sys.executable, "-c", f"import sys; {OWN}", plugin.name, plugin.distribution]
    row: dict[str, Any] = {"name": plugin.name, "distribution": plugin.origin, "changes": []}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=hang, check=False)
    except subprocess.TimeoutExpired:
        return row | {"state": "hangs", "changes": [f"stopped after {hang:g} seconds: {plugin.disable_hint()}"]}
    output, _, result = done.stdout.rpartition("\n")
    if done.returncode or not result.startswith("{"):
        last = (done.stderr.strip() or output or result).splitlines()[-1:]
        return row | {"state": "broken", "changes": [f"exit status {done.returncode}", *last]}
    row |= json.loads(result)
    printed = [f"prints {len(output.splitlines())} lines to stdout"] if output.strip() else []
    problems = row.pop("problems")
    row["changes"] = [*problems, *row["changes"], *printed]
    return row | {"state": "broken" if problems else "changes global state" if row["changes"] else "clean"}


def main(name: str, distribution: str) -> None:
    """Run in the new process: import one plugin, and print the report as the last line."""
    report_to = os.fdopen(os.dup(1), "w")
    resolve_all()
    loader = plugins.default.loader
    plugin = next(p for p in loader.plugins if (p.name, p.distribution) == (name, distribution))
    before = state()
    start = time.perf_counter()
    loader.load(plugin)
    changes = [f"on import: {line}" for line in differences(before, state())]
    plugins.all()  # calls the hooks, which records their problems
    seconds = time.perf_counter() - start
    before = state()
    for loads in code_of(plugin) if plugin.loaded else ():
        try:
            resolve_name(loads)
        except ImportError:
            continue  # a framework that is not installed; `mithril doctor` reports it
    changes += [f"when used: {line}" for line in differences(before, state())]
    private = plugins.private_imports(plugin)
    problems = [*plugin.problems, *plugin.doubts, *([private] if private else [])]
    texts = [str(problem.error()) for problem in problems]
    report = {"import": f"{seconds * 1e3:.0f} ms", "changes": changes, "problems": texts}
    report_to.write("\n" + json.dumps(report))
    report_to.flush()
    os._exit(0)  # without the plugin's exit handlers and threads


def resolve_all() -> None:
    """Import every public name of the core, so that a plugin that replaces one is noticed."""
    for package in (mithril, *(import_module(f"mithril.{package.name}") for package in iter_modules(mithril.__path__))):
        for name in getattr(package, "__all__", ()):
            getattr(package, name)
    for name in mithril._MODULE_OF:
        getattr(mithril, name)


def code_of(plugin: Plugin) -> Iterator[str]:
    """Yield the paths of all code that the descriptors of a plugin name."""
    for hook in LISTED:
        for owner, function in plugins.default.loader.implementations(f"mithril_{hook}"):
            for spec in _specs(hook, function) if owner is plugin else ():
                paths = (getattr(spec, name, None) for name in ("loads", "saves", "module", "when"))
                yield from (path for path in paths if path)


def _specs(hook: str, function: Callable[..., Any]) -> list[Any]:
    """Return the descriptors of a hook; one that fails is a recorded problem."""
    calls = [{"backend": name} for name in plugins.backends()] if hook == "lowerings" else [{}]
    specs: list[Any] = []
    for arguments in calls:
        with contextlib.suppress(Exception, SystemExit):
            specs += function(**arguments) or ()
    return specs


LISTED = ("backends", "passes", "profilers", "ops", "lowerings", "exports", "formats", "frontends", "commands")


def state() -> dict[str, Any]:
    """Return the global state of this process that plugins must not change, by name."""
    import numpy as np

    root = logging.getLogger()
    facts: dict[str, Any] = {
        "numpy.geterr()": np.geterr(),
        "numpy.get_printoptions()": np.get_printoptions(),
        "numpy.random": np.random.get_state()[1].tobytes(),  # type: ignore[index]
        "random": random.getstate(),
        "warnings.filters": {repr(f): "set" for f in warnings.filters},
        "warnings.showwarning": warnings.showwarning,
        "os.environ": dict(os.environ),
        "os.getcwd()": os.getcwd(),
        "sys.path": list(sys.path),
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "sys.excepthook": sys.excepthook,
        "sys.getrecursionlimit()": sys.getrecursionlimit(),
        "threading.excepthook": threading.excepthook,
        "locale": locale.setlocale(locale.LC_ALL),
        "decimal.getcontext()": repr(decimal.getcontext()),
        "logging.root": (root.level, tuple(root.handlers)),
        "signal SIGINT": signal.getsignal(signal.SIGINT),
        "gc.isenabled()": gc.isenabled(),
    }
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0] in WATCHED:
            facts |= {f"{name}.{k}": v for k, v in _names_of(module).items()}
    return facts


def _names_of(module: ModuleType) -> dict[str, Any]:
    """Return the functions and classes of a module, and the methods of the classes that it defines."""
    names = {k: v for k, v in vars(module).items() if callable(v)}
    classes = {k: v for k, v in names.items() if isinstance(v, type) and v.__module__ == module.__name__}
    if module is not builtins:
        names |= {f"{k}.{n}": v for k, kind in classes.items() for n, v in vars(kind).items() if callable(v)}
    return names


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describe each part of the state that differs; new names are ignored."""
    lines = []
    for name, old in before.items():
        new = after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [k for k in (*old, *(k for k in new if k not in old)) if old.get(k) != new.get(k)]
            lines += [f"{name}: {k} is {new.get(k, 'removed')!r}, was {old.get(k, 'absent')!r}" for k in keys]
        elif callable(old) and name.partition(".")[0] in WATCHED:
            if new is not old:
                lines.append(f"{name} is replaced by {_where(new)}")
        elif new != old:
            text = f" is {new!r}, was {old!r}" if len(repr(new) + repr(old)) < 200 else " is changed"
            lines.append(name + text)
    return lines


def _where(value: Any) -> str:
    code = getattr(value, "__code__", None)
    return f"{value!r}" if code is None else f"'{value.__name__}' of {code.co_filename}:{code.co_firstlineno}"
