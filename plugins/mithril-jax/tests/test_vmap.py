"""``ml.vmap`` against ``jax.vmap`` of the same program, on the samples of all operations."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import mithril as ml
from mithril.backend import BuildOptions
from mithril.graph import decompose, operations
from mithril_jax.backend import JaxBackend
from mithril_testing.cases import Case
from mithril_testing.rows import compare_rows
from mithril_testing.sample_arrays import arrays_for

ROWS = 3
CASES = [
    Case(op, op.samples[0], 0)
    for _, op in sorted(operations().items())
    if op.samples
    and op.infer_rule is None
    and (not op.elementwise or op.name in ("add", "where", "gelu"))
    and any(o is not None for o in op.samples[0].operands)
]


def built(graph):
    backend = JaxBackend()
    return backend.build(decompose(graph, backend.lowers), BuildOptions())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_rows_are_those_of_jax(case):
    graph = case.graph()
    names = [i.name for i in graph.arguments]
    drawn = [arrays_for(case.sample, f"{case.id}{k}") for k in range(ROWS)]
    stacked = {n: np.stack([arrays[int(n[1:])] for arrays in drawn]) for n in names}
    one, vectorized = built(graph), built(ml.vmap(graph, size=ROWS))
    results = vectorized({}, stacked)
    references = jax.vmap(lambda inputs: one({}, inputs))(stacked)
    for name, expected in references.items():
        compare_rows(f"{case.id}: '{name}'", np.asarray(results[name]), np.asarray(expected))
