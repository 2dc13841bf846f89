"""``mithril doctor --plugins`` and ``--json``: plugins that hang, crash, print, or change the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mithril import plugins
from mithril.plugins import Plugin
from mithril_tools.cli.plugin_health import examine

FINE = "from mithril import Export\ndef mithril_exports(): return [Export('Acme', 'acme_code:Acme')]\n"
ON_IMPORT = {
    "import numpy as np; np.seterr(divide='ignore')": "numpy.geterr(): divide is 'ignore', was 'warn'",
    "import warnings; warnings.simplefilter('ignore')": "warnings.filters: ('ignore', None, ",
    "import mithril.graph as m; m.verify = lambda graph: None": "mithril.graph.verify is replaced by '<lambda>' of ",
    "from mithril.graph import Graph; Graph.edit = print": "mithril.graph.core.Graph.edit is replaced by <built-in",
    "import builtins; builtins.sum = max": "builtins.sum is replaced by <built-in function max>",
    "import os; os.environ['ACME'] = '1'": "os.environ: ACME is '1', was 'absent'",
}
WHEN_USED = {
    "import numpy as np; np.seterr(under='raise')": "numpy.geterr(): under is 'raise', was 'ignore'",
    "def exp(x): pass\nnp.exp = exp": "numpy.exp is replaced by 'exp' of ",
    "import random; random.seed(0)": "random is changed",
}
STOPPED = {
    "clean": ("", "clean", ""),
    "prints": ("import os; os.system('echo spoiled')", "changes global state", "prints 1 lines to stdout"),
    "crashes": ("import os; os._exit(7)", "broken", "exit status 7"),
    "raises": ("raise RuntimeError('boom')", "broken", "RuntimeError: boom"),
    "needs another API": ("api_version = 99", "broken", "requires the plugin API 99"),
    "lowers": ("def mithril_lowerings(backend): 1 / 0", "broken", "ZeroDivisionError"),
    "hangs": ("import time; time.sleep(60)", "hangs", "stopped after 2 seconds: set MITHRIL_DISABLE_PLUGINS=acme"),
}


OTHERS = (p.name for p in plugins.found() if p.name not in ("acme", "tools"))
ONLY_ACME = {"MITHRIL_DISABLE_PLUGINS": ",".join(OTHERS)}


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Install a distribution ``acme-kit 1.0`` for processes that are started by the test."""

    def install(plugin, code):
        (tmp_path / "acme_plugin.py").write_text(FINE + plugin)
        (tmp_path / "acme_code.py").write_text(code + "\nAcme = 1\n")
        info = tmp_path / "acme_kit-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kit\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[mithril]\nacme = acme_plugin\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        return Plugin("acme", "acme-kit", "1.0", "acme_plugin")

    return install


def test_changes_of_the_process_are_found(acme):
    row = examine(acme("\n".join(ON_IMPORT), "\n".join(WHEN_USED)))
    assert row["state"] == "changes global state"
    assert row["distribution"] == "acme-kit 1.0"
    moments = {"on import": ON_IMPORT, "when used": WHEN_USED}
    expected = [f"{moment}: {change}" for moment, changes in moments.items() for change in changes.values()]
    assert [start for start in expected if not any(line.startswith(start) for line in row["changes"])] == []


@pytest.mark.parametrize("fault", STOPPED)
def test_plugins_that_print_crash_or_hang(acme, fault):
    code, state, change = STOPPED[fault]
    row = examine(acme(code, "class Acme: pass"), hang=2.0 if fault == "hangs" else 30.0)
    assert row["state"] == state
    assert change in "; ".join(row["changes"])
    assert row["changes"] or fault == "clean"


def test_private_imports_are_faults(acme):
    row = examine(acme("", "from mithril.graph.core import Graph\nclass Acme: pass"))
    assert row["state"] == "broken"
    assert "acme_code.py:1: mithril.graph.core.Graph" in row["changes"][0]


def test_exit_status_of_doctor(acme):
    acme("raise RuntimeError('boom')", "")
    command = [sys.executable, "-m", "mithril", "doctor", "--plugins", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **ONLY_ACME})
    assert done.returncode == 1
    assert [row["state"] for row in json.loads(done.stdout)] == ["broken", "clean"]


def test_output_of_a_plugin_does_not_spoil_json(acme):
    prints = ["os.system('echo one')", "os.write(1, b'two\\n')", "print('three')", "sys.__stdout__.write('four\\n')"]
    acme("import os, sys\n" + "\n".join(prints), "")
    command = [sys.executable, "-m", "mithril", "plugins", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "acme" in [row["name"] for row in json.loads(done.stdout)]
    assert {"one", "two", "three", "four"} <= set(done.stderr.split())
