"""The example and the page about the utilities run."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]
EXAMPLE = PROJECT / "examples" / "optimize_workflow.py"
PAGE = PROJECT / "docs" / "mlx-utilities.md"


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("MITHRIL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["optimize_workflow.py", "--rows", "150"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert "Optimization plan ready" in out and "Scores (150, 10)" in out and "% hits" in out


def test_the_blocks_of_the_page_run(capsys):
    text, space = PAGE.read_text(), {"__name__": "page"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M))
    assert len(blocks) > 15
    for match in blocks:
        line = text[: match.start()].count("\n") + 1
        exec(compile("\n" * line + match[1], str(PAGE), "exec"), space)
    assert "differ by" in capsys.readouterr().out
