"""The guides: pages that are written by hand. The wheel holds them; a checkout reads its folder ``docs``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mithril_tools.reference.page import Page


def folder() -> Path:
    """Return the folder of the guides."""
    bundled = Path(__file__).parents[1] / "guides"
    return bundled if bundled.is_dir() else Path(__file__).parents[5] / "docs"


def guide_pages() -> Iterator[Page]:
    """Yield the guides in alphabetical order."""
    for path in sorted(folder().glob("*.md")):
        title, _, text = path.read_text(encoding="utf-8").partition("\n")
        yield Page("guide", path.stem, title.lstrip("# "), text.strip)


@cache
def read(name: str) -> str:
    """Return the text of a guide."""
    return (folder() / name).read_text(encoding="utf-8")


def semantics_of(operation: str) -> list[tuple[str, str]]:
    """Return the rows of the page on semantics that name an operation."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", read("semantics.md"), re.M)
    return [(a, b) for a, b in rows if re.search(rf"`{re.escape(operation)}(\(.*?\))?`", a)]


def mistakes() -> list[tuple[str, str, str]]:
    """Return the mistakes of the page on errors: class of the error, code, complete text."""
    blocks = re.findall(r"```python\n((?:(?!```).)*)```\n\n```text\n(\w+): (.*?)\n```", read("errors.md"), re.S)
    return [(error, code, text) for code, error, text in blocks]
