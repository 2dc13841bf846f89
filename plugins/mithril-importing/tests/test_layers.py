"""Regions and layers of a source without a framework: operations are functions of ``mithril.ops``."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import Conv2d, Embedding, LayerNorm, Linear, Model, Relu, Sequential, Wrapper, hook
from mithril_importing.layers import ImportedLayer, Run
from mithril_importing.model import model_of
from mithril_importing.patterns import NamedLinear, known_layer
from mithril_importing.regions import Operation, Param, Read, Region, Scope, nested

SHAPES = {"a.b.kernel": (4, 3), "a.b.bias": (3,), "scale": (3,)}


def operation(path: str, function: Any, reads: str, result: str, kind: str = "", *operands: Any) -> Operation:
    """Return an operation in modules such as ``a/a.b#1``, the second call of ``b`` in ``a``."""
    scopes = tuple(Scope(*scope.split("#")) for scope in path.split("/") if scope)
    return Operation((function, reads.split(), result), scopes, tuple(reads.split()), (result,), kind, operands)


class Toy(ImportedLayer):
    """A source of functions; ``scale`` is a parameter of the root."""

    def __init__(self, operations: list[Operation], results: list[str]) -> None:
        super().__init__("", [nested(operations, results)], known_layer(SHAPES))

    def build(self, *values: Any) -> Any:
        run = ToyRun(self, {})
        with run.active():
            return run.interpret(self, self.regions[0], values)


class ToyRun(Run):
    def execute(self, source: Any) -> None:
        function, reads, result = source
        parameters = [self.parameter(n, s, "float32") for n, s in SHAPES.items() if f"${n}" in reads]
        self.values[result] = function(*(self.values[n] for n in reads if n in self.values), *parameters)


def graph() -> list[Operation]:
    return [
        operation("a/a.b", ops.matmul, "x", "product", "matmul", Read("x"), Param("a.b.kernel")),
        operation("a/a.b", ops.add, "product", "sum", "add", Read("product"), Param("a.b.bias")),
        operation("a", ops.relu, "sum", "active"),
        operation("c#0", ops.exp, "active", "first"),
        operation("c#1", ops.exp, "first", "second"),
        operation("d", lambda x, y: ops.mul(x, y), "first second", "times"),
        operation("d", ops.neg, "second", "negative"),
        operation("", lambda x, y: ops.add(x, y), "times negative", "y"),
    ]


def model(operations: list[Operation], results: list[str]) -> Model:
    layer = Toy(operations, results)
    layer.name = ""
    return Model.create(inputs="x", outputs={"y": layer(x="x") if layer.inputs == ("x",) else layer("x")})


def test_regions_nest_and_know_the_values_that_cross_their_borders() -> None:
    root = nested(graph(), ["y"])
    assert (root.reads, root.results) == (("x",), ("y",))
    a, first, second, d = root.inner()
    assert [r.scope for r in (a, first, second)] == [("a", ""), ("c", "0"), ("c", "1")]
    assert (a.reads, a.results) == (("x",), ("active",))
    assert (a.inner()[0].reads, a.inner()[0].results) == (("x",), ("sum",))
    assert (d.reads, d.results) == (("first", "second"), ("times", "negative"))
    assert [o.results[0] for o in root.operations()] == [o.results[0] for o in graph()]


def test_layers_run_as_the_source_does() -> None:
    toy = model(graph(), ["y"])
    assert [(p, type(x).__name__) for p, x in toy.walk() if p] == [
        ("a", "ImportedLayer"),
        ("a.b", "NamedLinear"),
        ("c", "ImportedLayer"),
        ("d", "ImportedLayer"),
    ]
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    compiled = ml.compile(toy, "numpy", shapes={"x": [2, 4]})
    params = compiled.randomize_params(seed=0)
    assert set(params) == {"a.b.kernel", "a.b.bias"}
    active = np.maximum(x @ params["a.b.kernel"] + params["a.b.bias"], 0)
    second = np.exp(np.exp(active))
    expected = np.exp(active) * second - second
    np.testing.assert_allclose(compiled.evaluate(params, {"x": x})["y"], expected, rtol=1e-5)
    toy.replace("a", hook(lambda y: y * 0.0))
    changed = ml.compile(toy, "numpy", shapes={"x": [2, 4]}).evaluate(params, {"x": x})["y"]
    np.testing.assert_allclose(changed, np.zeros((2, 3)), atol=1e-5)  # e^e^0 (e^0 - 1)


def test_a_replacement_has_the_terminals_of_the_region() -> None:
    toy = model(graph(), ["y"])
    toy.replace("a", Linear(4, 5)).replace("c", Relu())
    params = ml.compile(toy, "numpy", shapes={"x": [2, 4]}).randomize_params(seed=0)
    assert {n: p.shape for n, p in params.items()} == {"a.weight": (5, 4), "a.bias": (5,)}
    with pytest.raises(ml.ModelError, match="'d' cannot be replaced by Relu") as caught:
        toy.replace("d", Relu())
    assert "it reads 'first', 'second', and others read its 'times', 'negative'" in str(caught.value)


def test_operations_between_those_of_a_layer_forbid_its_replacement() -> None:
    parts = [
        operation("a", ops.exp, "x", "p"),
        operation("", ops.neg, "p", "q"),
        operation("a", ops.exp, "q", "r"),
    ]
    toy = model(parts, ["r"])
    for new in (Relu(), hook(lambda y: y)):
        with pytest.raises(ml.ModelError, match="other operations run between its own"):
            toy.replace("a", new)
    x = np.ones((2, 3), np.float32)
    np.testing.assert_allclose(ml.compile(toy, "numpy")({"x": x})["y"], np.exp(-np.exp(x)), rtol=1e-6)


class Doubling(Wrapper):
    def build(self, *inputs: Any) -> Any:
        return self.inner(*(2.0 * x for x in inputs))


def test_a_wrapper_that_changes_its_input_leaves_that_of_others() -> None:
    residual = [
        operation("a", ops.exp, "x", "p"),
        operation("a", ops.neg, "p", "q"),
        operation("", ops.add, "x q", "y"),
    ]
    toy = model(residual, ["y"])
    toy.replace("a", Doubling)
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(ml.compile(toy, "numpy")({"x": x})["y"], x - np.exp(2 * x), rtol=1e-6)


@pytest.mark.parametrize("reads", [("x e", "r"), ("e", "r x")], ids=["fewer", "more"])
def test_parts_of_a_layer_between_which_others_run_read_their_own_values(reads: tuple[str, str]) -> None:
    def times(*values: Any) -> Any:
        return functools.reduce(ops.mul, values)

    parts = [
        operation("", ops.exp, "x", "e"),
        operation("a", times, reads[0], "p"),
        operation("", ops.neg, "p", "r"),
        operation("a", times, reads[1], "q"),
    ]
    x = np.full((2, 3), 2.0, np.float32)
    np.testing.assert_allclose(ml.compile(model(parts, ["q"]), "numpy")({"x": x})["y"], -x * np.exp(x), rtol=1e-6)


def test_a_layer_of_a_source_does_not_run_alone() -> None:
    layer: Any = model(graph(), ["y"]).find("a")["a"]
    with pytest.raises(ml.ModelError, match="runs within the imported model only"):
        layer(np.ones((2, 4), np.float32))


def known(kind: str, *operands: Any, shapes: dict[str, tuple[int, ...]]) -> Any:
    region = nested([operation("p", None, "x", "y", kind, *operands)], ["y"]).inner()[0]
    return known_layer(shapes)("p", [region])


W, B, X = Param("p.weight"), Param("p.bias"), Read("x")


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (known("linear", X, W, B, shapes={"p.weight": (3, 4), "p.bias": (3,)}), Linear(4, 3, bias=True)),
        (known("linear", X, W, shapes={"p.weight": (3, 4)}), Linear(4, 3, bias=False)),
        (known("embedding", W, X, shapes={"p.weight": (9, 4)}), Embedding(9, 4)),
        (
            known("layer_norm", X, (4,), W, None, 1e-3, shapes={"p.weight": (4,)}),
            LayerNorm((4,), eps=1e-3, scale=True, bias=False),
        ),
        (
            known("conv2d", X, W, None, (2, 2), (1, 0), shapes={"p.weight": (8, 3, 5, 5)}),
            Conv2d(3, 8, kernel_size=5, stride=2, padding=(1, 0), dilation=1, groups=1, bias=False),
        ),
        (known("matmul", X, Param("p.kernel"), shapes={"p.kernel": (4, 3)}), NamedLinear(4, 3, "kernel", None)),
    ],
)
def test_known_patterns(layer: Any, expected: Any) -> None:
    assert type(layer) is type(expected)
    settings = {n: v for n, v in vars(expected).items() if n not in ("arguments", "location", "input_major")}
    assert {n: vars(layer)[n] for n in settings} == settings


@pytest.mark.parametrize(
    "layer",
    [
        known("linear", X, Param("q.weight"), shapes={"q.weight": (3, 4)}),  # the weight of another layer
        known("linear", W, X, shapes={"p.weight": (3, 4)}),
        known("matmul", X, W, shapes={"p.weight": (2, 3, 4)}),
        known("embedding", W, X, 0, shapes={"p.weight": (9, 4)}),  # a row of padding, which is not trained
        known("conv2d", X, W, None, (1, 1), "same", shapes={"p.weight": (8, 3, 5, 5)}),
        known("relu", X, shapes={}),
    ],
)
def test_other_operations_are_no_known_pattern(layer: Any) -> None:
    assert layer is None


def test_layers_that_differ_between_their_calls_are_not_known() -> None:
    shapes = {"p.weight": (4, 4), "p.bias": (4,)}
    regions: list[Region] = [
        nested([operation("p", None, "x", "y", "linear", X, W, *bias)], ["y"]).inner()[0] for bias in ((), (B,))
    ]
    assert known_layer(shapes)("p", regions) is None


def test_errors_of_imported_models_name_the_line_that_imported_them():
    line = sys._getframe().f_lineno + 1
    model = model_of(Toy([operation("", ops.relu, "input", "y")], ["y"]), {"input": ([2, 3], "float32")})
    with pytest.raises(ml.ShapeError, match=f"declared at {re.escape(__file__)}:{line}\n"):
        ml.compile(Sequential(Relu(), model), "numpy", shapes={"input": [2, 4]}).randomize_params()
