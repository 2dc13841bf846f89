"""``MlxKernelFusion``: patterns fire, are checked, and give way where they fail; generated kernels are right."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import mithril as ml
from mithril.graph import trace
from mithril.graph.dims import TensorType
from mithril.graph.dtypes import dtype
from mithril.graph.evaluation import evaluate
from mithril.models import Add, MatMul, Model
from mithril.ops import add, exp, greater, maximum, relu, sigmoid, silu, sqrt, sum, tanh, where
from mithril_mlx import FusionPattern, MlxKernelFusion
from mithril_mlx.metal import metal_kernel
from mithril_mlx.mlx_loader import mx

COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def random(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def close(a, b, rtol=1e-5):
    np.testing.assert_allclose(np.array(a), np.array(b), rtol=rtol, atol=1e-6)


@COMPILER
def test_add_and_multiply():
    fusion = MlxKernelFusion()
    a, b, c = (mx.array(x) for x in ([1.0, 2.0], [3.0, 4.0], [2.0, 2.0]))
    assert fusion.try_fuse(["add", "multiply"], [a, b, c]).tolist() == [8.0, 12.0]
    assert not fusion.decisions.of("fallback") and list(fusion._verdicts.values()) == [True]


def test_matmul_and_bias():
    fusion = MlxKernelFusion()
    x, w, b = random(4, 8), random(8, 3), random(3)
    close(fusion.try_fuse(["matmul", "add"], [x, w, b]), x @ w + b)
    assert not len(fusion.decisions)


@COMPILER
def test_rows_of_activations_of_any_length():
    fusion, x = MlxKernelFusion(), random(4, 8)
    close(fusion.try_fuse(["relu", "tanh", "sigmoid"], [x]), mx.sigmoid(mx.tanh(mx.maximum(x, 0))))
    assert [key[1] for key in fusion._verdicts] == [("relu", "tanh", "sigmoid")]


def test_a_sequence_is_split_by_patterns():
    fusion = MlxKernelFusion()
    x, w, b, d = random(4, 8), random(8, 3), random(3), random(4, 3)
    result = fusion.try_fuse(["exp", "matmul", "add", "subtract"], [x, w, b, d])
    close(result, mx.exp(x) @ w + b - d, rtol=1e-4)
    assert [key[0] for key in fusion._verdicts] == ["matmul_add_bias"]


def test_uncovered_sequences_return_none():
    assert MlxKernelFusion().try_fuse(["exp", "log"], [random(3)]) is None
    with pytest.raises(ml.OperationError, match="unknown operation 'frobnicate'"):
        MlxKernelFusion().try_fuse(["frobnicate"], [random(3)])
    with pytest.raises(ml.InputError, match="work on 3 arrays, not on 2"):
        MlxKernelFusion().try_fuse(["matmul", "add"], [random(3, 3), random(3, 3)])


def test_rounding_is_only_eliminated_on_request():
    x, scale = random(4, 8), mx.array(0.1)
    assert MlxKernelFusion().try_fuse(["quantize", "dequantize"], [x, scale, scale]) is None
    fusion = MlxKernelFusion(eliminate_quantization=True)
    assert (fusion.try_fuse(["quantize", "dequantize"], [x, scale, scale]) == x).all().item()


def test_a_pattern_of_ones_own():
    used = []

    def relu_add(arrays):
        used.append(1)
        x, y = arrays
        return mx.maximum(x, 0) + y

    fusion = MlxKernelFusion()
    fusion.add_pattern(FusionPattern("custom_relu_add", ("relu", "add"), relu_add))
    x, y = random(3, seed=1), random(3, seed=2)
    for _ in range(2):
        close(fusion.try_fuse(["relu", "add"], [x, y]), mx.maximum(x, 0) + y)
    assert len(used) == 2 + 3, "each of two calls, and three trials after the first"
    with pytest.raises(ml.InputError, match="pattern 'custom_relu_add' already"):
        fusion.add_pattern(FusionPattern("custom_relu_add", ("relu",)))


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        (lambda arrays: arrays[0] + arrays[1], "differ by"),
        (lambda arrays: (arrays[0] + arrays[1])[:1], "not mlx.core.float32"),
        (lambda arrays: 1 / 0, "ZeroDivisionError"),
        (lambda arrays: None, "a NoneType"),
    ],
)
def test_wrong_patterns_fall_back_once_and_are_recorded(implementation, message):
    tried = []

    def counted(arrays):
        tried.append(1)
        return implementation(arrays)

    fusion, x, y = MlxKernelFusion(), mx.array([-1.0, 2.0, -3.0]), random(3, seed=2)
    fusion.add_pattern(FusionPattern("wrong", ("relu", "add"), counted))
    for _ in range(2):
        close(fusion.try_fuse(["relu", "add"], [x, y]), mx.maximum(x, 0) + y)
    (decision,) = fusion.decisions.of("fallback")
    assert message in decision.message and len(tried) == 1


def test_the_patterns_are_a_pass_for_models():
    model = Model()
    model |= MatMul()(left="x", right="w", output="h")
    model |= Add()(left="h", right="b", output="y")
    fusion = MlxKernelFusion()
    fusion.add_rule(lambda x: relu(relu(x)), lambda x: relu(x), name="relu twice")
    shapes = {"x": [4, 8], "w": [8, 3], "b": [3]}
    compiled = ml.compile(model, "mlx", shapes=shapes, custom_passes=[fusion.rules], optimization_level="none")
    assert "linear" in str(compiled.programs[0].graph)
    x, w, b = random(4, 8), random(8, 3), random(3)
    close(compiled.evaluate({}, {"x": x, "w": w, "b": b})["y"], x @ w + b, rtol=1e-4)


# -- kernels ------------------------------------------------------------------------------------------------------
def of(function, *kinds, shape=(5, 7)):
    return trace(function, [TensorType(dtype(k), shape) for k in kinds])


GRAPHS = {
    "arithmetic": of(lambda x, y: (x + y) * 2.0 - x / (y * y + 1.0), "float32", "float32"),
    "activations": of(lambda x: sigmoid(tanh(relu(x))) + silu(x), "float32"),
    "functions": of(lambda x: sqrt(exp(x)) + maximum(x, 0.5), "float32"),
    "choices": of(lambda x, y: where(greater(x, y), x, y * 0.5), "float32", "float32"),
    "nan is kept": of(lambda x: relu(x), "float32"),
    "halves": of(lambda x, y: (x + y) * x, "float16", "float16"),
    "integers": of(lambda x, y: x * y + 3, "int32", "int32"),
}


def meaning(graph, arrays):
    return list(evaluate(graph, dict(zip((i.name for i in graph.inputs), arrays, strict=True))).values())


@COMPILER
@pytest.mark.parametrize("name", GRAPHS)
def test_generated_kernels_match_the_graph(name):
    graph, rng = GRAPHS[name], np.random.default_rng(0)
    arrays = [(3 * rng.standard_normal(i.type.shape)).astype(i.type.dtype.numpy) for i in graph.inputs]
    for array in arrays:
        if array.dtype.kind == "f":
            array.flat[0] = np.nan
    result = metal_kernel(graph).run_as_cpp(*arrays)
    (expected,) = meaning(graph, arrays)
    rtol = 2e-3 if name == "halves" else 1e-5
    np.testing.assert_allclose(result, expected, rtol=rtol, atol=1e-6)


def test_the_text_of_a_kernel():
    kernel = metal_kernel(of(lambda x, y: (x + y) * 2.0, "float32", "float32"))
    assert kernel.inputs == ("in0", "in1")
    assert [line.strip() for line in kernel.source.splitlines()] == [
        "uint k = thread_position_in_grid.x;",
        "float v0 = float(in0[k]);",
        "float v1 = float(in1[k]);",
        "float v2 = float(v0 + v1);",
        "float v3 = float(2.0f);",
        "float v4 = float(v2 * v3);",
        "out[k] = v4;",
    ]
    assert "extern" in kernel.cpp()


def test_unsupported_op_in_kernel_is_reported():
    with pytest.raises(ml.UnsupportedError, match="arrays of one shape"):
        metal_kernel(of(lambda x: sum(x, axis=0), "float32"))
    with pytest.raises(ml.UnsupportedError, match="float64|no '"):
        metal_kernel(of(lambda x: add(x, x), "float64"))


@pytest.mark.gpu
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs Metal")
@pytest.mark.parametrize("name", GRAPHS)
def test_kernels_run_on_metal(name):
    graph, rng = GRAPHS[name], np.random.default_rng(0)
    arrays = [(3 * rng.standard_normal(i.type.shape)).astype(i.type.dtype.numpy) for i in graph.inputs]
    result = metal_kernel(graph).run(*map(mx.array, arrays))
    np.testing.assert_allclose(np.array(result), meaning(graph, arrays)[0], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_pattern_that_holds_for_the_first_arrays_only_is_not_used(dtype):
    fusion = MlxKernelFusion()
    fusion.add_pattern(FusionPattern("no_relu", ("relu", "add"), lambda arrays: arrays[0] + arrays[1]))
    one = mx.array([1.0], dtype)
    assert fusion.try_fuse(("relu", "add"), [mx.array([5.0], dtype), one]).item() == 6.0
    assert fusion.try_fuse(("relu", "add"), [mx.array([-5.0], dtype), one]).item() == 1.0
    assert "'no_relu' is not used: its results differ" in str(fusion.decisions)


def test_right_patterns_pass_all_trials():
    fusion = MlxKernelFusion()
    fusion.add_pattern(FusionPattern("logs", ("log", "add"), lambda arrays: mx.log(arrays[0]) + arrays[1]))
    x, y = mx.array([1.0, 2.0, 3.0]), mx.array([1.0, 1.0, 1.0])
    assert mx.allclose(fusion.try_fuse(("log", "add"), [x, y]), mx.log(x) + y)
    assert not list(fusion.decisions)
