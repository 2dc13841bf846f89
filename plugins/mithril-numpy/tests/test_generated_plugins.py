"""``mithril new-plugin``: the plugins of all kinds, installed together, pass their own tests in this version of Python.

Installation is simulated: each source folder is on the path, next to a dist-info made of its pyproject.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest

from mithril_tools.cli.new_plugin import KINDS, facts, render


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write a distribution ``mithril-shiny-KIND`` of each kind."""
    root = tmp_path_factory.mktemp("plugins")
    for kind in KINDS:
        words = facts(kind, f"shiny-{kind}")
        for place, text in render(kind, words).items():
            path = root / kind / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        project = tomllib.loads((root / kind / "pyproject.toml").read_text())["project"]
        info = root / kind / "src" / f"{words['package']}-{project['version']}.dist-info"
        info.mkdir()
        requires = [f"Requires-Dist: {line}" for line in project["dependencies"]]
        lines = [f"Name: {project['name']}", f"Version: {project['version']}", *requires, ""]
        (info / "METADATA").write_text("\n".join(lines))
        entries = [f"{name} = {module}" for name, module in project["entry-points"]["mithril"].items()]
        (info / "entry_points.txt").write_text("\n".join(["[mithril]", *entries, ""]))
    return root


def run(root, *command):
    paths = os.pathsep.join(str(root / kind / "src") for kind in KINDS)
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_generated_distributions_pass_their_tests(folders):
    options = ("-W", "error", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", ".")
    output = run(folders, "pytest", "-q", "-rA", *options, *(f"{kind}/tests" for kind in KINDS))
    passed = {kind: len(re.findall(rf"^PASSED {kind}/tests/", output, re.M)) for kind in KINDS}
    assert not [kind for kind, count in passed.items() if count < 2], passed


def test_generated_plugins_are_loaded_together(folders):
    listed = run(folders, "mithril", "plugins")
    for kind in KINDS:
        (row,) = (line for line in listed.splitlines() if line.startswith(f"shiny-{kind} "))
        assert row.split()[-1] in ("loaded", "registered"), listed
