"""Readers of all formats over hostile files, in a process with limits: nothing runs, nothing outside is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

for name in ("torch", "onnx", "h5py", "jax", "tensorstore", "tokenizers", "jinja2"):
    pytest.importorskip(name)


def test_readers_of_all_formats(tmp_path):
    script = Path(__file__).with_name("hostile_readers.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    lines = result.stdout.splitlines()
    assert not [line for line in lines if line.startswith("PROBLEM")]
    assert lines[-1:] == ["complete"], result.stderr[-2000:]
    assert sum(line.startswith("fine") for line in lines) > 80
    assert not list(tmp_path.glob("hostile_mark*"))
