"""Generated plugins of all kinds install by pip into one environment, are found, and pass their own tests."""

from __future__ import annotations

import os
import subprocess
import sys

from mithril_tools.cli.new_plugin import KINDS, facts, render


def run(*command, **settings):
    done = subprocess.run(list(map(str, command)), check=False, text=True, capture_output=True, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_all_kinds_install_and_pass(tmp_path):
    for kind in KINDS:
        for place, text in render(kind, facts(kind, f"shiny-{kind}")).items():
            path = tmp_path / kind / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    folders = [tmp_path / kind for kind in KINDS]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", tmp_path / "site"]
    run(sys.executable, "-m", "pip", "install", *options, *folders)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTEST_ADDOPTS": ""}
    listed = run(sys.executable, "-m", "mithril", "plugins", env=environment)
    assert [kind for kind in KINDS if f"\nshiny-{kind} " not in listed] == []
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "--import-mode=importlib", "--rootdir", tmp_path]
    assert " passed" in run(*command, *(folder / "tests" for folder in folders), cwd=tmp_path, env=environment)


def test_generated_plugin_is_verified(tmp_path):
    for place, text in render("target", facts("target", "shiny")).items():
        path = tmp_path / "mithril-shiny" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, "-m", "mithril", "plugins", "verify", "mithril-shiny", "--offline"]
    name = "mithril_shiny-0.1.0-py3-none-any.whl"
    assert run(*command, cwd=tmp_path).startswith(f"{name}: kit 1, ")
    assert (tmp_path / "dist" / name).exists()
