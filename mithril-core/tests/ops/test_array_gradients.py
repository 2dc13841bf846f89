"""Gradients of shape, indexing, sorting, convolution and pooling: every sample, first and second order."""

from __future__ import annotations

import numpy as np
import pytest

from mithril.graph import Builder
from mithril.graph.dims import Dim
from mithril.graph.dtypes import dtype
from mithril.graph.evaluation import evaluate
from mithril.graph.registry import operations
from mithril.graph.samples import Arr

FILES = ("shape", "slicing", "indexing", "sorting", "convolution", "pool")
CASES = [
    pytest.param(op, s, id=f"{name}-{s.label}" if s.label else name)
    for name, op in sorted(operations().items())
    for s in op.samples
    if s.gradient and s.operands and any(f"/ops/{f}.py:" in op.declared_at for f in FILES)
]


def make(a: Arr, rng):
    kind = dtype(a.dtype)
    if a.values is not None:
        result = np.array(a.values).reshape(a.shape)
        return result.astype(np.float64 if kind.is_float else kind.numpy)
    if kind.is_float:
        return rng.uniform(a.low, a.high, a.shape)
    return rng.integers(int(a.low), int(a.high) + 1, a.shape).astype(kind.numpy)


def pull(node, cotangents):
    """Return one cotangent per operand, by the operation's own gradient or through its body."""
    op = node.op
    if op.gradient is not None:
        single = len(op.results) == 1
        cotangents_and_results = (cotangents[0], node.result) if single else (tuple(cotangents), node.results)
        return op.gradient(*cotangents_and_results, *node.operands, **node.attributes)
    if not op.composite:
        assert op.gradient_reason
        return [None] * len(node.operands)
    builder = Builder.current()
    body = op.decompose([v.type for v in node.operands], node.attributes)
    start = len(builder.nodes)
    outputs = builder.inline(body, node.operands)
    return backward(builder.nodes[start:], outputs, cotangents, node.operands)


def backward(nodes, outputs, cotangents, targets):
    cotangents_by_value = {}

    def collect(value, g):
        if g is None or value is None:
            return
        assert g.dtype is value.dtype, "a cotangent keeps its operand's dtype"
        assert g.dtype.is_float, "integers have no cotangent"
        cotangents_by_value[value] = cotangents_by_value[value] + g if value in cotangents_by_value else g

    for value, g in zip(outputs, cotangents, strict=True):
        collect(value, g)
    for node in reversed(list(nodes)):
        result_cotangents = [cotangents_by_value.get(r) for r in node.results]
        if any(g is not None for g in result_cotangents):
            for value, g in zip(node.operands, pull(node, result_cotangents), strict=True):
                collect(value, g)
    return [cotangents_by_value.get(v) for v in targets]


def numeric(function, arguments, name, step=1e-5):
    base, out = arguments[name], np.zeros(arguments[name].shape)
    for position in np.ndindex(base.shape):
        high, low = base.copy(), base.copy()
        high[position] += step
        low[position] -= step
        out[position] = (function({**arguments, name: high}) - function({**arguments, name: low})) / (2 * step)
    return out


@pytest.mark.parametrize(("op", "s"), CASES)
def test_gradients_are_central_differences(op, s):
    rng = np.random.default_rng(0)
    arguments = {f"x{k}": make(a, rng) for k, a in enumerate(s.operands)}
    with Builder() as b:
        operands = [b.input(name, x.shape, x.dtype) for name, x in arguments.items()]
        result = op(*operands, **s.attributes)
        result = result if isinstance(result, tuple) else (result,)
        g = [b.input(f"g{k}", y.shape, y.dtype) if y.dtype.is_float else None for k, y in enumerate(result)]
        first = backward(list(b.nodes), result, g, operands)
        directions = {v: d for v, d in zip(operands, first, strict=True) if d is not None}
        h = {v: b.input(f"h_{v.name}", v.shape, v.dtype) for v in directions}
        inputs = [v for v in (*operands, *g) if v is not None and v.dtype.is_float]
        second = backward(list(b.nodes), list(directions.values()), list(h.values()), inputs)
        outputs = {f"y{k}": y for k, y in enumerate(result) if y.dtype.is_float}
        outputs |= {f"d_{v.name}": d for v, d in directions.items()}
        outputs |= {f"dd_{v.name}": d for v, d in zip(inputs, second, strict=True) if d is not None}
        graph = b.build(outputs)
    for value in (*[v for v in g if v is not None], *h.values()):
        arguments[value.name] = rng.normal(size=value.shape)
    results = evaluate(graph, arguments)

    def forward(values):
        ran = evaluate(graph, values)
        return sum(np.sum(ran[f"y{k}"] * values[v.name]) for k, v in enumerate(g) if v is not None)

    def gradient(values):
        ran = evaluate(graph, values)
        return sum(np.sum(ran[f"d_{v.name}"] * values[u.name]) for v, u in h.items())

    for value in directions:
        if np.size(arguments[value.name]) <= 100:
            expected = numeric(forward, arguments, value.name)
            np.testing.assert_allclose(results[f"d_{value.name}"], expected, rtol=1e-4, atol=1e-6)
    for value in inputs:
        if directions and np.size(arguments[value.name]) <= 40:
            expected = numeric(gradient, arguments, value.name)
            result = results.get(f"dd_{value.name}", np.zeros_like(expected))
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_pads_and_slices_of_symbolic_axes_have_gradients(mode):
    x = np.random.default_rng(0).normal(size=(5, 7))

    def run(shape):
        with Builder() as b:
            v = b.input("x", shape, "float64")
            y = operations()["pad"](v, widths=((2, 1), (0, 3)), mode=mode)[1::2, ::-2]
            (d,) = backward(list(b.nodes), [y], [y * y], [v])
            return evaluate(b.build({"d": d}), {"x": x})["d"]

    np.testing.assert_allclose(run((Dim("N", 3), Dim("M", 4))), run((5, 7)), rtol=1e-12)
