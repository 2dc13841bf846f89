"""The OpenVINO backend on the conformance kit: the core set in one program, and the whole kit as a soak test.

OpenVINO compiles each program in 30 ms of processor time, which makes the kit too slow for every run of the tests.
"""

import numpy as np
import pytest

import mithril as ml
from mithril.backend import BuildOptions
from mithril.graph import dtype as as_dtype, evaluate
from mithril.models import AvgPool2d, Linear, MaxPool2d, Relu, Sequential, Sort
from mithril_testing import CORE_SET, BackendConformance, assert_close, backend_cases, tolerance
from mithril_testing.grown import join_graphs


@pytest.mark.soak
class TestOpenVINO(BackendConformance):
    backend = "openvino"
    complete = False
    host = True
    joins = True
    xfail = {
        "max_pool[special]": "the largest element of minus infinities is the least float",
        "symbolic:max_pool[special]": "the largest element of minus infinities is the least float",
        "repeated:max_pool": "the largest element of minus infinities is the least float",
        "rows:float32": "the largest element of minus infinities is the least float",
        "special:erf": "relative errors are up to 3e-5",
        "special:gelu": "nan for infinity, as OpenVINO multiplies it by an approximation of 0",
    }


def test_the_core_set_in_one_program():
    backend, options = ml.OpenVINOBackend(), BuildOptions()
    graphs, arguments = {}, {}
    for case in backend_cases(backend.dtypes, CORE_SET - {"scan"}):
        if case.number == 0 and case.dtype is None:
            graphs[case.id] = case.graph()
            arguments |= {f"{case.id}/{name}": array for name, array in case.inputs().items()}
    graph = join_graphs(list(graphs.items()), "operations")
    executable = backend.build(backend.decomposed(graph, options), options)
    results = executable({}, {name: backend.array(array) for name, array in arguments.items()})
    for name, reference in evaluate(graph, arguments).items():
        assert_close(results[name], reference, tolerance(as_dtype(reference.dtype), 4.0), name)
    assert len(graphs) == 38  # no sample of cast has only these dtypes
    assert not executable.fallbacks


def test_windows_of_a_batch_without_rows():
    model = Sequential(MaxPool2d(2), AvgPool2d(2))
    compiled = ml.compile(model, "openvino", shapes={"input": ["B", 3, 8, 8]}, inference=True)
    for rows, fallbacks in ((2, 0), (0, 1), (2, 1), (0, 1)):
        output = compiled.evaluate({}, {"input": np.ones((rows, 3, 8, 8), np.float32)})["output"]
        np.testing.assert_array_equal(output, np.ones((rows, 3, 2, 2)))
        assert len(compiled.decisions.of("fallback")) == fallbacks


def test_gradients_are_those_by_hand_and_references_run_in_the_model():
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    compiled = ml.compile(Sequential(Linear(8), Relu(), Linear(3), Sort()), "openvino", shapes={"input": [4, 5]})
    params = compiled.randomize_params(seed=0)
    g = np.ones((4, 3), np.float32)
    outputs, gradients = compiled.evaluate(params, {"input": x}, output_gradients={"output": g})
    assert "no lowering, so its NumPy reference runs" in str(compiled.decisions)
    hidden = np.maximum(x @ params["0.weight"].T + params["0.bias"], 0)
    g_hidden = (g @ params["2.weight"]) * (hidden > 0)  # all results have the gradient 1, whatever their order
    expected = {"0.weight": g_hidden.T @ x, "0.bias": g_hidden.sum(0), "2.weight": g.T @ hidden, "2.bias": g.sum(0)}
    unsorted = hidden @ params["2.weight"].T + params["2.bias"]
    np.testing.assert_allclose(outputs["output"], np.sort(unsorted), rtol=1e-4, atol=1e-5)
    for name, array in expected.items():
        np.testing.assert_allclose(gradients[name], array, rtol=1e-4, atol=1e-5)


def test_results_that_are_inputs_are_copies():
    with ml.Builder() as builder:
        x = builder.input("x", (3,))
        y = x + 1.0
    program = ml.OpenVINOBackend().build(builder.build({"x_again": x, "y": y}))
    x = np.arange(3, dtype=np.float32)
    results = program({}, {"x": x})
    assert list(results) == ["x_again", "y"]
    results["x_again"][0] = 7
    assert x[0] == 0


def test_graphs_that_openvino_fails_to_join_are_computed():
    """Compile a graph for which OpenVINO 2026.4 finds a loop when it joins operations."""
    with ml.Builder() as builder:
        graph = builder.build({"iou": ml.ops.box_iou(builder.input("a", (2, 4)), builder.input("b", (3, 4)))})
    corners = np.random.default_rng(0).uniform(0, 1, (5, 2)).astype(np.float32)
    boxes = np.concatenate([corners, corners + 0.5], axis=1)
    arguments, seeds = {"a": boxes[:2], "b": boxes[2:]}, {"iou": np.ones((2, 3), np.float32)}
    results = [
        ml.compile(graph, name).evaluate({}, arguments, output_gradients=seeds, wrt=["a", "b"])
        for name in ("openvino", "ggml")
    ]
    for name, gradient in results[1][1].items():
        np.testing.assert_allclose(results[0][1][name], gradient, rtol=1e-4, atol=1e-5)
