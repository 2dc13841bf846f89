"""The README's blocks, run in sequence: Python here, C by gcc."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mithril_cbackend.schedule import tuning

TEXT = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_its_python_and_c_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "SMALL", 1 << 60)  # measuring schedules is tested elsewhere
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "static void run(const struct arrays *self)" in printed
    assert "int8 weights change the results by" in printed
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    (tmp_path / "digits" / "main.c").write_text(blocks("c")[0])
    sources = ["main.c", "digits.c", "digits_weights.c"]
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fwrapv", "-O1", "-march=native"]
    subprocess.run(["gcc", *flags, *sources, "-o", "main", "-lm"], cwd=tmp_path / "digits", check=True)
    subprocess.run([tmp_path / "digits" / "main"], check=True)


def test_its_table_has_every_option():
    from mithril_cbackend.plugin import mithril_options

    for option in mithril_options():
        for key in (option.name, *option.keys):
            assert f"`{key}`" in TEXT
