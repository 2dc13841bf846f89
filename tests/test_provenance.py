"""Provenance: whatever of a third party takes part in a compilation is named, with its version, and blamed by name."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import mithril as ml
from mithril import ops, plugins
from mithril.graph import PluginError
from mithril.models import Model, Residual, Sequential, Tanh
from mithril.plugins import PluginWarning

PLUGIN = """
from mithril import Export, FileFormat, FrontendSpec, HardwareTarget, Option, OpsSpec, PassSpec, hookimpl


@hookimpl
def mithril_passes():
    return [PassSpec("acme-plain", "acme_parts:plain", "canonical", "low")]


@hookimpl
def mithril_options():
    return [Option("acme_flag", bool, False, "A flag."), Option("acme_watch", bool, False, "Watch.", affects="shown")]


@hookimpl
def mithril_targets():
    return [HardwareTarget("acme_board", "cpu")]


@hookimpl
def mithril_ops():
    return [OpsSpec("acme_parts", ("acme.twice",))]


@hookimpl
def mithril_exports():
    return [Export("acme_method", "acme_parts:method", on="CompiledModel"), Export("Shift", "acme_parts:Shift")]


@hookimpl
def mithril_formats():
    return [FileFormat("acme", (".acme",), saves="acme_parts:save")]


@hookimpl
def mithril_frontends():
    return [FrontendSpec("acme", ("acme_parts.Formula",), "acme_parts:source")]


@hookimpl
def mithril_amend_pipeline(draft):
    draft.remove("simplify")


@hookimpl(wrapper=True)
def mithril_build():
    return (yield)


@hookimpl
def mithril_observers(context):
    import acme_parts

    return [acme_parts.Observer()] if context.options["acme_watch"] else []
"""

PARTS = '''
from __future__ import annotations

from mithril import Builder, ModelError, composite, ops
from mithril.compiler import GraphSource
from mithril.models import Layer


def plain(graph, context):
    context.option("acme_flag")
    return graph.replaced(nodes=graph.nodes)  # a pass that changes nothing takes no part


@composite(name="acme.twice")
def twice(x):
    """Twice x."""
    return x + x


class Shift(Layer):
    def build(self, x):
        if x.shape[-1] == 3:
            return x + self.param("shift", (3,))
        raise (LookupError if x.shape[-1] == 2 else ModelError)("own")


class Formula:
    def __init__(self, text):
        self.text = text


class Source(GraphSource):
    def graph(self, types, request):
        return super().graph(types, request) if self.name == "tanh" else 1 / 0


def source(model, *, outputs, inference):
    with Builder(model.text) as builder:
        y = getattr(ops, model.text)(builder.input("x", (2, 3)))
    return Source(builder.build({"y": y}), outputs=outputs, inference=inference)


def method(compiled):
    raise LookupError("own")


def save(compiled, path):
    raise LookupError("own")


class Observer:
    def stage(self, *arguments):
        raise LookupError("own")

    def passed(self, *arguments):
        pass

    def end(self, *arguments):
        pass
'''
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def acme(tmp_path, monkeypatch):
    """Install a distribution ``acme-parts 2.5``."""
    registry = importlib.import_module("mithril.graph.registry")
    registered = dict(registry._operations)
    for name, text in {"acme_plugin": PLUGIN, "acme_parts": PARTS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    info = tmp_path / "acme_parts-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-parts\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[mithril]\nacme = acme_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    plugins.reload()
    yield
    for name in ("acme_plugin", "acme_parts"):
        importlib.sys.modules.pop(name, None)
    registry._operations.clear()
    registry._operations.update(registered)
    monkeypatch.undo()
    plugins.reload()


def compiled(backend="numpy", **options):
    x = ml.IOKey("x")
    model = Model.create(inputs=x, y=getattr(ops, "acme.twice")(x))
    return ml.compile(model, backend, shapes={"x": [2, 3]}, **options)


NAMED = [
    "pass 'acme-plain' by acme-parts 2.5",
    "passes amended by acme-parts 2.5: leave out 'simplify'",
    "option 'acme_flag' by acme-parts 2.5",
    "hardware target 'acme_board' by acme-parts 2.5",
    "operation 'acme.twice' by acme-parts 2.5",
    "mithril_build of acme-parts 2.5 takes part",
]


@pytest.mark.parametrize("backend", ["numpy", "torch", "c", "ggml"])
def test_all_parts_are_named_in_decisions_and_generated_code(backend):
    program = compiled(backend, acme_flag=True, target_hardware="acme_board")
    assert sorted(d.message for d in program.decisions.of("plugin")) == sorted(NAMED)
    assert all(f"plugin: {line}" in program.explain() for line in NAMED)
    if backend != "ggml":  # its programs have no text
        comment = "/* {} */" if backend == "c" else "# {}"
        assert all(comment.format(line) in program.source for line in NAMED)


def test_exported_c_names_the_parts(tmp_path):
    compiled("c", acme_flag=True).export(tmp_path / "out", format="c")
    for name in ("model.c", "model.h"):
        assert "operation 'acme.twice' by acme-parts 2.5" in (tmp_path / "out" / name).read_text()


def test_cached_program_names_the_parts(tmp_path):
    for _ in range(2):
        program = compiled(acme_flag=True, cache=True, cache_dir=str(tmp_path))
        assert "operation 'acme.twice' by acme-parts 2.5" in str(program.decisions)
        assert "# pass 'acme-plain' by acme-parts 2.5" in program.source


def test_frontend_is_named_and_blamed():
    acme = importlib.import_module("acme_parts")
    program = ml.compile(acme.Formula("tanh"), "numpy")
    np.testing.assert_allclose(program.evaluate({}, {"x": X})["y"], np.tanh(X), rtol=1e-6)
    assert "plugin: frontend 'acme' by acme-parts 2.5" in str(program.decisions)
    for text, cause in {"exp": "ZeroDivisionError: division by zero", "nothing": "AttributeError"}.items():
        with pytest.raises(ml.MithrilError, match="the frontend 'acme' of acme-parts 2.5") as caught:
            ml.compile(acme.Formula(text), "numpy")
        assert cause in str(caught.value)


def with_layer(backend, size=3):
    model = Sequential(Tanh(), Residual(ml.Shift()))
    return ml.compile(model, backend, shapes={"input": [2, size]})


@pytest.mark.parametrize("backend", ["numpy", "c"])
def test_layers_are_named(backend):
    line = "layer 'Shift' by acme-parts 2.5"
    program = with_layer(backend)
    assert [d.message for d in program.decisions.of("plugin") if d.message.startswith("layer")] == [line]
    assert line in program.explain() and line in program.source


def test_layers_are_named_in_their_errors():
    with pytest.raises(ml.ModelError, match="in the layer class 'Shift' of acme-parts 2.5"):
        with_layer("numpy", size=5)
    with pytest.raises(LookupError) as caught:
        with_layer("numpy", size=2)
    assert caught.value.__notes__[0].endswith("in the layer class 'Shift' of acme-parts 2.5")


def test_methods_and_formats_keep_their_errors_with_a_note(tmp_path):
    program = compiled()
    with pytest.raises(LookupError) as caught:
        program.acme_method()
    assert caught.value.__notes__ == ["in the method 'acme_method' of acme-parts 2.5"]
    with pytest.raises(LookupError) as caught:
        program.export(tmp_path / "x.acme")
    assert caught.value.__notes__ == ["in the file format 'acme' of acme-parts 2.5"]


def test_failing_observer_is_a_warning_with_its_name():
    with pytest.warns(PluginWarning, match=r"Observer.stage' of plugin 'acme' \(acme-parts 2.5\) failed"):
        program = compiled(acme_watch=True)
    np.testing.assert_array_equal(program.evaluate({}, {"x": X})["y"], 2 * X)


def test_plugin_without_a_part_in_the_compilation_is_not_named():
    x = ml.IOKey("x")
    program = ml.compile(Model.create(inputs=x, y=ops.tanh(x)), "numpy", shapes={"x": [2, 3]})
    assert not {"option", "hardware", "operation", "frontend"} & {d.message.split()[0] for d in program.decisions}
    with pytest.raises(PluginError):
        plugins.load_frontend("no-such-frontend")
