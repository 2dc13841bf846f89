"""Programs on a device: training, control flow, steps of the host, memory, errors."""

from dataclasses import replace

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.backend import BuildOptions
from mithril.graph import Builder, evaluate
from mithril_cbackend.devices.model import BROWSER

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
