"""The reference pages say what the code says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("render", DOCS / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_hooks_equals_the_code(render):
    _, text, expected = render.page("plugins.md")
    assert text == expected, "run: python docs/render.py"


def test_page_of_versions_equals_its_records(render):
    _, text, expected = render.page("versions.md")
    assert text == expected, "run: python docs/render.py"


def test_admitted_versions_pass_the_kit_and_others_fail(render):
    records = json.loads((DOCS / "versions.json").read_text())
    declared = {requirement.name: requirement.specifier for requirement in render.requirements()}
    for name, versions in records.items():
        for version, counts in versions.items():
            passes = "error" not in counts and counts.get("failed", 0) == counts.get("repaired", 0)
            assert (version in declared[name]) == passes, f"{name} {version}: {counts}, declared {declared[name]}"


@pytest.mark.parametrize("name", ["cli.md", "options.md"])
def test_page_has_the_rows_of_every_installed_owner(render, name):
    _, text, expected = render.page(name)
    missing = [line for line in expected.splitlines() if line not in text.splitlines()]
    assert not missing, "run: python docs/render.py"


def test_every_hook_has_its_heading_and_signature(render):
    from mithril.plugins.loader import HOOKS

    text = (DOCS / "plugins.md").read_text()
    for hook in HOOKS:
        assert text.count(f"## `{hook}`\n\n```python\ndef {hook}(") == 1
