"""The gradient of running products: right with zeros, and of linear size."""

from __future__ import annotations

import numpy as np
import pytest

from mithril.derivatives import gradients
from mithril.graph import Builder, Dim, cotangent_name, evaluate
from mithril.ops import cumprod


def program(size, **attributes):
    with Builder("g") as b:
        y = cumprod(b.input("x", size, "float64"), **attributes)
    return gradients(b.build({"y": y}), ["y"], ["x"])


def expected(x, g, reverse, exclusive):
    """Leave each element out of the products that it is in."""
    result = np.zeros_like(x)
    n = len(x)
    for i in range(n):
        for j in range(n):
            last = j if not exclusive else j + (1 if reverse else -1)
            used = range(last, n) if reverse else range(last + 1)
            if i in used:
                result[i] += g[j] * np.prod([x[k] for k in used if k != i])
    return result


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("zeros", [(), (0,), (6,), (2, 3), (1, 5, 6)])
def test_zeros_are_exact(reverse, exclusive, zeros):
    rng = np.random.default_rng(0)
    x, g = rng.uniform(0.5, 2, 7), rng.uniform(-1, 1, 7)
    x[list(zeros)] = 0
    for size in (x.shape, (Dim("N"),)):
        graph = program(size, axis=0, reverse=reverse, exclusive=exclusive)
        result = evaluate(graph, {"x": x, cotangent_name("y"): g})
        (slope,) = (result[r.name] for r in graph.results_of("gradient"))
        np.testing.assert_allclose(slope, expected(x, g, reverse, exclusive), rtol=1e-12, atol=1e-15)


def test_one_element_and_none():
    for n in (0, 1):
        graph = program((2, n), axis=1)
        result = evaluate(graph, {"x": np.full((2, n), 3.0), cotangent_name("y"): np.full((2, n), 2.0)})
        assert result[graph.results_of("gradient")[0].name].tolist() == [[2.0] * n] * 2


def test_no_value_is_larger_than_the_operand():
    graph = program((4, 4096), axis=1)
    assert max(int(np.prod(v.shape)) for node in graph.nodes for v in node.results) == 4 * 4096
