"""``mithril plugins verify``: the faults that it names, and the summary in the wheel."""

from __future__ import annotations

import csv
import io
import json
import sys
import zipfile
from pathlib import Path

import pytest

from mithril import InputError
from mithril_tools.cli.verify import (
    SUMMARY,
    _doctor,
    _is_covered,
    _is_library,
    examine,
    faults_of,
    requirement,
    summary_of,
    text_of,
    with_summary,
)

INFO = "mithril_shiny-0.1.0.dist-info"
METADATA = """Metadata-Version: 2.4
Name: mithril-shiny
Version: 0.1.0
License-File: LICENSE
Requires-Python: >=3.11
Requires-Dist: mithril-core>=0.1
Description-Content-Type: text/markdown

# mithril-shiny
"""
GOOD = {
    "mithril_shiny/plugin.py": "",
    "mithril_shiny/py.typed": "",
    f"{INFO}/METADATA": METADATA,
    f"{INFO}/entry_points.txt": "[console_scripts]\na = b:c\n\n[mithril]\nshiny = mithril_shiny.plugin\n",
    f"{INFO}/RECORD": f"{INFO}/RECORD,,\n",
}
BAD = {
    "no entry point": (
        {f"{INFO}/entry_points.txt": "[other]\na = b\n"},
        "no entry point in the group mithril; a library declares `library = true` in [tool.mithril]",
    ),
    "module": (
        {"mithril_shiny/plugin.py": None},
        "the module mithril_shiny.plugin of the entry point is not in the wheel",
    ),
    "core": (
        {f"{INFO}/METADATA": METADATA.replace("mithril-core>=0.1", "numpy")},
        "no requirement of mithril-core",
    ),
    "pin": (
        {f"{INFO}/METADATA": METADATA.replace(">=0.1", "==0.1.0")},
        "the requirement mithril-core==0.1.0 has no lower bound, or admits one version only",
    ),
    "license": ({f"{INFO}/METADATA": METADATA.replace("License-File", "Keywords")}, "no License-File"),
    "types": ({"mithril_shiny/py.typed": None}, "no py.typed"),
    "tests": ({"tests/test_shiny.py": ""}, "a top-level package tests"),
}


def wheel(folder, changes):
    path = folder / "mithril_shiny-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**GOOD, **changes}.items():
            if text is not None:
                archive.writestr(name, text)
    return path


@pytest.mark.parametrize("name", BAD)
def test_faults_of_a_wheel_are_named(tmp_path, name):
    assert list(faults_of(wheel(tmp_path, {}))) == []
    changes, expected = BAD[name]
    assert list(faults_of(wheel(tmp_path, changes))) == [expected]


def test_libraries_have_no_entry_point(tmp_path):
    plugin, library = {}, {f"{INFO}/entry_points.txt": None}
    assert not _is_library(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.mithril]\nlibrary = true\n")
    assert _is_library(tmp_path)
    assert list(faults_of(wheel(tmp_path, library), is_library=True)) == []
    expected = "an entry point in the group mithril, but [tool.mithril] declares a library"
    assert list(faults_of(wheel(tmp_path, plugin), is_library=True)) == [expected]


def test_requirements_of_tests_are_installed(tmp_path):
    path = wheel(tmp_path, {})
    assert requirement(path) == str(path)
    with_extra = METADATA.replace("\n\n", "\nProvides-Extra: test\n\n", 1)
    assert requirement(wheel(tmp_path, {f"{INFO}/METADATA": with_extra})) == f"{path}[test]"


def test_wheel_states_the_summary_and_is_the_same_twice(tmp_path):
    original = wheel(tmp_path, {}).read_bytes()
    summary = {"kit": 1, "passed": 726, "failed": 0, "partial": 14}
    content = with_summary(original, summary)
    assert content == with_summary(original, summary)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert json.loads(archive.read(f"{INFO}/{SUMMARY}")) == summary
        rows = list(csv.reader(archive.read(f"{INFO}/RECORD").decode().splitlines()))
    assert [row[0] for row in rows] == [f"{INFO}/{SUMMARY}", f"{INFO}/RECORD"]
    assert text_of(summary) == "kit 1, 726 of 740, 14 declared partial"


def test_plugins_show_what_a_distribution_states(tmp_path, monkeypatch):
    folder = tmp_path / INFO
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(tmp_path)
    for text, expected in {
        '{"kit": 1, "passed": 92, "failed": 0, "partial": 0}': "kit 1, 92 of 92",
        '{"kit": 1, "passed": 0, "failed": 0, "partial": 0}': "kit 1, which has no cases for these parts",
        "{}": "",
        "damaged": "",
        '{"kit": 1}': "",
    }.items():
        (folder / SUMMARY).write_text(text)
        assert summary_of("mithril-shiny") == expected
    assert summary_of("mithril-nobody") == ""


def test_a_build_that_fails_is_an_error_with_its_cause(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "broken"\nbackend-path = ["."]\n'
    )
    (tmp_path / "broken.py").write_text("def build_wheel(*given):\n    raise ValueError('invalid version `one`')\n")
    with pytest.raises(InputError) as caught:
        examine(tmp_path, tmp_path, offline=True)
    assert str(caught.value) == (
        f"the wheel of {tmp_path} cannot be built\n  ValueError: invalid version `one`\n"
        f"hint: correct pyproject.toml; `pip wheel --no-deps --no-build-isolation {tmp_path}` shows all of its output"
    )


def test_a_wheel_without_a_plugin_that_loads_is_a_fault(tmp_path):
    assert list(_doctor(Path(sys.executable), wheel(tmp_path, {}))) == ["mithril finds no plugin of mithril-shiny"]


@pytest.mark.parametrize(("name", "covered"), [("mithril_numpy", True), ("mithril_tools", False)])
def test_kit_is_expected_of_plugins_that_it_covers(name, covered):
    assert _is_covered(Path(sys.executable), Path(f"{name}-0.1.0-py3-none-any.whl")) == covered
