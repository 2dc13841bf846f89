"""``mithril new-plugin``: the files of every kind are whole, clean and named without clashes."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner

from mithril.graph import registry
from mithril.plugins.loader import HOOKS
from mithril_tools import cli
from mithril_tools.cli.new_plugin import KINDS, facts, render


def generate(folder, kind, name, code=0):
    result = CliRunner().invoke(cli.main, ["new-plugin", kind, name, "--into", str(folder)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a", "import", "x1-y2-z3"])
def test_every_file_is_whole_and_valid(kind, name):
    files = render(kind, facts(kind, name))
    package = f"mithril_{name.replace('-', '_')}"
    assert {"pyproject.toml", "README.md", f"src/{package}/plugin.py", f"src/{package}/py.typed"} <= set(files)
    for place, text in files.items():
        assert "{{" not in text
        assert "{%" not in text
        assert text == "" or text.endswith("\n"), place
        if place.endswith(".py"):
            assert ast.get_docstring(ast.parse(text)), place
            assert max(map(len, text.splitlines())) <= 120, place
    assert tomllib.loads(files["pyproject.toml"])["project"]["entry-points"]["mithril"] == {name: f"{package}.plugin"}
    defined = {n.name for n in ast.parse(files[f"src/{package}/plugin.py"]).body if isinstance(n, ast.FunctionDef)}
    assert defined & set(HOOKS)


def test_workflows_test_the_lowest_and_latest_versions_and_sign_releases():
    files = render("op", facts("op", "shiny"))
    tests = files[".github/workflows/tests.yml"]
    jobs = [
        line.strip().partition(":")[0] for line in tests.partition("jobs:\n")[2].splitlines() if line[2:3].isalpha()
    ]
    assert jobs == ["latest", "lowest", "nightly"]
    assert "--resolution lowest-direct" in tests and "--prerelease allow" in tests and "cron" in tests
    release = files[".github/workflows/release.yml"]
    assert "attest-build-provenance" in release
    for workflow in (tests, release):  # no step pushes, so none needs the token
        refusal = r"actions/checkout@.*\n        with:\n          persist-credentials: false\n"
        assert workflow.count("actions/checkout@") == len(re.findall(refusal, workflow)) > 0
        assert len(re.findall("uses: ", workflow)) == len(re.findall("uses: .*@[0-9a-f]{40} # v", workflow))


def test_generated_code_is_clean(tmp_path):
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    for kind in KINDS:
        generate(tmp_path, kind, f"shiny-{kind}")
    own_code = "src = ['*/src']"  # for the order of imports
    for arguments in (["check", "--select", "E,F,I,B,UP,W", "--config", own_code], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--line-length", "120", "."]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["Shiny", "two words", "1st", "a--b", "-a", "ä"])
def test_names_that_would_not_install(name, tmp_path):
    assert "lower-case letters and digits" in generate(tmp_path, "pass", name, code=2) or name == "-a"
    assert not list(tmp_path.iterdir())


def test_prefix_is_not_doubled(tmp_path):
    generate(tmp_path, "target", "mithril-board")
    assert [path.name for path in tmp_path.iterdir()] == ["mithril-board"]


def test_nothing_is_overwritten(tmp_path):
    generate(tmp_path, "target", "board")
    assert "exists already" in generate(tmp_path, "target", "board", code=1)


def test_operations_that_exist_are_not_declared_again(tmp_path, monkeypatch):
    monkeypatch.setitem(registry._operations, "acme.soft_clip", registry.operation("tanh"))
    assert "there is an operation 'acme.soft_clip' already" in generate(tmp_path, "op", "acme", code=2)


def test_operations_of_third_parties_have_names_of_their_own(tmp_path):
    generate(tmp_path, "op", "tanh")
    text = (tmp_path / "mithril-tanh" / "src" / "mithril_tanh" / "ops.py").read_text()
    assert 'name="tanh.soft_clip"' in text


def test_unknown_kind(tmp_path):
    assert "Invalid value" in generate(tmp_path, "frob", "board", code=2)
