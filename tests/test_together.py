"""All distributions in one environment: they do not interfere, and every declared name loads."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import mithril
from mithril import plugins
from mithril.compiler import option_registry
from mithril.plugins import pip_hints
from mithril_tools.known import known_text
from mithril_tools.reference.operations import coverage_text

PROJECT = Path(__file__).parents[1]
INSTALLED = sorted(plugin.distribution for plugin in plugins.found() if plugin.distribution in pip_hints.DISTRIBUTIONS)
OFFERED = [(kind, name) for kind, name, plugin in plugins.provided() if plugin.distribution in pip_hints.DISTRIBUTIONS]
LOADERS = {
    "backend": plugins.backend_class,
    "pass": plugins.load_pass,
    "profiler": plugins.load_profiler,
    "export": lambda name: getattr(mithril, name),
    "command": plugins.load_command,
    "op": plugins.import_op,
    "target": plugins.target,
}


def test_nothing_is_wrong_with_any_plugin():
    option_registry()
    assert {plugin.name: [str(p.error()) for p in plugin.problems] for plugin in plugins.all() if plugin.problems} == {}


def test_versions_are_in_step():
    assert {name: importlib.metadata.version(name) for name in INSTALLED} == dict.fromkeys(
        INSTALLED, mithril.__version__
    )


@pytest.mark.parametrize(("kind", "name"), [pair for pair in OFFERED if pair[0] in LOADERS])
def test_declared_names_load(kind, name):
    assert LOADERS[kind](name) is not None


def test_exports_are_known_for_the_pip_line():
    """A name that a distribution of this project exports is found in the table that prints the pip line."""
    exported = {name: entry.plugin.distribution for name, entry in plugins.exports().items()}
    own_exports = {name: home for name, home in exported.items() if home in pip_hints.DISTRIBUTIONS}
    assert {name: pip_hints.EXPORTS.get(name) for name in own_exports} == own_exports


def test_backends_are_known_for_the_pip_line():
    own_backends = {name: entry.plugin.distribution for name, entry in plugins.backends().items()}
    assert {n: pip_hints.BACKENDS.get(n) for n, home in own_backends.items() if home in pip_hints.DISTRIBUTIONS} == {
        n: home for n, home in own_backends.items() if home in pip_hints.DISTRIBUTIONS
    }


@pytest.mark.parametrize("name", [plugin.name for plugin in plugins.found()])
def test_entry_modules_import_no_framework(name):
    code = f"""
import json, sys
from mithril import plugins
plugin, = [p for p in plugins.found() if p.name == {name!r}]
plugins.default.loader.load(plugin)
print(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy = {"numpy", "jax", "jaxlib", "torch", "mlx", "tvm", "ggml", "scipy"}
    assert not heavy & set(json.loads(done.stdout))


def test_reference_pages_are_complete():
    done = subprocess.run([sys.executable, "docs/render.py", "--check"], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_known_names_are_those_of_the_plugins():
    written = (PROJECT / "registry.json").read_text()
    assert written == known_text(), "run: nox -s generate (or: python -m mithril_tools.known)"


def test_every_backend_answers_for_every_operation():
    """The pages of operations show this table; ``python -m mithril_tools.generate --coverage`` writes it."""
    backends = {name for name, entry in plugins.backends().items() if entry.plugin.distribution in INSTALLED}
    states = json.loads(coverage_text())
    assert set(plugins.op_names()) <= set(states)
    common = {name for name in states if "." not in name}  # another operation belongs to one backend
    assert {name: set(states[name]) for name in common if set(states[name]) != backends} == {}
