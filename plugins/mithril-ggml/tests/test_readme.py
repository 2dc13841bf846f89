"""The README's Python blocks run as they stand."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.S | re.M)
    space = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), space)
    printed = capsys.readouterr().out
    assert "256x4096" in printed and "590 kB" in printed
    assert (tmp_path / "model.gguf").exists()
