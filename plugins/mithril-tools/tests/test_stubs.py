"""Options and names of a plugin need no line outside of the plugin, not even for type checkers."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from mithril import Export, Option, hookimpl, plugins
from mithril_tools.cli.describe import describe
from mithril_tools.known import entry
from mithril_tools.stubs import installed_stub, write_installed_stubs

USE = """
import mithril as ml
ml.compile(None, "numpy", tiling=3)
ml.SoftSGD()
ml.compile(None, "numpy", tiling="x")
ml.ops.softmax(None, axis="x")
"""


@pytest.fixture
def toy():
    """Register a plugin with an option and an optimizer: nothing else is written for them."""
    options = hookimpl(lambda: [Option("tiling", int, 1, "Size of tiles.")])
    exports = hookimpl(lambda: [Export("SoftSGD", "fractions:Fraction")])
    plugins.register(SimpleNamespace(mithril_options=options, mithril_exports=exports), "mithril-toy")
    yield
    plugins.unregister("mithril-toy")


def mypy(folder, text):
    (folder / "use.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(folder / "cache"), "use.py"],
        cwd=folder,
        env={"MYPYPATH": str(folder / "typings")},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_an_option_and_an_optimizer_are_typed_from_their_plugin_alone(toy, tmp_path):
    stub = installed_stub()
    assert "    tiling: int\n" in stub
    assert "SoftSGD = _SoftSGD\n" in stub
    exports = {"SoftSGD": "fractions:Fraction"}
    assert entry("mithril-toy") == {"exports": exports, "options": ["tiling"]}
    printed = CliRunner().invoke(describe, ["mithril-toy", "--json"])
    assert json.loads(printed.stdout) == {"mithril-toy": {"exports": exports, "options": ["tiling"]}}


def test_mypy_takes_the_options_of_a_plugin_from_the_stubs(toy, tmp_path):
    pytest.importorskip("mypy")
    write_installed_stubs(tmp_path / "typings")
    output = mypy(tmp_path, USE)
    option, attribute = (line for line in output.splitlines() if "error:" in line)
    assert option.startswith("use.py:5: error:")
    assert "tiling" in option
    assert attribute.startswith("use.py:6: error:")  # the modules of the core are not hidden
