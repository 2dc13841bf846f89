"""Type checkers find the mistakes in scripts of users, and nothing else; with ``mithril stubs`` as well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mithril.plugins import pip_hints

ROOT = Path(__file__).parents[1]
SCRIPTS = re.split(r"^====.*\n", (Path(__file__).parent / "user_scripts.txt").read_text(), flags=re.M)[1:]
SOURCES = [str(path) for path in (ROOT / "mithril-core/src", *(ROOT / "plugins").glob("*/src"))]
MISTAKES = {
    (f"script_{k}.py", line)
    for k, script in enumerate(SCRIPTS)
    for line, text in enumerate(script.splitlines(), 1)
    if text.endswith("# wrong")
}
# Names of plugins that are not installed here; stubs of installed ones do not have them.
HOMES = {**pip_hints.EXPORTS, **pip_hints.METHODS}
ABSENT = [name for name, home in HOMES.items() if find_spec(home.replace("-", "_")) is None]
NAMES_ABSENT = re.compile(rf"\.(?:{'|'.join(ABSENT) or '$'})\b")
FOUND_AT_LEAST = 0.95  # of the mistakes; without stubs, names and options of other plugins are open


def mypy(folder):
    (folder / "mypy.ini").write_text("[mypy]\n[mypy-mithril*]\nfollow_imports = silent\n")  # as installed ones are
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(folder / "cache"), *names()],
        cwd=folder,
        env={**os.environ, "MYPYPATH": os.pathsep.join([str(folder / "typings"), *SOURCES])},
        capture_output=True,
        text=True,
    )
    return set(re.findall(r"^(script_\d+\.py):(\d+): error:", done.stdout, re.M)), done.stdout + done.stderr


def pyright(folder):
    settings = {"extraPaths": SOURCES, "include": names(), "reportUnusedExpression": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    reports = json.loads(done.stdout)["generalDiagnostics"]
    reported = {
        (Path(r["file"]).name, r["range"]["start"]["line"] + 1)
        for r in reports
        if r["severity"] == "error" and Path(r["file"]).name.startswith("script_")
    }
    return reported, "\n".join(r["message"] for r in reports)


def names():
    return [f"script_{k}.py" for k in range(len(SCRIPTS))]


@pytest.fixture
def scripts(tmp_path):
    for name, script in zip(names(), SCRIPTS, strict=True):
        (tmp_path / name).write_text(script)
    return tmp_path


def test_the_scripts_have_many_mistakes():
    assert len(SCRIPTS) >= 30
    assert len(MISTAKES) >= 60


@pytest.mark.slow
@pytest.mark.parametrize(("checker", "source"), [(mypy, "installed"), (pyright, "installed"), (pyright, "stubs")])
def test_the_checker_finds_the_mistakes_and_nothing_else(checker, source, scripts):
    pytest.importorskip(checker.__name__)  # installed by the task `types`
    if source == "stubs":
        from mithril_tools.stubs import write_installed_stubs

        write_installed_stubs(scripts / "typings")
    lines, output = checker(scripts)
    reported = {(name, int(line)) for name, line in lines}
    if source == "stubs":
        texts = {
            (n, k): text for n, s in zip(names(), SCRIPTS, strict=True) for k, text in enumerate(s.splitlines(), 1)
        }
        reported -= {place for place, text in texts.items() if NAMES_ABSENT.search(text)} - MISTAKES
        output = "\n".join(text for text in output.splitlines() if not NAMES_ABSENT.search(text))
    assert reported <= MISTAKES, f"reported without a mistake: {sorted(reported - MISTAKES)}\n{output}"
    assert not re.findall(r'.*(?:Revealed type is|" is) "(?:Any|Unknown)"', output)
    assert len(reported) >= FOUND_AT_LEAST * len(MISTAKES), f"not found: {sorted(MISTAKES - reported)}"
