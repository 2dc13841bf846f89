"""Operations on all rows of a batch at once, against the same operation on one row after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mithril.derivatives import vmap_graph
from mithril.graph import Arrays, Graph, evaluate, verify
from mithril_testing.cases import Case, differentiable, gradient_graph
from mithril_testing.sample_arrays import arrays_for

Array = np.ndarray[Any, Any]
ROWS = 3
TOLERANCE = 1e-5


def check_rows(case: Case) -> None:
    """Raise AssertionError where rows differ, with any one operand in rows and with all; so do gradients."""
    graphs = [case.graph()]
    if differentiable(case):
        graphs.append(gradient_graph(graphs[0]))
    if case.op.no_axes and case.op.batching is None:
        return
    for graph in graphs:
        rows = [_arguments(case, graph, k) for k in range(ROWS)]
        for operands in patterns([i.name for i in graph.with_role("input")]):
            in_rows = {*operands, *(i.name for i in graph.with_role("cotangent"))}
            _compare(case, graph, rows, in_rows)


def patterns(names: list[str]) -> Iterator[list[str]]:
    """Yield which operands have rows: each alone, then all."""
    yield from ([name] for name in names)
    if len(names) > 1:
        yield names


def _arguments(case: Case, graph: Graph, row: int) -> Arrays:
    arrays = arrays_for(case.sample, f"{case.id}{row}", case.dtype)
    specs = enumerate(zip(arrays, case.sample.operands, strict=True))
    arguments = [(f"x{k}", a, s.values is None or s.ordered) for k, (a, s) in specs if a is not None and s]
    values = {name: a if stays else _rearranged(a, row) for name, a, stays in arguments}
    rng = np.random.default_rng(row)
    for i in graph.arguments:
        if i.name not in values:
            values[i.name] = rng.uniform(0.5, 1.5, i.type.shape).astype(i.type.dtype.numpy)
    return values


def _rearranged(x: Array, row: int) -> Array:
    """Exact elements in another order, so that rows differ; a number becomes another one."""
    if x.size > 1:
        return np.roll(x.reshape(-1), row).reshape(x.shape)
    return x if x.dtype.kind in "b" else (x + row if x.dtype.kind in "iu" else x * (1 + row / 8)).astype(x.dtype)


def _compare(case: Case, graph: Graph, rows: list[Arrays], in_rows: set[str]) -> None:
    in_axes = {i.name: 0 if i.name in in_rows else None for i in graph.arguments}
    size = ROWS if case.number % 2 else None  # known or a symbol
    mapped = verify(vmap_graph(graph, in_axes, 0, size))
    results = evaluate(mapped, {n: np.stack([row[n] for row in rows]) if n in in_rows else rows[0][n] for n in in_axes})
    for k, row in enumerate(rows):
        expected = evaluate(graph, {n: row[n] if n in in_rows else rows[0][n] for n in in_axes})
        label = f"{case.id}: row {k}, with {', '.join(sorted(in_rows))} in rows:"
        for name, array in expected.items():
            compare_rows(f"{label} '{name}'", results[name][k], array)


def compare_rows(label: str, row: Array, expected: Array) -> None:
    """Compare one row with the result that it should be."""
    assert (row.shape, row.dtype) == (expected.shape, expected.dtype), f"{label} {row.shape}, not {expected.shape}"
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(row, expected, err_msg=label)
        return
    coarse = TOLERANCE if expected.dtype.itemsize > 2 else 4e-2
    exact = expected.astype(np.float64)
    finite = exact[np.isfinite(exact)]
    scale = float(np.max(np.abs(finite), initial=1.0))
    np.testing.assert_allclose(row.astype(np.float64), exact, coarse, coarse * scale, err_msg=label)
