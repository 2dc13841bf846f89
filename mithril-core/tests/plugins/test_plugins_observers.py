"""Plugins in a compilation: advice, observers of stages and calls, methods of the compiled model."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import plugins
from mithril.backend.arrays import as_numpy
from mithril.backend.base import Backend
from mithril.graph.evaluation import evaluate
from mithril.models import Model, Relu

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
    from mithril.compiler.graph_source import GraphSource

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


def test_unknown_method_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'CompiledModel' object has no attribute 'stage_nmes'"):
        compiled().stage_nmes()


def test_method_of_a_missing_distribution_names_it():
    with pytest.raises(AttributeError, match="mithril-tools provides it: pip install mithril-tools"):
        compiled().get_profile_stats()


def test_frontend_of_a_plugin_compiles_its_models():
    import mithril_adviser_adviser_plugin as adviser_module

    model = ml.compile(adviser_module.Formula("relu"), Reference())
    result = model.evaluate({}, {"x": np.array([[-1, 0, 1], [2, -3, 4]], np.float32)})
    np.testing.assert_array_equal(result["y"], [[0, 0, 1], [2, 0, 4]])
