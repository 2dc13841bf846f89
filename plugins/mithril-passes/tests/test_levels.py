"""Results and gradients do not depend on the optimization level: kinks, infinities, nan and overflow included."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from mithril.graph import Builder
from mithril.graph.registry import operations
from mithril.passes import random_arguments
from mithril_numpy.backend import NumpyBackend
from mithril_passes.fusion import composite_matching
from mithril_testing.cases import backend_cases
from mithril_testing.levels import REFERENCE, Levels, special_arguments
from mithril_testing.random_graphs import random_graph

# The product of a padding zero with an infinite weight is unspecified.
PADDED = ("conv", "conv_input_grad", "conv_weight_grad")
FAITHFUL = ("low", "medium")  # level high may take the better of two values


@pytest.fixture(autouse=True)
def _quiet():
    """Infinities and nan are values here."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def differences(graph, arguments, levels=FAITHFUL, backend=None):
    tried = Levels(graph, backend or NumpyBackend())
    ways = [False, True] if tried.of and tried.wrt else [False]
    return [
        line
        for level in levels
        for a in arguments
        for gradient in ways
        for line in tried.differences(level, a, gradient=gradient)
    ]


@pytest.mark.parametrize("kind", ["float", "int", "other"])
def test_samples_of_all_operations(kind):
    """Try every third case; the soak runs all."""
    wrong = {}
    for case in list(backend_cases(NumpyBackend.dtypes))[::3]:
        first = next((a.dtype.kind for a in case.arrays if a is not None), "")
        if {"f": "float", "V": "float", "i": "int"}.get(first, "other") != kind:
            continue
        graph = case.graph()
        arguments = [case.inputs()]
        if kind == "float" and case.op.name not in PADDED:
            special = special_arguments(graph, 0, overflow=case.op.elementwise)
            # Integers keep their values: those of sparse matrices are valid in one order only.
            arguments.append({n: x if special[n].dtype.kind in "iu" else special[n] for n, x in arguments[0].items()})
        differs = case.op.gradient is not None or case.op.composite
        tried = Levels(graph, NumpyBackend())
        for gradient in [False, True] if differs and tried.of and tried.wrt else [False]:
            for a in arguments:
                if lines := tried.differences("medium", a, gradient=gradient):
                    wrong[case.id] = lines
    assert wrong == {}


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs(seed):
    graph = random_graph(seed)
    assert differences(graph, [random_arguments(graph, seed)], ("low", "medium", "high")) == []
    assert differences(graph, [special_arguments(graph, seed, overflow=False)], ("medium",)) == []


def test_a_rule_that_changes_gradients_at_kinks_is_noticed(monkeypatch):
    """Try the check itself: relu for maximum before gradients are derived."""
    monkeypatch.setattr(composite_matching, "BEFORE_GRADIENTS", composite_matching.RULES)
    with Builder() as b:
        y = operations()["maximum"](b.input("x", (3,)), 0.0)
    lines = differences(b.build({"y": y}), [{"x": np.array([-1.0, 0.0, 1.0], np.float32)}], ("medium",))
    assert len(lines) == 1 and "grad/in0" in lines[0]


class WrongGradient(Levels):
    """Levels whose first gradient is 2 % too large at level medium."""

    def results(self, level, arguments, *, gradient):
        results = super().results(level, arguments, gradient=gradient)
        first = min((n for n in results if n not in self.of), default=None)
        return {n: x * np.float32(1.02) if n == first and level == "medium" else x for n, x in results.items()}


@pytest.mark.parametrize("seed", [2, 4, 7, 9, 28])
def test_wrong_gradient_is_found_despite_rounding(seed):
    graph = random_graph(seed)
    arguments = random_arguments(graph, seed)
    assert WrongGradient(graph, NumpyBackend()).differences("medium", arguments, gradient=True, base=REFERENCE)
