"""The README's Python blocks run as they stand."""

import re
from pathlib import Path

import pytest

from mithril_webgpu.web import webassembly

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(webassembly.ZIG.compiler() is None, reason="not installed: ziglang")
def test_the_blocks_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {}
    for block in re.findall(r"^```python\n(.*?)^```", README.read_text(), re.S | re.M):
        exec(compile(block, str(README), "exec"), space)
    printed = capsys.readouterr().out
    assert "(8, 3)" in printed and "@compute" in printed and "model.wasm" in printed
