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


PARTIAL = """
from mithril_numpy.backend import NumpyBackend
from mithril_testing import BackendConformance

table = NumpyBackend.tables["portable"].extend()
for name in table.ops - {"exp", "tanh", "neg", "add", "mul", "div"}:
    del table._rows[name]
table.row("pad", "np.pad({x}, {widths}, mode='constant', constant_values={value})", when=CONDITION)


class Partial(NumpyBackend):
    name = "partial"
    tables = {"portable": table}


class TestPartial(BackendConformance):
    backend = Partial
    SETTINGS
"""


def run_partial(
    folder, settings, condition="lambda node: node.attributes['mode'] == 'constant'", tests="forward or twice"
):
    """Run tests of the kit on a backend with some rows, one of them with a condition; return the output of pytest."""
    (folder / "test_run.py").write_text(PARTIAL.replace("SETTINGS", settings).replace("CONDITION", condition))
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k", tests, "test_run.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_calls_that_a_condition_excludes_are_skipped_and_counted(tmp_path):
    output = run_partial(tmp_path, "ops = tuple(sorted(table.ops))")
    assert " failed" not in output, output
    assert "the conditions of the lowerings exclude this call of: pad" in output
    assert " skipped by conditions of lowerings" in output


def test_condition_that_excludes_every_call_is_a_failure(tmp_path):
    output = run_partial(tmp_path, "ops = ('pad',)", condition="lambda node: False")
    assert " failed" in output
    assert "skipped" not in output


def test_composites_that_the_rows_cover_are_selected(tmp_path):
    output = run_partial(tmp_path, "complete = False")
    assert " failed" not in output, output
    assert " by their bodies)" in output, output
    assert "also needs rows for: " in output


def test_references_count_with_host_only(tmp_path):
    assert " failed" in run_partial(tmp_path, "ops = ('argmax', 'exp', 'softmax')")
    output = run_partial(tmp_path, "ops, host = ('argmax', 'exp', 'softmax'), True")
    assert " failed" not in output, output
    assert "checked 3 of 3 operations" in output
