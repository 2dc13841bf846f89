"""``nox -s mutants`` finds the changes of a file that no test notices, and leaves the file unchanged."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "mutants.py"
SOURCE = '''"""A file with one line that no test reaches."""
SIDES = dict(zip("lr", ("left", "right"), strict=True))


def clipped(x: int, log: list[int]) -> int:
    if x > 10:
        log.append(x)
        raise ValueError(x)
    return x


def never_called(x: int) -> int:
    return x + 1


def endless(n: int) -> None:
    while n > 0:
        n -= 1
'''
TEST = """import pytest
from planted.inner.thing import clipped, endless

def test_clipped():
    assert clipped(10, []) == 10
    endless(3)
    with pytest.raises(ValueError, match="11"):
        clipped(11, [])
"""


def planted(folder: Path) -> Path:
    file = folder / "src/planted/inner/thing.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    mirror = folder / "tests/inner/test_thing_by_name.py"
    mirror.parent.mkdir(parents=True)
    mirror.write_text(TEST)
    return file


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True)


def test_lists_unnoticed_changes(tmp_path):
    file = planted(tmp_path)
    result = run(file, "--verbose")
    lines = {line.partition(f"{file}:")[2] for line in result.stdout.splitlines()}
    assert {
        "6: killed: x > 10 -> (x >= 10)",
        "6: killed: 10 -> (10 + 1)",
        "7: survived: log.append(x) -> removed",
        "8: killed: raise ValueError(x) -> removed",
        "13: survived: x + 1 -> (x - 1)",
        "18: time: n -= 1 -> removed",
    } <= lines, result.stdout + result.stderr
    assert not any("True -> False" in line for line in lines)  # `strict` asserts
    assert result.returncode == 1
    assert file.read_text() == SOURCE
    assert not list(tmp_path.rglob("__pycache__/thing*"))


def test_a_sample_is_drawn_by_its_seed(tmp_path):
    file = planted(tmp_path)
    first, again = (run(file, "--verbose", "--sample", 3, "--seed", 1).stdout.splitlines() for _ in range(2))
    changes = [line for line in first if line.startswith(f"{file}:")]
    assert len(changes) == 3 + 1
    assert "3 of 1" in changes[-1]
    assert changes == [line for line in again if line.startswith(f"{file}:")]


def test_needs_tests_that_pass(tmp_path):
    file = planted(tmp_path)
    mirror = next(tmp_path.rglob("test_thing*"))
    mirror.write_text("def test_fails():\n    assert False\n")
    assert "fail without a change" in run(file).stderr
    mirror.unlink()
    assert f"no test mirrors {file}" in run(file).stderr
