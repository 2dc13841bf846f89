"""Each ``pip install`` line of the README, the guides and the READMEs of distributions works in an empty environment.

pip resolves the lines as they are written. The index is a folder of wheels without code, one for each third-party
requirement and, for lines that name distributions, one for each distribution of this project.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = [ROOT / "mithril-core", *sorted((ROOT / "plugins").glob("mithril-*"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
PAGES += [path / "README.md" for path in DISTRIBUTIONS]
PINS = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def lines() -> list[str]:
    """Return the arguments of all ``pip install`` lines, without those with gaps to fill in."""
    texts = (match for page in PAGES for match in re.findall(r"pip install ([^`\n]+)", page.read_text()))
    arguments = {re.split(r" && |;|\s+#", text)[0].strip() for text in texts}
    return sorted(
        line
        for line in arguments
        if "<" not in line and "..." not in line and "--no-binary" not in line and line != "-e"
    )


def commands() -> list[str]:
    """Return the lines, those without folders as one: pip resolves each of them if it resolves all.

    Lines with folders are separate, as one of them could hold the distribution that another one lacks.
    """
    without_folders = [line for line in lines() if "/" not in line]
    words = dict.fromkeys(word for line in without_folders for word in shlex.split(line))
    return [shlex.join(words), *(line for line in lines() if "/" in line)]


def test_lines_are_found():
    assert any("./plugins/mithril-train" in line for line in lines())
    assert "./mithril-core ./plugins/mithril-jax" in lines()
    assert "mithril-serve" in commands()[0].split()


@cache
def projects() -> dict[str, dict[str, object]]:
    return {path.name: tomllib.loads((path / "pyproject.toml").read_text())["project"] for path in DISTRIBUTIONS}


def write_wheel(folder: Path, name: str, version: str, requires=(), extras=()) -> None:
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    head += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {line}" for line in requires]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(head) + "\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Write the wheels; return the folder of third parties and that of this project."""
    other_wheels, project_wheels = tmp_path_factory.mktemp("other_wheels"), tmp_path_factory.mktemp("project_wheels")
    required = {"tox", "nox", "ruff", "mypy", "import-linter", "gradio", "netron", "ziglang"}
    for name, project in projects().items():
        extras = project.get("optional-dependencies", {})
        requires = [*project["dependencies"]]
        requires += [f'{line}; extra == "{extra}"' for extra, listed in extras.items() for line in listed]
        required |= {line for line in requires if not line.startswith("mithril-")}
        write_wheel(project_wheels, name, "0.1.0", requires, extras)
    for line in sorted(required):
        name = re.match(r"[\w.-]+", line)[0]
        floor = re.search(r"[>=]=([\w.]+)", line)
        write_wheel(other_wheels, name, PINS.get(name, floor[1] if floor else "1.0"))
    return other_wheels, project_wheels


def _wheel(folder: Path, path: str) -> str:
    """Return the wheel of a distribution's folder, with the extras of the path."""
    name, bracket, extras = (ROOT / path).name.partition("[")
    assert name in projects(), path
    return f"{next(folder.glob(name.replace('-', '_') + '-*'))}{bracket}{extras}"


@pytest.mark.parametrize("line", commands())
def test_install_line(index, line, tmp_path):
    other_wheels, project_wheels = index
    words = shlex.split(line)
    # Wheels replace folders, whose metadata pip would build in half of the time of this file; the environments of tox
    # build all distributions. With -e a folder may be named without ./, as the core's is.
    is_folder = {word: "/" in word or ("-e" in words and (ROOT / word).is_dir()) for word in words}
    arguments = [_wheel(project_wheels, word) if is_folder[word] else word for word in words if word != "-e"]
    folders = [other_wheels] if any(is_folder.values()) else [other_wheels, project_wheels]
    links = [word for folder in folders for word in ("--find-links", str(folder))]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-index"]
    done = subprocess.run(
        [*command, "--no-build-isolation", *links, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        | {"PIP_CONFIG_FILE": os.devnull},
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    assert "Would install" in done.stdout
