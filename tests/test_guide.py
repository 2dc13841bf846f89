"""Every Python block of the guide runs, top to bottom, in an empty folder; tutorials show what theirs print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TUTORIALS = sorted(f"tutorials/{p.name}" for p in DOCS.glob("tutorials/*.md"))
PAGES = ["../README.md", *sorted(p.name for p in DOCS.glob("*.md") if "Every block" in p.read_text()), *TUTORIALS]


def test_there_are_pages():
    assert {"compiling.md", "optimizing.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MITHRIL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    text = (DOCS / page).read_text()
    space = {"__name__": "guide"}
    capsys.readouterr()
    for match in re.finditer(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", text, re.S | re.M):
        line = text[: match.start()].count("\n") + 1
        code = compile("\n" * line + match[1], str(DOCS / page), "exec", dont_inherit=True)
        exec(code, space)
        printed = capsys.readouterr().out
        if page in TUTORIALS:
            assert printed == (match[2] or ""), f"printed by the block at line {line}"
