"""Gradients of a graph before and after a rewrite, which training differentiates if the rewrite comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mithril.derivatives import gradients
from mithril.graph import GradientError, Graph, as_results, dtype as as_dtype, evaluate
from mithril.passes import random_arguments
from mithril_testing.compare import assert_close, tolerance

KINKS = np.array([0.0, 1.0, -1.0, 0.5, 0.0, -2.0, 2.0, -0.5, 3.0, 0.0, -3.0])  # its own size is prime: all pairs occur


def assert_equal_gradients(before: Graph, after: Graph, pairs_of_kinks: int = len(KINKS)) -> None:
    """Compare the gradients of all outputs, at random values, at kinks and at ties.

    Where the gradient before is not finite, that after is not compared. Graphs without a gradient are not checked.
    """
    try:
        expected_graph = _differentiated(before)
    except GradientError:
        return
    actual_graph = _differentiated(after)
    if expected_graph is before:
        return
    for values in _trials(expected_graph, pairs_of_kinks):
        arguments = dict(zip((i.name for i in expected_graph.arguments), values, strict=True))
        expected = evaluate(expected_graph, arguments)
        actual = evaluate(actual_graph, dict(zip((i.name for i in actual_graph.arguments), values, strict=True)))
        pairs = zip(expected.items(), actual.values(), strict=True)
        for (name, array), other in list(pairs)[len(before.results) :]:
            if are_equal(array, other):
                continue
            is_finite = np.isfinite(array)
            allowed = tolerance(as_dtype(array.dtype), 64.0)
            rounding = tolerance(as_dtype(array.dtype)).relative * largest_value(expected_graph, arguments)
            operands = zero_elsewhere(is_finite, other), zero_elsewhere(is_finite, array)
            assert_close(*operands, allowed, f"gradient '{name}'", unsure=rounding)


def are_equal(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether no rounding is to be measured, which takes longer than evaluating both sides."""
    return a.dtype == b.dtype and np.array_equal(a, b)


def zero_elsewhere(condition: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array with zeros where a condition is false; NumPy 2.0 crashes for bfloat16 and a number."""
    return np.where(condition, x, np.zeros_like(x))


def _differentiated(graph: Graph) -> Graph:
    """Return the graph with the gradients for all float inputs; outputs that are gradients are not differentiated."""
    wrt = [i.name for i in graph.arguments if i.type.dtype.is_float]
    names = [r.name for r in graph.results if r.value.dtype.is_float and r.role == "output"]
    return gradients(graph, names, wrt) if wrt and names else graph


def _trials(graph: Graph, pairs: int) -> Iterator[list[Any]]:
    """Yield random arguments, then rows of values at kinks, rolled by argument so that all pairs occur."""
    arrays = list(random_arguments(graph).values())
    yield arrays
    for shift in range(pairs):
        yield [
            np.resize(np.roll(KINKS, shift * k), a.shape).astype(a.dtype) if as_dtype(a.dtype).is_float else a
            for k, a in enumerate(arrays)
        ]


def largest_value(graph: Graph, arguments: Mapping[str, Any]) -> float:
    """Return the largest finite magnitude among a graph's values, to which rounding errors are relative."""
    values = [v for node in graph.nodes for v in node.results if v.dtype.is_float]
    every = graph.replaced(results=as_results(values))
    arrays = [np.abs(np.asarray(x, np.float64)) for x in evaluate(every, arguments).values()]
    return max((float(np.max(x[np.isfinite(x)], initial=0.0)) for x in arrays), default=0.0)
