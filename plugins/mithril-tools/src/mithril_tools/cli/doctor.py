"""``mithril doctor``: information about this machine, and the reasons why plugins did not load."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import packages_distributions, version
from typing import Any

import click
from rich.markup import escape

from mithril import __version__, plugins
from mithril.graph import MithrilError
from mithril.plugins import BackendSpec, Entry, Plugin, violated_requirements
from mithril_tools.cli.listing import faults
from mithril_tools.cli.output import console, json_option, print_json, show

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "XLA_FLAGS")
SWITCHES = ("MITHRIL_DISABLE_PLUGINS", "MITHRIL_STRICT_PLUGINS")


def environment() -> dict[str, str]:
    """Report versions, CPU, and the environment variables that affect mithril."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "mithril-core": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "usable cores": f"{cores} of {os.cpu_count()}",
    }
    for name in ("numpy", "ml_dtypes", "pluggy"):
        facts[name] = version(name)
    for name in (*THREADS, *SWITCHES):
        if name in os.environ:
            facts[name] = os.environ[name]
    return facts


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, platform.processor() or "unknown")
    except OSError:
        return platform.processor() or "unknown"


def examine_backend(entry: Entry[BackendSpec]) -> dict[str, str]:
    """Report one backend: the version of its framework, its import time, and its own diagnosis."""
    facts = {"distribution": entry.origin}
    brought_by = packages_distributions()
    for module in entry.spec.requires:
        homes = sorted(set(brought_by.get(module, ())))
        facts[module] = ", ".join(f"{home} {version(home)}" for home in homes) or "not installed"
    start = time.perf_counter()
    try:
        backend = plugins.backend_class(entry.spec.name)
        faults = violated_requirements(entry.plugin.requires)
        facts["state"] = "ready" if not faults else "not supported"
        if faults:
            facts["why"] = f"{entry.origin} requires {'; '.join(faults)}"
        facts["loading took"] = f"{time.perf_counter() - start:.2f} s"
        facts.update({str(key): str(value) for key, value in backend.diagnose().items()})
    except MithrilError as error:
        facts["state"] = "failed"
        facts["why"] = str(error)
    except Exception as error:  # a framework may raise anything when its devices are queried
        facts["state"] = "failed"
        facts["why"] = f"{type(error).__name__}: {error}"
    return facts


@click.command()
@click.option(
    "--plugins",
    "separately",
    is_flag=True,
    help="Run each plugin in a separate process, and report hangs, output and side effects.",
)
@json_option
def doctor(separately: bool, as_json: bool) -> None:
    """Report versions, devices, threads, and why a plugin did not load.

    The exit status is 1 if a plugin or backend has a problem.
    """
    if separately:
        _plugins(as_json)
        return
    installed = plugins.all()
    report: dict[str, Any] = {
        "environment": environment(),
        "backends": {name: examine_backend(entry) for name, entry in plugins.backends().items()},
        "hardware": [{"name": f.spec.name, "why": f.spec.why, "by": f.origin} for f in plugins.detect_targets()],
        "problems": [*faults(installed), *violations(installed)],
    }
    if as_json:
        print_json(report)
    else:
        _show(report)
    if report["problems"] or any(facts["state"] != "ready" for facts in report["backends"].values()):
        raise SystemExit(1)


def violations(installed: Iterable[Plugin]) -> list[str]:
    """Return the requirements of plugins in use that an installed version violates, or that are not installed."""
    return [
        f"{plugin.origin} requires {fault}"
        for plugin in installed
        if plugin.loaded is not None
        for fault in violated_requirements(plugin.requires)
    ]


def _show(report: Mapping[str, Any]) -> None:
    out = console()
    _section(out, "environment", report["environment"])
    for name, facts in report["backends"].items():
        _section(out, f"backend {name}", facts)
    if report["hardware"]:
        out.print("\n[bold]hardware[/bold]")
        show(report["hardware"], ["name", "why", "by"], out)
    if report["problems"]:
        out.print("\n[bold]plugins that are not in use, or not entirely[/bold]")
        for problem in report["problems"]:
            out.print(escape(problem))
    if not report["backends"]:
        out.print("\nNo backend is installed. One to begin with: pip install mithril-numpy")


def _plugins(as_json: bool) -> None:
    """Report the effects of each plugin on its process."""
    from mithril_tools.cli.plugin_health import examine

    rows = [examine(plugin) for plugin in plugins.found() if plugin.state != "disabled"]
    if as_json:
        print_json(rows)
    else:
        out = console()
        show([{"import": "", **row} for row in rows], ["name", "distribution", "import", "state"], out)
        for row in rows:
            out.print(*(f"\n{escape(row['name'])} ({escape(row['distribution'])})" for _ in row["changes"][:1]), end="")
            for line in row["changes"]:
                out.print(f"\n  {escape(line)}", end="")
        out.print()
    if any(row["state"] != "clean" for row in rows):
        raise SystemExit(1)


def _section(out: Any, title: str, facts: dict[str, str]) -> None:
    out.print(f"\n[bold]{escape(title)}[/bold]" if title != "environment" else f"[bold]{title}[/bold]")
    show([{"fact": key, "value": value} for key, value in facts.items()], ["fact", "value"], out)
