"""The last line of a run of the kit says how the backend runs the operations."""

from __future__ import annotations

import subprocess
import sys

RUN = """
from mithril_testing import BackendConformance


class TestNumpy(BackendConformance):
    backend = "numpy"
    ops = ("tanh", "exp", "silu")
"""


def test_lowered_and_decomposed_operations_are_counted(tmp_path):
    (tmp_path / "test_run.py").write_text(RUN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_run.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "TestNumpy: checked" in done.stdout, done.stdout
    assert "checked 3 of 3 operations (2 lowered, 1 by their bodies), " in done.stdout
