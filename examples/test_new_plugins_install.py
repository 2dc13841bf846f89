"""Generated plugins: ``mithril new-plugin`` output builds, installs by pip, is found, and passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mithril_tools.cli.new_plugin import KINDS


def run(*command, **settings):
    done = subprocess.run(list(map(str, command)), check=False, text=True, capture_output=True, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_installs_and_passes(kind, tmp_path):
    site = tmp_path / "site"
    run(sys.executable, "-m", "mithril", "new-plugin", kind, "shiny-thing", "--into", tmp_path)
    folder = tmp_path / "mithril-shiny-thing"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, folder)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTEST_ADDOPTS": ""}
    listed = run(sys.executable, "-m", "mithril", "plugins", env=environment)
    assert "shiny-thing" in listed
    assert " passed" in run(sys.executable, "-m", "pytest", "-q", cwd=folder, env=environment)
