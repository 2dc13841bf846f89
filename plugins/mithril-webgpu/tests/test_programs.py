"""Programs on a device: training, control flow, steps of the host, memory, errors."""

from dataclasses import replace

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.backend import BuildOptions
from mithril.derivatives import gradients
from mithril.graph import Builder, evaluate
from mithril_cbackend.devices import backend as device_backends
from mithril_cbackend.devices.host import DeviceArray
from mithril_cbackend.devices.model import BROWSER
from mithril_cbackend.devices.program import Run

rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def backend():
    return ml.CBackend(device="webgpu")


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
    with pytest.raises(ml.BackendError, match="WebGPU has no device 9") as error:
        ml.CBackend(device="webgpu:9").zeros((2,))
    assert "device 0:" in str(error.value) and "mesa-vulkan-drivers" in str(error.value)
    with pytest.raises(ml.OptionError, match="num_threads= concerns CPUs"):
        ml.CBackend(device="webgpu", num_threads=2)


def test_wgsl_has_no_elements_of_64_bits(backend):
    for dtype in ("float64", "int64"):
        with Builder() as b:
            y = b.input("x", (2,), dtype) * b.constant(np.array(2, dtype))
        with pytest.raises(ml.MithrilError, match=f"does not support {dtype}"):
            backend.build(b.build({"y": y}))


def test_nan_infinity_and_small_dtypes(backend):
    with Builder() as b:
        x, zero, c = b.input("x", (7,)), b.input("zero", ()), b.input("c", (4,), "int8")
        outputs = {
            "maximum": ops.maximum(x, x * zero),
            "nan": ops.isnan(x),
            "argmax": ops.argmax(x, axis=0),
            "half": ops.cast(x, dtype="float16"),
            "wrapped": c + c,
            "smallest": ops.cast(c, dtype="int32") * 0 + b.constant(np.int32(-(2**31))),
        }
    graph = b.build(outputs)
    x = np.array([1.5, -0.0, np.inf, -np.inf, np.nan, 65519.0, 3e-6], np.float32)
    arguments = {"x": x, "zero": np.float32(0), "c": np.array([127, -128, 5, -6], np.int8)}
    _, results = run(backend, graph, arguments)
    with np.errstate(all="ignore"):
        expected = evaluate(graph, arguments)
    for name, value in expected.items():
        assert results[name].dtype == value.dtype
        np.testing.assert_array_equal(results[name], value)


def test_functions_are_accurate(backend):
    """Compare on every driver: WGSL allows sin to be wrong by 2**-11 and asin by 7e-5."""
    x = np.concatenate([np.geomspace(1e-30, 80, 400), np.geomspace(1e-3, 1e30, 400)]).astype(np.float32)
    x = np.concatenate([x, -x])
    within = np.linspace(-1, 1, 1600, dtype=np.float32)
    functions = ("sin", "cos", "exp", "expm1", "tanh", "erf", "sinh", "cosh", "atan", "asinh")
    of_positive, of_units = ("log", "log1p", "sqrt"), ("asin", "acos", "atanh")
    with Builder() as b:
        a, p, w = b.input("x", x.shape), b.input("p", x.shape), b.input("w", within.shape)
        outputs = {n: getattr(ops, n)(a) for n in functions} | {n: getattr(ops, n)(p) for n in of_positive}
        outputs |= {n: getattr(ops, n)(w) for n in of_units} | {"acosh": ops.acosh(ops.maximum(p, 1.0))}
        outputs |= {"atan2": ops.atan2(a, w), "pow": p ** (w * 20.0), "mod": a % (w * 3.0)}
    graph = b.build(outputs)
    arguments = {"x": x, "p": np.abs(x), "w": within}
    _, results = run(backend, graph, arguments)
    with np.errstate(all="ignore"):
        expected = evaluate(graph, arguments)
    for name, value in expected.items():
        np.testing.assert_allclose(results[name], value, rtol=4e-6, atol=1e-9, err_msg=name)


def test_names_that_wgsl_reserves(backend):
    with Builder() as b:
        y = b.input("target", (3,)) + b.input("abs", (3,)) * b.input("filter", (3,))
    graph = b.build({"loop": y})
    arguments = {i.name: rng.normal(size=3).astype(np.float32) for i in graph.arguments}
    _, results = run(backend, graph, arguments)
    np.testing.assert_allclose(results["loop"], evaluate(graph, arguments)["loop"], rtol=1e-6)


def test_more_groups_than_one_dimension_has(backend):
    """Write one element per thread; 64 threads of 65,535 groups are one dimension of a launch."""
    with Builder() as b:
        y = b.input("x", (64 * 65535 + 100,)) * 2.0
    x = np.arange(64 * 65535 + 100, dtype=np.float32)
    _, results = run(backend, b.build({"y": y}), {"x": x})
    np.testing.assert_array_equal(results["y"], x * 2)


@pytest.fixture
def within_default_limits(backend, monkeypatch):
    """Return the backend as in a browser, with eight arrays for a launch."""
    monkeypatch.setattr(backend.host, "model", replace(backend.host.model, buffers=BROWSER.buffers))
    return backend


def test_fusion_ends_where_a_launch_binds_no_further_array(within_default_limits):
    with Builder() as b:
        xs = [b.input(f"x{k}", (5, 8)) for k in range(20)]
        total = sum((ops.tanh(x) * float(k) for k, x in enumerate(xs)), start=xs[0] * 0.5)
        rows = ops.softmax(total, axis=-1) * xs[3] + xs[4] * xs[5] - xs[6] * xs[7] + xs[8] * xs[9]
        product = ops.transpose(xs[1], perm=(1, 0)) @ xs[2]
        epilogue = ops.reshape(
            sum((ops.reshape(x, shape=(8, 5)) for x in xs[10:19]), start=product[:, :5]), shape=(40,)
        )
    graph = b.build({"total": total, "rows": rows, "epilogue": epilogue})
    arguments = {i.name: rng.normal(size=i.type.shape).astype(np.float32) for i in graph.arguments}
    executable, results = run(within_default_limits, graph, arguments)
    for name, expected in evaluate(graph, arguments).items():
        np.testing.assert_allclose(results[name], expected, rtol=1e-5, atol=1e-6)
    launches = executable.program.launches
    assert max(len(launch.arguments) for launch in launches) == 8
    assert len(launches) < 15 < len(graph.nodes)  # still fused


def test_long_concatenations_become_trees(within_default_limits):
    with Builder() as b:
        xs = [b.input(f"x{k}", (2, k % 3 + 1)) for k in range(60)]
        y = ops.concat(*xs, axis=1)
    graph = b.build({"y": y})
    arguments = {i.name: rng.normal(size=i.type.shape).astype(np.float32) for i in graph.arguments}
    executable, results = run(within_default_limits, graph, arguments)
    np.testing.assert_array_equal(results["y"], evaluate(graph, arguments)["y"])
    assert max(len(launch.arguments) for launch in executable.program.launches) == 8


def test_a_training_step_keeps_its_state_on_the_device(backend):
    pytest.importorskip("mithril_train")
    from mithril.models import Linear, Relu, Sequential

    labels = np.random.default_rng(0).integers(0, 3, 64).astype(np.int32)
    points = (np.eye(3, 4)[labels] + 0.1 * rng.normal(size=(64, 4))).astype(np.float32)
    losses = {}
    for name in ("c", "webgpu"):
        trainer = ml.Trainer(
            Sequential(Linear(8), Relu(), Linear(3)),
            ml.Adam(1e-2),
            loss="cross_entropy",
            backend=name,
            seed=0,
            progress=False,
        )
        losses[name] = trainer.fit(points, labels, epochs=2, batch_size=32)["loss"]
    np.testing.assert_allclose(losses["webgpu"], losses["c"], rtol=1e-4)
    assert all(isinstance(value, DeviceArray) for value in trainer.params.values())


def test_hosts_are_opened_once(backend):
    assert ml.CBackend(device="webgpu").host is backend.host
    assert ("webgpu", 0) in device_backends.DeviceBackend.hosts
