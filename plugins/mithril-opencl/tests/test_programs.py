"""Programs on a device: training, control flow, steps of the host, memory, errors."""

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.backend import BuildOptions
from mithril.derivatives import gradients
from mithril.graph import Builder, evaluate
from mithril_cbackend.devices import backend as device_backends
from mithril_cbackend.devices.host import DeviceArray
from mithril_cbackend.devices.program import Run

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


def test_gradients_of_a_network_stay_on_the_device(backend):
    with Builder() as b:
        x, w = b.input("x", (6, 9)), b.param("w", (9, 5))
        y = ops.softmax(ops.layer_norm(x @ w, axes=-1), axis=-1)
    graph = gradients(b.build({"y": y}), None, ["w"])
    arguments = {i.name: rng.normal(size=i.type.shape).astype(np.float32) for i in graph.arguments}
    executable, results = run(backend, graph, arguments)
    for name, expected in evaluate(graph, arguments).items():
        np.testing.assert_allclose(results[name], expected, rtol=2e-4, atol=2e-5)
    assert {type(step) for step in executable.program.steps} == {Run}
    assert not executable.program.calls


def test_loops_and_branches_of_the_graph(backend):
    with Builder() as b:
        x, n = b.input("x", (4,)), b.input("n", (), "int32")
        doubled, _ = ops.while_loop(lambda s: s[1] < n, lambda s: (s[0] * 2.0, s[1] + 1), (x, np.int32(0)))
        last, rows = ops.scan(lambda c, row: (c + row, c * row), x * 0.0, ops.stack(doubled, x, x, axis=0))
        y = ops.cond(ops.sum(x) > 0, lambda v: v + 1.0, lambda v: v - 1.0, last)
    graph = b.build({"y": y, "rows": rows})
    for values, count in ((np.arange(4), 3), (-np.arange(4), 0)):
        arguments = {"x": values.astype(np.float32), "n": np.int32(count)}
        _, results = run(backend, graph, arguments)
        for name, expected in evaluate(graph, arguments).items():
            np.testing.assert_allclose(results[name], expected, rtol=1e-6)


def test_a_factorization_runs_on_the_host_and_is_recorded(backend):
    with Builder() as b:
        x = b.input("x", (3, 3))
        y = ops.cholesky(x @ ops.transpose(x, perm=(1, 0)) + np.eye(3, dtype=np.float32)) * 2.0
    options = BuildOptions()
    graph = b.build({"y": y})
    backend.decomposed(graph, options)
    assert "NumPy reference" in str(options.decisions)
    arguments = {"x": rng.normal(size=(3, 3)).astype(np.float32)}
    executable, results = run(backend, graph, arguments)
    assert executable.program.fallbacks == {"cholesky"}
    np.testing.assert_allclose(results["y"], evaluate(graph, arguments)["y"], rtol=1e-5)


def test_buffers_are_used_again(backend):
    with Builder() as b:
        x, w = b.input("x", (64, 64)), b.param("w", (64, 64))
        y = x
        for _ in range(8):
            y = y @ w
    graph = b.build({"y": y})
    sizes = [
        backend.build(graph, BuildOptions(memory_planning=planning)).arena // (4 * 64 * 64)
        for planning in (True, False)
    ]
    assert sizes == [2, 7]


def test_errors_name_the_device_and_the_remedy(backend, monkeypatch):
    with pytest.raises(ml.MemoryLimitError, match="has no room for an array of") as error:
        monkeypatch.setattr(backend.host, "largest_buffer", 1 << 20)
        backend.zeros((1 << 10, 1 << 10))
    assert "largest array: 1.05 MB" in str(error.value)
    with pytest.raises(ml.BackendError, match="OpenCL has no device 9") as error:
        ml.CBackend(device="opencl:9").zeros((2,))
    assert "device 0:" in str(error.value) and "mithril-opencl[cpu]" in str(error.value)
    with pytest.raises(ml.OptionError, match="num_threads= concerns CPUs"):
        ml.CBackend(device="opencl", num_threads=2)


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


def test_a_training_step_keeps_its_state_on_the_device(backend):
    pytest.importorskip("mithril_train")
    from mithril.models import Linear, Relu, Sequential

    labels = np.random.default_rng(0).integers(0, 3, 64).astype(np.int32)
    points = (np.eye(3, 4)[labels] + 0.1 * rng.normal(size=(64, 4))).astype(np.float32)
    losses = {}
    for name in ("c", "opencl"):
        trainer = ml.Trainer(
            Sequential(Linear(8), Relu(), Linear(3)),
            ml.Adam(1e-2),
            loss="cross_entropy",
            backend=name,
            seed=0,
            progress=False,
        )
        losses[name] = trainer.fit(points, labels, epochs=2, batch_size=32)["loss"]
    np.testing.assert_allclose(losses["opencl"], losses["c"], rtol=1e-4)
    assert all(isinstance(value, DeviceArray) for value in trainer.params.values())


def test_hosts_are_opened_once(backend):
    assert ml.CBackend(device="opencl").host is backend.host
    assert ("opencl", 0) in device_backends.DeviceBackend.hosts
