"""``mithril new-plugin``: the code of every kind is typed, and so are the signatures of lowerings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules

import pytest

import mithril
from mithril_tools.cli.new_plugin import KINDS, facts, render
from mithril_tools.generate import stubs
from mithril_tools.stubs import face_stub

pytest.importorskip("mypy")  # installed by the task `types`
SIGNATURES = """
from typing import Any

from mithril import Node
from mithril.backend import ArrayKernel, Call, Condition, TextWriter


def kernel(x: int, *, axis: int) -> int:
    return x


def writer(call: Call) -> str:
    return f"np.tanh({call.x})"


def condition(node: Node) -> bool:
    return node.result.dtype.is_float


good: tuple[ArrayKernel, TextWriter, Condition] = (kernel, writer, condition)
bad_1: TextWriter = condition
bad_2: Condition = writer
bad_3: ArrayKernel = 3
"""


USE = """
import mithril as ml
ml.compile(None, "numpy", option_of_a_plugin=3)
ml.NameOfAPlugin()
ml.compile(None, "numpy", strict="x")
"""


def test_the_stub_of_the_core_checks_its_options_and_leaves_those_of_plugins_open(tmp_path):
    core = tmp_path / "typings" / "mithril"
    core.mkdir(parents=True)
    (core / "__init__.pyi").write_text(face_stub())
    (tmp_path / "use.py").write_text(USE)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "use.py"]
    environment = {**os.environ, "MYPYPATH": str(tmp_path / "typings")}
    output = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
    (line,) = (line for line in output.splitlines() if "error:" in line)
    assert line.startswith('use.py:5: error: Argument "strict" to "compile" has incompatible type "str"')


def test_each_package_has_a_stub():
    packages = {package.name for package in iter_modules(mithril.__path__) if package.ispkg}
    assert {path.parent.name for path in stubs(Path(mithril.__file__).parent)} == {"mithril", "layers", *packages}


def test_generated_code_is_typed_and_wrong_signatures_are_found(tmp_path):
    arguments = ["-m", "signatures"]
    for kind in KINDS:
        words = facts(kind, f"shiny-{kind}")
        for place, text in render(kind, words).items():
            file = tmp_path / kind / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        arguments += ["-p", words["package"]]
    (tmp_path / "signatures.py").write_text(SIGNATURES)
    environment = {**os.environ, "MYPYPATH": os.pathsep.join([str(p) for p in tmp_path.glob("*/src")] + ["."])}
    command = [sys.executable, "-m", "mypy", "--strict", *arguments]
    output = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
    first = SIGNATURES.splitlines().index("bad_1: TextWriter = condition") + 1
    assert output.count(": error:") == 3, output
    assert all(f"signatures.py:{line}: error: Incompatible types" in output for line in range(first, first + 3))
