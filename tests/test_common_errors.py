"""The page of common errors shows the complete texts that these mistakes raise."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def load():
    spec = importlib.util.spec_from_file_location("common_errors", DOCS / "common_errors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = load()
TEXT = page.PAGE.read_text()
PRELUDE = page.BLOCK.search(TEXT)[1]
MISTAKES = list(page.blocks(TEXT))


@pytest.mark.parametrize(("code", "expected"), MISTAKES, ids=[code.splitlines()[-1][:60] for code, _ in MISTAKES])
def test_error_text_is_complete(code, expected):
    assert page.error_of(PRELUDE, code) == expected.rstrip("\n")


def test_page_covers_a_hundred_errors():
    assert len(MISTAKES) >= 100 and all(expected.strip() != "no error" for _, expected in MISTAKES)
