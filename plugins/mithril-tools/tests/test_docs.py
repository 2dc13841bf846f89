"""The reference pages say what the code says."""

from __future__ import annotations

import importlib.util
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
