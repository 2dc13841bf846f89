"""The README's test command is what ``.ci/run`` executes, after it has installed drivers of devices."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_ci_runs_exactly_the_readmes_test_command():
    script = (PROJECT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in script if line and not line.startswith("#")]
    assert commands[:2] == ["set -e", 'cd "$(dirname "$0")/.."']
    *drivers, command = commands[2:]
    assert not [line for line in drivers if "pip" in line or "tox" in line or "pytest" in line]
    assert f"\n```\n{command}\n```\n" in (PROJECT / "README.md").read_text()
    assert command.endswith(".venv/bin/tox -p 2")
