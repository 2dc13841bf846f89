"""The README's Python block runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_block_runs(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.S | re.M)
    exec(compile(block, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "(8, 3)" in printed and "@compute" in printed
