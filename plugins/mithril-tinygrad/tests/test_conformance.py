"""The tinygrad backend on the conformance kit: the core set in one program, and the whole kit as a soak test.

tinygrad takes 0.3 s of the processor for each program, which makes the kit too slow for every run of the tests.
"""

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.backend import BuildOptions
from mithril.graph import dtype as as_dtype, evaluate
from mithril.models import Linear, Relu, Sequential
from mithril_testing import CORE_SET, BackendConformance, assert_close, backend_cases, tolerance
from mithril_testing.grown import join_graphs


@pytest.mark.soak
class TestTinygrad(BackendConformance):
    backend = "tinygrad"
    complete = False
    host = True
    joins = True
    xfail = {
        "special:sin": "of large numbers",
        "special:cos": "of large numbers",
        "special:tan": "of large numbers",
        "special:round": "the sign of zero",
        "special:sinh": "relative errors of small numbers",
        "special:gelu": "infinity near the largest float",
        "gradient:box_iou[0]": "tinygrad 0.14 fails to fold a quotient of constants (KeyError: Ops.FDIV)",
        "rows:float32": "logsumexp of rows with infinity is nan",
    }


def test_the_core_set_in_one_program():
    backend, options = ml.TinygradBackend(), BuildOptions(jit=False)
    graphs, arguments = {}, {}
    for case in backend_cases(backend.dtypes, CORE_SET):
        if case.number == 0 and case.dtype is None:
            graphs[case.id] = case.graph()
            arguments |= {f"{case.id}/{name}": array for name, array in case.inputs().items()}
    graph = join_graphs(list(graphs.items()), "operations")
    executable = backend.build(backend.decomposed(graph, options), options)
    results = executable({}, {name: backend.array(array) for name, array in arguments.items()})
    for name, reference in evaluate(graph, arguments).items():
        assert_close(backend.to_numpy(results[name]), reference, tolerance(as_dtype(reference.dtype), 4.0), name)
    # samples of scan have regions, and those of cast other dtypes
    assert {case.partition("[")[0] for case in graphs} == CORE_SET - {"cast", "scan"}
    assert not executable.fallbacks


X = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)


def test_captured_gradients_are_those_by_hand():
    compiled = ml.compile(Sequential(Linear(8), Relu(), Linear(3)), "tinygrad", shapes={"input": [4, 5]})
    params = compiled.randomize_params(seed=0)
    w = {name: p.numpy() for name, p in params.items()}
    g = np.ones((4, 3), np.float32)
    for x in (X, -X, 2 * X, X + 1):  # a TinyJit runs once, captures the second call, and replays
        arguments = {"input": compiled.backend.array(x)}, {"output": compiled.backend.array(g)}
        outputs, gradients = compiled.evaluate(params, arguments[0], output_gradients=arguments[1])
        hidden = np.maximum(x @ w["0.weight"].T + w["0.bias"], 0)
        g_hidden = (g @ w["2.weight"]) * (hidden > 0)
        expected = {"0.weight": g_hidden.T @ x, "0.bias": g_hidden.sum(0), "2.weight": g.T @ hidden, "2.bias": g.sum(0)}
        np.testing.assert_allclose(
            outputs["output"].numpy(), hidden @ w["2.weight"].T + w["2.bias"], rtol=1e-4, atol=1e-5
        )
        for name, array in expected.items():
            np.testing.assert_allclose(gradients[name].numpy(), array, rtol=1e-4, atol=1e-5)


def test_calls_share_no_memory_and_take_one_array_twice():
    with ml.Builder() as builder:
        x, y = builder.input("x", (3,)), builder.input("y", (3,))
        graph = builder.build({"x_again": x, "difference": x - y})
    backend = ml.TinygradBackend()
    program = backend.build(graph)
    arrays = [backend.array(np.arange(3, dtype=np.float32) + k) for k in range(5)]
    partners = [arrays[k] for k in (1, 1, 3, 4)]  # the second call, which a TinyJit captures, has one array twice
    results = [program({}, {"x": a, "y": b}) for a, b in zip(arrays[:4], partners, strict=True)]
    assert all(r["x_again"].uop.base.buffer is not a.uop.base.buffer for r, a in zip(results, arrays[:4], strict=True))
    for k, result in enumerate(results):
        np.testing.assert_array_equal(result["x_again"].numpy(), np.arange(3) + k)
        np.testing.assert_array_equal(result["difference"].numpy(), [0 if k == 1 else -1] * 3)


@pytest.mark.parametrize("branches", [False, True])
def test_programs_of_python_are_not_captured(branches):
    with ml.Builder() as builder:
        x = builder.input("x", (4, 5))
        y = ops.cond(ops.sum(x) > 0.0, lambda z: z, lambda z: -z, x) if branches else ops.sort(x)
    graph = builder.build({"y": y})
    compiled = ml.compile(graph, "tinygrad")
    for array in (X, -X, 2 * X):
        result = compiled.evaluate({}, {"x": compiled.backend.array(array)})["y"]
        np.testing.assert_array_equal(result.numpy(), evaluate(graph, {"x": array})["y"])
    assert "no TinyJit, as Python runs at each call" in str(compiled.decisions)


def test_without_a_compiler_the_error_names_two(monkeypatch):
    from mithril_tinygrad import arrays

    monkeypatch.setattr(arrays.shutil, "which", lambda name: None)
    monkeypatch.setattr(arrays, "find_spec", lambda name: None)
    with pytest.raises(ml.BackendError, match=r"clang, which is not installed(?s:.)*mithril-tinygrad\[clang\]"):
        arrays.clang.__wrapped__()
