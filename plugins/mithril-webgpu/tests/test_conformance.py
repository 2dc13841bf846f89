"""The WebGPU backend on the conformance kit: the first sample of every operation, and the whole kit as a soak test."""

import numpy as np
import pytest

import mithril as ml
from mithril.backend import BuildOptions
from mithril.graph import dtype as as_dtype, evaluate
from mithril_testing import BackendConformance
from mithril_testing.backend import with_cotangents
from mithril_testing.cases import backend_cases, differentiable, gradient_graph
from mithril_testing.compare import assert_close, tolerance
from mithril_testing.grown import join_graphs

# factorizations by LAPACK, and bits of storage formats
ON_HOST = frozenset({"bitcast", "cholesky", "eigh", "qr", "slogdet", "solve", "svd", "triangular_solve"})


@pytest.mark.soak
class TestWebGPU(BackendConformance):
    backend = "webgpu"
    on_host = ON_HOST
    joins = True


def test_every_operation_and_its_gradient():
    backend, options = ml.CBackend(device="webgpu"), BuildOptions()
    graphs, arguments = {}, {}
    for case in backend_cases(backend.dtypes):
        if case.number == 0 and case.dtype is None:
            graphs[case.id] = case.graph()
            if case.sample.gradient and differentiable(case):
                graphs[f"gradient of {case.id}"] = gradient_graph(case.graph())
            for name in (case.id, f"gradient of {case.id}"):
                if name in graphs:
                    values = with_cotangents(graphs[name], case.inputs())
                    arguments |= {f"{name}/{n}": a for n, a in values.items()}
    graph = join_graphs(list(graphs.items()), "operations")
    executable = backend.build(backend.decomposed(graph, options), options)
    assert executable.program.fallbacks == ON_HOST
    results = executable({}, {n: backend.array(a) for n, a in arguments.items()})
    with np.errstate(all="ignore"):
        expected = evaluate(graph, arguments)
    for name, reference in expected.items():
        assert_close(backend.to_numpy(results[name]), reference, tolerance(as_dtype(reference.dtype), 16.0), name)
