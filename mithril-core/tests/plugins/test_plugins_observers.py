"""Plugins in a compilation: advice, observers of stages and calls, methods of the compiled model."""

from __future__ import annotations

import doctest
import re

import numpy as np
import pytest

import mithril as ml
from mithril import plugins
from mithril.backend.arrays import as_numpy
from mithril.backend.base import Backend
from mithril.compiler.plugin_methods import ELSEWHERE
from mithril.graph import OptionError, PassError, StrictError
from mithril.graph.evaluation import evaluate
from mithril.models import Model, Relu
from mithril.plugins import PluginWarning, hooks

ADVISER = """
from mithril import Export, hookimpl


@hookimpl
def mithril_advise(options, user_options):
    return {"seed": 3} if options["optimization_level"] == "high" and "seed" not in user_options else {}


class Counter:
    stepped = False

    def __init__(self):
        self.stages, self.calls, self.watcher = [], 0, self

    def stage(self, name, graph, start, seconds):
        self.stages.append(name)

    def passed(self, name, before, after, start, seconds):
        pass

    def end(self, result, error):
        pass

    def add(self, *event, **info):
        self.calls += 1


@hookimpl
def mithril_observers(context):
    return [Counter()]


@hookimpl
def mithril_exports():
    return [Export("stage_names", "mithril_adviser_adviser_plugin:stage_names", on="CompiledModel")]


class Formula:
    def __init__(self, text):
        self.text = text


def source(model, *, outputs, inference):
    from mithril import Builder, ops
    from mithril.compiler import GraphSource

    with Builder(model.text) as builder:
        y = getattr(ops, model.text)(builder.input("x", (2, 3)))
    return GraphSource(builder.build({"y": y}), outputs=outputs, inference=inference)


@hookimpl
def mithril_frontends():
    from mithril import FrontendSpec

    accepts = ("mithril_adviser_adviser_plugin.Formula",)
    return [FrontendSpec("formula", accepts, "mithril_adviser_adviser_plugin:source")]


def stage_names(model):
    return model.watchers[0].stages
"""


class Program:
    source = ""

    def __init__(self, graph):
        self.graph = graph

    def __call__(self, params, inputs):
        return evaluate(self.graph, {**params, **inputs})


class Reference(Backend):
    """Runs graphs by the references of their operations."""

    name = "reference"

    def lowers(self, node, options=None):
        return not node.op.composite

    def build(self, graph, options=None):
        return Program(graph)

    def array(self, data, dtype=None):
        return as_numpy(data, self.dtype)

    def to_numpy(self, array):
        return array

    def is_array(self, x):
        return isinstance(x, np.ndarray)


@pytest.fixture(autouse=True)
def adviser(site):
    site.install("mithril-adviser", ADVISER)
    plugins.reload()
    yield
    plugins.reload()


def compiled(**options):
    model = Model()
    model |= Relu()(input="x", output="y")
    return ml.compile(model, Reference(), shapes={"x": [2, 3]}, **options)


def test_advice_is_taken_and_recorded():
    model = compiled(optimization_level="high")
    assert model.options["seed"] == 3
    assert "options from mithril-adviser 1.0: seed=3" in str(model.decisions)


def test_advice_does_not_override_user_options():
    model = compiled(optimization_level="high", seed=1)
    assert model.options["seed"] == 1
    assert not model.decisions.of("choice")


def test_observers_see_stages_and_calls():
    model = compiled()
    assert model.stage_names()[:2] == ["flatten", "resolve"]
    model.evaluate({}, {"x": np.ones((2, 3), np.float32)})
    (watcher,) = model.watchers
    assert watcher.calls == 1


def failing(site, body):
    site.install("bad-kit", f"from mithril import hookimpl\n{body}")
    plugins.reload()


WATCHER = """
class Watcher:
    stepped = False
    def __init__(self): self.watcher = self
    def stage(self, *arguments): pass
    passed = end = stage
    def add(self, *event, **info): 1 / 0


def mithril_observers(context): return [Watcher()]
"""
REPORT = "(report it to the authors of bad-kit; set MITHRIL_DISABLE_PLUGINS=bad-kit to leave it out)"


def test_calls_have_results_although_a_watcher_fails(site):
    failing(site, WATCHER)
    text = (
        "'mithril_observers: Watcher.add' of plugin 'bad-kit' (bad-kit 1.0) failed: "
        f"ZeroDivisionError: division by zero {REPORT}"
    )
    x = {"x": np.ones((2, 3), np.float32)}
    with pytest.raises(StrictError, match=re.escape(f"strict=True: observer: {text}")):
        compiled(strict=True, optimization_level="none").evaluate({}, x)
    model = compiled()
    with pytest.warns(PluginWarning, match=re.escape(text)):
        model.evaluate({}, x)
    np.testing.assert_array_equal(model.evaluate({}, x)["y"], x["x"])
    assert [d.message for d in model.decisions.of("observer")] == [text]


def test_strict_replaces_no_error_by_that_of_an_observer_and_ends_all_of_them(site, capsys):
    code = "@hookimpl\ndef mithril_compile_end(error): 1 / 0\n"
    failing(site, code)
    site.install("watching-kit", "def mithril_compile_end(error): print('end', type(error).__name__)")
    plugins.reload()
    model = Model()
    model |= Relu()(input="x", output="y")
    text = "'mithril_compile_end' of plugin 'bad-kit'"
    with pytest.raises(OptionError), pytest.warns(PluginWarning, match=text):
        ml.compile(model, Reference(), shapes={"x": [2, -3]}, strict=True, optimization_level="none")
    with pytest.raises(StrictError, match=f"observer: {text}"):
        compiled(strict=True, optimization_level="none")
    assert capsys.readouterr().out == "end OptionError\nend NoneType\n"


def test_pass_that_fails_for_the_second_graph_names_its_plugin(site):
    code = """
from mithril import PassSpec

graphs = []


def mithril_passes():
    return [PassSpec("once", "bad_kit_bad_kit_plugin:once", "fuse", "low")]


def once(graph):
    graphs.append(graph)
    return graph if len(graphs) == 1 else graphs[5]
"""
    failing(site, code)
    first = compiled(optimization_level="low")
    with pytest.raises(PassError, match="pass 'once' failed: IndexError(?s:.)*bad-kit 1.0"):
        compiled(optimization_level="low")
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(first.evaluate({}, {"x": x})["y"], x)


def test_unknown_method_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'CompiledModel' object has no attribute 'stage_nmes'"):
        compiled().stage_nmes()


def test_methods_of_programs_elsewhere_are_errors_with_the_way_here():
    model = compiled()
    for words in ELSEWHERE:
        for word in words.split():
            assert not hasattr(model, word) and word not in dir(model), word
            with pytest.raises(AttributeError, match=f"^'CompiledModel' object has no attribute '{word}'; use "):
                getattr(model, word)
    assert "evaluate" in dir(model)


def test_method_of_a_missing_distribution_names_it():
    with pytest.raises(AttributeError, match="mithril-tools provides it: pip install mithril-tools"):
        compiled().get_profile_stats()


def test_frontend_of_a_plugin_compiles_its_models():
    import mithril_adviser_adviser_plugin as adviser_module

    model = ml.compile(adviser_module.Formula("relu"), Reference())
    result = model.evaluate({}, {"x": np.array([[-1, 0, 1], [2, -3, 4]], np.float32)})
    np.testing.assert_array_equal(result["y"], [[0, 0, 1], [2, 0, 4]])


def test_examples_of_the_hooks_observe_programs_that_are_compiled_later():
    """Programs of gradients are compiled at the first call, after ``mithril_compile_end``."""
    contexts = []
    examples = {"mithril_observers": staticmethod(lambda context: contexts.append(context) or [])}
    for hook in ("mithril_compile_begin", "mithril_compile_stage", "mithril_compile_end"):
        (test,) = doctest.DocTestFinder(recurse=False).find(getattr(hooks, hook), hook, globs={})
        doctest.DocTestRunner(verbose=False).run(test, clear_globs=False)
        examples[hook] = staticmethod(test.globs[hook])
    plugins.register(type("Example", (), examples)(), "example")
    x = np.ones((2, 3), np.float32)
    compiled().evaluate({}, {"x": x}, {"y": x})
    stages = [stage for stage, _ in contexts[0].scratch["my-plugin"]]
    assert stages.count("build") == 2
