"""The README's Python block runs as it stands."""

import re
from pathlib import Path


def test_the_block_runs(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    exec(re.search(r"^```python\n(.*?)^```", text, re.S | re.M)[1], {})
    assert "(8, 3)" in capsys.readouterr().out
