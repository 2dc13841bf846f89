"""Three plugins that were written for version 0.1, unchanged, pass their tests on this version and on the next one.

``frozen_0.1`` is a folder of installed distributions, with the tests of their vendor. No file of it is ever edited:
the ``RECORD`` of each distribution has the digests. The next version is a copy of this core, in which every hook has
another parameter, which its callers pass, and every descriptor another field.
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mithril
from mithril import plugins
from mithril.plugins import HOOKS, pip_hints

FROZEN = Path(__file__).parent / "frozen_0.1"
OTHERS = ",".join(p.name for p in plugins.found() if p.name not in ("numpy", "passes", "tools"))
# A plugin of the next version, which reads the new parameter and sets the new field.
NEXT = """
from mithril import HardwareTarget, hookimpl

api_version = (2, 3)

@hookimpl
def mithril_targets(reason):
    return [HardwareTarget("next_board", family="cpu", summary=reason, added="by 0.2")]

@hookimpl(wrapper=True)
def mithril_build(reason, graph):
    built.append(reason)
    return (yield)

@hookimpl
def mithril_compile_end(reason, error):
    built.append(reason)

built = []
"""
CHECK = """
import mithril as ml
import next_plugin
from mithril import plugins

with ml.Builder() as builder:
    y = ml.ops.exp(builder.input("x", (3,)))
ml.compile(builder.build({"y": y}), "alder")
spec = plugins.target("next_board").spec
print(ml.__version__, spec.summary, spec.added, *next_plugin.built)
print(*(f"{p.name}:{p.state}" for p in plugins.all() if p.state != "disabled"))
"""


def changed(path: Path, *changes: tuple[str, str]) -> None:
    """Replace texts that the file contains once."""
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, (path.name, old)
        text = text.replace(old, new)
    path.write_text(text)


def next_version(folder: Path) -> None:
    """Write mithril 0.2.0: the package of this core with new parameters of hooks and new fields of descriptors."""
    package = folder / "mithril"
    shutil.copytree(Path(mithril.__file__).parent, package, ignore=shutil.ignore_patterns("*.pyi"))
    home = package / "plugins"
    shutil.copyfile(pip_hints.REGISTRY, home / "registry.json")
    changed(package / "graph" / "version.py", (f'"{mithril.__version__}"', '"0.2.0"'))
    changed(home / "loader.py", ("\nAPI_VERSION = 1\n", "\nAPI_VERSION = 2\n"))
    text = (home / "hooks.py").read_text()
    text, number = re.subn(r"^(def mithril_\w+\(\s*)(?=(\))?)", _with_reason, text, flags=re.M)
    assert number == len(HOOKS)
    (home / "hooks.py").write_text(text)
    reason = ', reason="news")'
    changed(
        home / "hook_calls.py",
        ("return hook(**arguments)", "return hook(**arguments" + reason),
        ("implementation(**arguments)", "implementation(**arguments" + reason),
        ("target=target, level=level)", "target=target, level=level" + reason),
    )
    changed(home / "tables.py", ("implementation(**arguments)", "implementation(**arguments" + reason))
    lines = (home / "specs.py").read_text().splitlines()
    for node in reversed(ast.parse("\n".join(lines)).body):
        if isinstance(node, ast.ClassDef) and any(getattr(d, "id", "") == "_tolerant" for d in node.decorator_list):
            fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
            lines.insert(fields[-1].end_lineno or 0, '    added: str = ""')
    (home / "specs.py").write_text("\n".join(lines) + "\n")


def _with_reason(match: re.Match[str]) -> str:
    return f"{match[1]}reason: str" + ("" if match[2] else ", ")


def python(*arguments: str, folders: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "MITHRIL_DISABLE_PLUGINS": OTHERS}
    return subprocess.run([sys.executable, *arguments], cwd=folders[0], env=environment, capture_output=True, text=True)


@pytest.fixture
def installed(tmp_path):
    shutil.copytree(FROZEN, tmp_path / "site")
    return tmp_path / "site"


def vendor_tests(*folders: Path) -> None:
    # -W error: a plugin that works with a warning does not work as it did
    options = ["-q", "-W", "error", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = python("-m", "pytest", *options, str(folders[-1] / "alder_tests.py"), folders=folders)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^59 passed", run.stdout, re.M), run.stdout


def test_frozen_files_are_unchanged_and_complete():
    frozen = {
        path for path in FROZEN.rglob("*") if path.suffix == ".py" or path.name in ("METADATA", "entry_points.txt")
    }
    recorded = set()
    for record in FROZEN.glob("*.dist-info/RECORD"):
        for name, digest, _ in csv.reader(record.read_text().splitlines()):
            content = (FROZEN / name).read_bytes()
            actual = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert f"sha256={actual}" == digest, f"{name} was edited"
            recorded.add(FROZEN / name)
    assert recorded == frozen
    names = {word for path in frozen for word in re.findall(r"\w+", path.read_text())}
    version = json.loads((Path(__file__).parents[3] / "mithril-core/tests/hooks_0.1.json").read_text())
    assert {*version["hooks"], *version["descriptors"]} <= names


def test_plugins_of_version_0_1_run_on_this_version(installed):
    vendor_tests(installed)


def test_plugins_of_version_0_1_run_on_the_next_version(installed, tmp_path):
    next_version(tmp_path / "next")
    vendor_tests(tmp_path / "next", installed)


def test_the_next_version_passes_its_additions(installed, tmp_path):
    """Otherwise the test above would only run this version again."""
    next_version(tmp_path / "next")
    (installed / "next_plugin.py").write_text(NEXT)
    info = installed / "next_kit-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: next-kit\nVersion: 1.0\nRequires-Dist: mithril-core>=0.2\n")
    (info / "entry_points.txt").write_text("[mithril]\nnext = next_plugin\n")
    run = python("-W", "error", "-c", CHECK, folders=(tmp_path / "next", installed))
    states = " ".join(
        f"{n}:loaded" for n in ("alder-engine", "alder-lab", "alder-ops", "next", "numpy", "passes", "tools")
    )
    assert run.stdout == f"0.2.0 news by 0.2 news news\n{states}\n", run.stderr
