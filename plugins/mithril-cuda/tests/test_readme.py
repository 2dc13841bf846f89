"""The README's Python block runs as it stands, without a GPU."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_block_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.S | re.M)
    exec(compile(block, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "__global__" in printed
    assert "exact: one planned arena" in printed
    assert ".target sm_80" in (tmp_path / "model.ptx").read_text()
