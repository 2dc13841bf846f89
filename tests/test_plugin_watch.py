"""A plugin that takes long in a compilation is named while it runs, and in the error of ``timeout=``."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import mithril as ml
from mithril import plugins
from mithril.compiler import deadline
from mithril.models import Model

PLUGIN = """
import time

from mithril import Lowering, OpsSpec, PassSpec, compile as ml_compile, hookimpl, ops
from mithril.compiler import GraphSource
from mithril.models import Layer

slow = ""
is_over = None


def work(part):
    end = time.monotonic() + 20
    while part and part == slow and not is_over() and time.monotonic() < end:
        time.sleep(0.01)


class Slow(Layer):
    def build(self, x):
        work("layer")
        return x


class Observer:
    def stage(self, name, graph, start, seconds):
        work("observer" if name == "shapes" else "")

    def passed(self, *arguments):
        pass

    def end(self, *arguments):
        pass


def compiling(model, **options):
    return ml_compile(model, "numpy", **options)


def idle(graph):
    work("pass")
    return graph


def tanh(call):
    work("lowering")
    return f"np.tanh({call.x})"


def applies(node):
    work("condition")
    return True


@hookimpl
def mithril_passes():
    return [PassSpec("acme-idle", "acme_slow:idle", "canonical", "low")]


@hookimpl
def mithril_lowerings(backend):
    return [Lowering("tanh", "acme_slow:tanh", when="acme_slow:applies")] if backend == "numpy" else []


@hookimpl
def mithril_observers(context):
    return [Observer()]


@hookimpl
def mithril_advise(options):
    work("advice")
    return {}


@hookimpl(wrapper=True)
def mithril_build():
    work("build")
    return (yield)


@hookimpl
def mithril_amend_pipeline(draft):
    work("pipeline")
"""
PARTS = {
    "pass": "pass 'acme-idle'",
    "lowering": "lowering of 'tanh' on 'numpy'",
    "condition": "condition of the lowering of 'tanh' on 'numpy'",
    "layer": "layer 'slow'",
    "observer": "observer 'Observer.stage'",
    "advice": "hook 'mithril_advise'",
    "build": "hook 'mithril_build'",
    "pipeline": "hook 'mithril_amend_pipeline'",
}
OWNER = "of plugin 'slow' of acme-slow 2.5"


@pytest.fixture(autouse=True)
def acme(tmp_path, monkeypatch):
    """Install a distribution ``acme-slow 2.5``, and return its module."""
    (tmp_path / "acme_slow.py").write_text(PLUGIN)
    info = tmp_path / "acme_slow-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-slow\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[mithril]\nslow = acme_slow\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    plugins.reload()
    yield importlib.import_module("acme_slow")
    sys.modules.pop("acme_slow")
    monkeypatch.undo()
    plugins.reload(disable=[])


def compiled(acme, slow="", is_over=lambda: False, **options):
    """Compile with one part of the plugin at work until ``is_over()``."""
    acme.slow, acme.is_over = slow, is_over
    x = ml.IOKey("x")
    model = Model.create(inputs=x, y=ml.ops.tanh(acme.Slow(name="slow")(x)))
    return ml.compile(model, "numpy", shapes={"x": [2, 3]}, **options)


@pytest.mark.parametrize("part", PARTS)
def test_slow_plugin_is_named_while_it_runs(acme, part, capsys):
    texts = []

    def is_reported():
        texts.append(capsys.readouterr().err)
        return PARTS[part] in "".join(texts)

    compiled(acme, part, is_reported, plugin_patience=0.05)
    lines = [line for line in "".join(texts).splitlines() if PARTS[part] in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"mithril: {PARTS[part]} {OWNER} takes longer than 0.05 seconds (")
    assert lines[0].endswith("in work); set MITHRIL_DISABLE_PLUGINS=slow to leave it out")


@pytest.mark.parametrize("part", PARTS)
def test_timeout_names_the_plugin(acme, part):
    """Ring the alarm as soon as the part runs, on a slow machine as well."""
    compiled(acme)
    with pytest.raises(ml.CompileTimeoutError, match="after 100 seconds") as caught:
        compiled(acme, part, lambda: signal.raise_signal(signal.SIGALRM), timeout=100)
    assert f"{PARTS[part]} {OWNER}" in str(caught.value)


def test_plugin_that_compiles_is_not_blamed_for_a_pass_of_the_user(acme):
    """Its function is below the compilation, and so takes no part in it."""
    compiled(acme)
    with ml.Builder() as builder:
        y = builder.input("x", (2,)) + 1.0

    def ringing(graph):
        signal.raise_signal(signal.SIGALRM)
        return graph

    with pytest.raises(ml.CompileTimeoutError) as caught:
        acme.compiling(builder.build({"y": y}), timeout=100, custom_passes=[ringing])
    assert "acme-slow" not in str(caught.value)


def test_timeout_names_the_plugin_in_a_thread(acme, capsys, monkeypatch):
    """Alarm signals reach the main thread only; elsewhere the limit is checked between passes."""
    errors = []

    def is_late():
        """Advance the clock as soon as the plugin was seen at work."""
        is_seen = PARTS["pass"] in capsys.readouterr().err
        if is_seen:
            monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 100))
        return is_seen

    def run():
        try:
            compiled(acme, "pass", is_late, timeout=100, plugin_patience=0.05)
        except ml.CompileTimeoutError as error:
            errors.append(str(error))

    compiled(acme)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert f"{PARTS['pass']} {OWNER} ran for" in errors[0]


def test_plugin_that_runs_after_the_timeout_in_a_thread_is_named(acme, capsys):
    """No alarm interrupts a thread; the user reads at the limit who holds it."""
    texts = []

    def is_reported():
        texts.append(capsys.readouterr().err)
        return "runs on" in "".join(texts)

    def run():
        with pytest.raises(ml.CompileTimeoutError):
            compiled(acme, "pass", is_reported, timeout=0.3)

    compiled(acme)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (line,) = [line for line in "".join(texts).splitlines() if "runs on" in line]
    assert line.startswith(f"mithril: {PARTS['pass']} {OWNER} runs on after timeout=0.3 (")
    assert line.endswith("in work); set MITHRIL_DISABLE_PLUGINS=slow to leave it out")


def test_interrupt_names_the_plugin(acme):
    compiled(acme)
    with pytest.raises(KeyboardInterrupt) as caught:
        compiled(acme, "pass", lambda: signal.default_int_handler(signal.SIGINT, None))  # the signal may be ignored
    assert caught.value.__notes__[0] == f"in {PARTS['pass']} {OWNER}"


def test_interrupt_names_the_plugin_that_is_imported(acme, tmp_path):
    (tmp_path / "acme_slow.py").write_text("raise KeyboardInterrupt")
    sys.modules.pop("acme_slow")
    plugins.reload()
    with pytest.raises(KeyboardInterrupt) as caught:
        plugins.all()
    assert caught.value.__notes__ == [f"in 'import' {OWNER}; set MITHRIL_DISABLE_PLUGINS=slow to leave it out"]
    sys.modules["acme_slow"] = acme


RINGING = """
import signal
signal.raise_signal(signal.SIGALRM)
"""


@pytest.mark.parametrize("part", ["import", "mithril_options"])
def test_timeout_ends_imports_and_listing_hooks(acme, tmp_path, part):
    """Ring in the middle of a plugin, which is complete in the next compilation."""
    hook = "import signal\ndef mithril_options():\n    signal.raise_signal(signal.SIGALRM)\n"
    (tmp_path / "acme_slow.py").write_text(RINGING if part == "import" else hook)
    sys.modules.pop("acme_slow")
    plugins.reload()
    with ml.Builder() as builder:
        y = builder.input("x", (2,)) + 1.0
    graph = builder.build({"y": y})
    with pytest.raises(ml.CompileTimeoutError) as caught:
        ml.compile(graph, "numpy", timeout=100)
    assert str(caught.value) == (
        "Compilation timed out after 100 seconds\n"
        f"  in '{part}' {OWNER}\n"
        "hint: raise timeout=, lower optimization_level=, or compile a smaller part; "
        "or set MITHRIL_DISABLE_PLUGINS=slow to leave it out"
    )
    (tmp_path / "acme_slow.py").write_text("def mithril_options(): return []")
    sys.modules.pop("acme_slow", None)
    importlib.invalidate_caches()
    if part == "import":
        assert not ml.compile(graph, "numpy", timeout=100).decisions
    sys.modules["acme_slow"] = acme


def test_fast_plugins_are_not_named(acme, capsys):
    compiled(acme, plugin_patience=5)
    assert capsys.readouterr().err == ""


def test_no_plugin_is_named_without_patience(acme, capsys):
    start = time.monotonic()
    compiled(acme, "pass", lambda: time.monotonic() > start + 0.2, plugin_patience=None)
    assert capsys.readouterr().err == ""


def watches():
    return [one for one in threading.enumerate() if one.name == "mithril-plugin-watch"]


def test_thread_ends_with_the_compilation(acme):
    compiled(acme, "pass", watches, plugin_patience=0.5)
    deadline = time.monotonic() + 5
    while watches() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not watches()


def test_no_thread_without_plugins():
    plugins.reload(disable=["slow"])
    threads = []

    @ml.pass_
    def look(graph):
        """Record the threads."""
        threads.extend(watches())
        return graph

    with ml.Builder() as builder:
        y = builder.input("x", (2,)) + 1.0
    ml.compile(builder.build({"y": y}), "numpy", custom_passes=[look])
    assert not threads
