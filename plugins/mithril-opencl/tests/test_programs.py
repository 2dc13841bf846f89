"""Programs on a device: training, control flow, steps of the host, memory, errors."""

import numpy as np
import pyopencl as cl
import pytest

import mithril as ml
from mithril.backend import BuildOptions
from mithril.graph import Builder, evaluate
from mithril.models import Linear

rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def backend():
    return ml.CBackend(device="opencl")


def run(backend, graph, arguments):
    executable = backend.build(backend.decomposed(graph, BuildOptions()), BuildOptions())
    params = {i.name for i in graph.with_role("param")}
    native = {n: backend.array(a) for n, a in arguments.items()}
    results = executable({n: a for n, a in native.items() if n in params}, native)
    return executable, {n: backend.to_numpy(a) for n, a in results.items()}


def test_a_device_without_a_dtype_refuses_it(backend, monkeypatch):
    monkeypatch.setattr(type(backend), "dtypes", frozenset({ml.float32, ml.bool_}))
    with Builder() as b:
        y = b.input("x", (2,), "float64") * 2.0
    with pytest.raises(ml.MithrilError, match="does not support float64"):
        backend.build(b.build({"y": y}))


def test_a_launch_binds_a_limited_number_of_arrays(backend, monkeypatch):
    from dataclasses import replace

    monkeypatch.setattr(backend.host, "model", replace(backend.host.model, buffers=4))
    with Builder() as b:
        y = sum(b.input(f"x{k}", (5,)) * float(k) for k in range(6))
    graph = b.build({"y": y})
    executable = backend.build(graph)
    assert [len(launch.arguments) for launch in executable.program.launches] == [3, 4, 4]
    arguments = {f"x{k}": rng.normal(size=5).astype(np.float32) for k in range(6)}
    results = executable({}, {n: backend.array(a) for n, a in arguments.items()})
    np.testing.assert_allclose(results["y"], evaluate(graph, arguments)["y"], rtol=1e-6)


def test_a_driver_that_is_older_than_the_cpu_is_said(monkeypatch):
    class Old:
        def __init__(self, context, text):
            pass

        def build(self):
            raise cl.RuntimeError("clBuildProgram failed: error: unknown target CPU 'generic'")

    monkeypatch.setattr(cl, "Program", Old)
    with pytest.raises(ml.BackendError, match="is older than this CPU") as caught:
        ml.compile(Linear(4), "opencl", shapes={"input": [2, 3]})
    assert "newer driver" in str(caught.value)
