"""The README's Python block, and the blocks of the guide, run as they stand."""

import re
from pathlib import Path

import pytest
from small_servers import collect

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", ["plugins/mithril-serve/README.md", "docs/serving.md"])
def test_the_blocks_run(page, capsys):
    space = {}
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M):
        exec(compile(block, page, "exec"), space)
    space.clear()
    collect()
    assert "[1, 3]" in capsys.readouterr().out or page.startswith("docs")
