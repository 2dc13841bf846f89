"""``cache=True`` and a plugin that is edited without a new version: its code is part of the key."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PLUGIN = """
from mithril import PassSpec
def mithril_passes(): return [PassSpec('acme-swap', 'LOADS', 'final', 'low')]
"""
PASS = """
from mithril import ops
def swap(graph):
    editor = graph.edit()
    for node in editor.nodes():
        if node.op is ops.exp:
            with editor.before(node):
                editor.replace_value(node.result, FUNCTION(node.operands[0]))
            editor.erase_dead(node)
    return editor.freeze()
"""
HELPER = "from mithril import ops\ndef chosen(x): return FUNCTION(x)\n"
RUN = """
import json, sys
import numpy as np
import mithril as ml
from mithril.models import Exp, Model
model = Model()
model |= Exp()(input="x", output="y")
compiled = ml.compile(model, "numpy", shapes={"x": [1]}, cache=True, cache_dir=sys.argv[1])
print(json.dumps(compiled.evaluate({}, {"x": np.float32([-1.0])})["y"].tolist()))
"""
# Where the code is: the module of the entry point, the function of the pass, and the files of the distribution.
LAYOUTS = {
    "one file": ("mithril_acme", "mithril_acme:swap", {"mithril_acme.py": PLUGIN + PASS}),
    "package": ("acme.plugin", "acme.code:swap", {"acme/plugin.py": PLUGIN, "acme/code.py": PASS}),
    "two packages": ("acme", "acme_passes.code:swap", {"acme.py": PLUGIN, "acme_passes/code.py": PASS}),
    "helper": (
        "acme",
        "acme:swap",
        {"acme.py": PLUGIN + "from elsewhere.code import chosen\n" + PASS.replace("FUNCTION", "chosen"),
         "elsewhere/code.py": HELPER},
    ),
    "helper module": (
        "mithril_acme",
        "mithril_acme:swap",
        {"mithril_acme.py": PLUGIN + "import elsewhere\n" + PASS.replace("FUNCTION", "elsewhere.chosen"),
         "elsewhere.py": HELPER},
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edit_of_a_pass_is_compiled_again(tmp_path, monkeypatch, layout):
    entry, loads, modules = LAYOUTS[layout]
    site = tmp_path / "site"
    info = site / "acme_kit-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kit\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mithril]\nacme = {entry}\n")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)

    def run(function):
        for path, text in modules.items():
            (site / path).parent.mkdir(exist_ok=True)
            (site / path).write_text(text.replace("LOADS", loads).replace("FUNCTION", function))
        command = [sys.executable, "-W", "ignore", "-c", RUN, str(tmp_path / "cache")]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[0]

    assert run("ops.tanh") == pytest.approx(-0.7615942)
    assert run("ops.abs") == 1.0
    assert run("ops.tanh") == pytest.approx(-0.7615942)
