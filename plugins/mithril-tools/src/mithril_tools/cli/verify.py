"""``mithril plugins verify FOLDER``: a distribution is built, checked, installed alone, and tested."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import click

from mithril import InputError, __version__
from mithril_tools.cli.output import json_option, print_json

SUMMARY = "mithril-kit.json"  # in the folder of the metadata
TESTERS = ("mithril-tools", "mithril-testing", "pytest")
DOCTOR = """
import json, re, sys
from mithril import plugins
from mithril_tools.cli.plugin_health import examine
own = [p for p in plugins.found() if re.sub(r"[-_.]+", "-", p.distribution).lower() == sys.argv[1]]
print(json.dumps([examine(plugin) for plugin in own]))
"""
COVERED = """
import re, sys
from mithril import plugins
own = [p.loaded for p in plugins.all() if re.sub(r"[-_.]+", "-", p.distribution).lower() == sys.argv[1]]
kinds = ("backends", "lowerings", "ops", "passes", "profilers", "targets")
print(any(hasattr(module, f"mithril_{kind}") for module in own for kind in kinds))
"""


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), default=Path("dist"), help="Where to write the wheel.")
@click.option("--offline", is_flag=True, help="Take requirements from this environment, in place of an index.")
@json_option
def verify(folder: Path, output: Path, offline: bool, as_json: bool) -> None:
    """Build the distribution in FOLDER, check it, and write a wheel that states the result.

    The wheel is installed with its extra `test` into an empty environment, where `mithril doctor`
    and the tests of FOLDER run. Its metadata then hold the counts of the conformance kit, which `mithril plugins`
    shows. The exit status is 1 if a check fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = examine(folder.resolve(), Path(scratch), offline)
        if not report.faults:
            output.mkdir(parents=True, exist_ok=True)
            report.wheel = output / report.wheel.name
            report.wheel.write_bytes(with_summary(report.built, report.summary))
    if as_json:
        print_json({"wheel": str(report.wheel), "faults": report.faults, **report.summary})
    else:
        for fault in report.faults:
            click.echo(f"fault: {fault}")
        click.echo(f"{report.wheel.name}: {text_of(report.summary)}")
    if report.faults:
        raise SystemExit(1)


@dataclass
class Report:
    """The result of a verification."""

    wheel: Path
    built: bytes
    faults: list[str]
    summary: dict[str, Any] = field(default_factory=dict)


def examine(folder: Path, scratch: Path, offline: bool) -> Report:
    """Build, check, install and test a distribution."""
    isolation = ["--no-build-isolation"] if offline else []
    build = ("wheel", "--no-deps", *isolation, str(folder))
    hint = f"correct pyproject.toml; `pip {' '.join(build)}` shows all of its output"
    _pip(f"the wheel of {folder} cannot be built", hint, *build, "-q", "-w", str(scratch))
    (wheel,) = scratch.glob("*.whl")
    is_library = _is_library(folder)
    report = Report(wheel, wheel.read_bytes(), list(faults_of(wheel, is_library)))
    python = _environment(scratch / "venv", wheel, offline)
    if not is_library:
        report.faults += _doctor(python, wheel)
    counts, failures = _kit(python, folder, scratch, wheel)
    report.faults += failures
    report.summary = {"mithril": __version__, **counts}
    return report


def _is_library(folder: Path) -> bool:
    """Whether ``pyproject.toml`` declares that plugins import the distribution, and does not extend mithril itself."""
    project = folder / "pyproject.toml"
    tables = tomllib.loads(project.read_text(encoding="utf-8")) if project.exists() else {}
    return tables.get("tool", {}).get("mithril", {}).get("library") is True


def faults_of(wheel: Path, is_library: bool = False) -> Iterator[str]:
    """Yield the faults of the metadata and the content of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (folder,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        lines = archive.read(f"{folder}/METADATA").decode().partition("\n\n")[0].splitlines()
        entries = f"{folder}/entry_points.txt"
        text = archive.read(entries).decode() if entries in names else ""
    headers: dict[str, list[str]] = {}
    for key, _, value in (line.partition(": ") for line in lines):
        headers.setdefault(key, []).append(value)
    section = text.partition("[mithril]")[2].partition("\n[")[0]
    modules = [line.partition("=")[2].strip() for line in section.splitlines() if "=" in line]
    if not modules and not is_library:
        yield "no entry point in the group mithril; a library declares `library = true` in [tool.mithril]"
    if modules and is_library:
        yield "an entry point in the group mithril, but [tool.mithril] declares a library"
    for module in modules:
        path = module.replace(".", "/")
        if not {f"{path}.py", f"{path}/__init__.py"} & set(names):
            yield f"the module {module} of the entry point is not in the wheel"
    core = [line for line in headers.get("Requires-Dist", ()) if re.match(r"mithril[-_.]core\b", line, re.IGNORECASE)]
    if not core:
        yield "no requirement of mithril-core"
    elif ">=" not in core[0] or "==" in core[0]:
        yield f"the requirement {core[0]} has no lower bound, or admits one version only"
    for header in ("License-File", "Requires-Python", "Description-Content-Type"):
        if header not in headers:
            yield f"no {header}"
    if not any(name.endswith("py.typed") for name in names):
        yield "no py.typed"
    tops = {name.partition("/")[0] for name in names} - {folder}
    for name in sorted(tops & {"tests", "test", "docs", "examples"}):
        yield f"a top-level package {name}"


def _pip(failure: str, hint: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        output = done.stdout + done.stderr
        # The exception of a build, without its traceback, else the errors of pip itself.
        causes = re.findall(r"^\s*([\w.]*Error: .*)", output, re.MULTILINE) or re.findall("ERROR: (.*)", output)
        raise InputError(failure, facts=causes[-1:] or [output.strip()], hint=hint)


def _environment(place: Path, wheel: Path, offline: bool) -> Path:
    """Install the wheel into a new environment, and return its Python."""
    venv.create(place)
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    install = ["--python", str(python), "install", "-q", "--no-warn-script-location"]
    failure = f"{wheel.name} cannot be installed"
    if not offline:
        hint = "correct its requirements, or give --offline to take them from this environment"
        _pip(failure, hint, *install, requirement(wheel), *TESTERS)
        return python
    _pip(failure, "correct its metadata", *install, "--no-deps", str(wheel))
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(place)}))
    # Packages of the wheel come first; this environment has the others.
    (site / "requirements.pth").write_text("\n".join(path for path in sys.path if os.path.isdir(path)))
    return python


def requirement(wheel: Path) -> str:
    """Return the wheel as a requirement, with its extra of the name ``test`` if it has one."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        extras = re.findall(r"^Provides-Extra: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
    return f"{wheel}[test]" if "test" in extras else str(wheel)


def _run(python: Path, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def _distribution(wheel: Path) -> str:
    return wheel.name.partition("-")[0].replace("_", "-").lower()


def _is_covered(python: Path, wheel: Path) -> bool:
    """Whether the kit has a class for a part of the plugin; it has none for commands, frontends and file formats."""
    return _run(python, "-c", COVERED, _distribution(wheel)).stdout.strip() == "True"


def _doctor(python: Path, wheel: Path) -> Iterator[str]:
    """Yield the faults that ``mithril doctor --plugins`` finds in the plugins of the wheel."""
    name = _distribution(wheel)
    done = _run(python, "-c", DOCTOR, name)
    if done.returncode:
        yield f"mithril doctor fails: {done.stderr.strip()}"
        return
    rows = json.loads(done.stdout.splitlines()[-1])
    if not rows:
        yield f"mithril finds no plugin of {name}"
    for row in rows:
        if row["state"] != "clean":
            yield f"plugin {row['name']} is {row['state']}: {'; '.join(row['changes'])}"


def _kit(python: Path, folder: Path, scratch: Path, wheel: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the tests of a distribution; return the counts of the kit, and the failures."""
    if not (folder / "tests").is_dir():
        return {}, ["no folder of tests: `mithril new-plugin` writes tests that run the kit"]
    summary = scratch / "summary.json"
    # An empty -m selects marked tests, too: a kit that is slow may run at release only.
    options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-m", "", f"--kit-summary={summary}"]
    done = _run(python, "-m", "pytest", *options, "tests", folder=folder)
    if not summary.exists():
        return {}, [f"the tests do not run: {(done.stdout + done.stderr).strip()}"]
    version = _run(python, "-c", "import mithril_testing as t; print(t.KIT_VERSION)").stdout
    counts = {"kit": int(version), **json.loads(summary.read_text())}
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failures:
        failures = [f"the tests end with status {done.returncode}"]
    if not counts["passed"] and not failures and _is_covered(python, wheel):
        failures = ["no class of the conformance kit is among the tests"]
    return counts, failures


def with_summary(wheel: bytes, summary: Mapping[str, Any]) -> bytes:
    """Return a wheel with the summary in its metadata, and in the list of its files."""
    content = json.dumps(summary, sort_keys=True).encode() + b"\n"
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(wheel)) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as copy:
        record = next(info for info in source.infolist() if info.filename.endswith(".dist-info/RECORD"))
        place = record.filename.replace("RECORD", SUMMARY)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        row = f"{place},sha256={digest},{len(content)}\n".encode()
        for info in source.infolist():
            data = source.read(info)
            if info is record:
                copy.writestr(zipfile.ZipInfo(place, info.date_time), content, zipfile.ZIP_DEFLATED)
                data = row + data
            copy.writestr(info, data)
    return target.getvalue()


def text_of(summary: Mapping[str, Any]) -> str:
    """Return a summary as words: ``kit 1, 726 of 740, 14 declared partial``."""
    if "kit" not in summary:
        return "not verified"
    total = sum(summary[key] for key in ("passed", "failed", "partial"))
    if not total:
        return f"kit {summary['kit']}, which has no cases for these parts"
    partial = f", {summary['partial']} declared partial" if summary["partial"] else ""
    return f"kit {summary['kit']}, {summary['passed']} of {total}{partial}"


def summary_of(name: str) -> str:
    """Return the summary that an installed distribution states, or an empty text."""
    try:
        return text_of(json.loads(distribution(name).read_text(SUMMARY) or "{}")).replace("not verified", "")
    except (PackageNotFoundError, ValueError, TypeError, KeyError):
        return ""
