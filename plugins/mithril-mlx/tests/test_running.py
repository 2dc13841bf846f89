"""How MLX programs run: products by a fast BLAS, kernels for composites, compiling, threads, contradictions."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import mithril as ml
from mithril.backend import to_numpy
from mithril.graph.errors import BackendError, OptionError, StrictError
from mithril.models import LSTM, Conv2d, Gelu, If, LayerNorm, Linear, Model, MultiHeadAttention, Relu
from mithril_mlx import execution
from mithril_mlx.mlx_loader import BLAS, mx

LINUX = sys.platform.startswith("linux")


def mlp():
    model = Model()
    model |= Linear(16, name="first")(input="x", output="h")
    model += Gelu()(input="h", output="r")
    model += LayerNorm(name="norm")(input="r", output="n")
    model += Linear(2, name="second")(input="n", output="y")
    return model


def test_embedded_kernels_of_several_convolutions():
    image = Model(Conv2d(3, 8, kernel_size=3, name="a"), Relu(), Conv2d(8, 8, kernel_size=3, name="b"))
    x = random(2, 3, 10, 10)
    plain = ml.compile(image, "mlx", shapes={"input": [2, 3, 10, 10]})
    params = plain.randomize_params(seed=0)
    embedded = ml.compile(image, "mlx", shapes={"input": [2, 3, 10, 10]}, static_inference=True).bind(params)
    expected = np.asarray(plain.evaluate(params, {"input": x})["output"])
    np.testing.assert_allclose(np.asarray(embedded({"input": x})["output"]), expected, rtol=1e-4, atol=1e-5)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(compiled, x, params=None):
    params = compiled.randomize_params(0) if params is None else params
    return np.array(compiled.evaluate(params, {"x": x})["y"])


# -- BLAS ---------------------------------------------------------------------------------------------------------
def in_a_process(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


@pytest.mark.skipif(not LINUX, reason="other platforms have a fast BLAS")
def test_doctor_reports_the_blas():
    assert str(BLAS) in ml.MlxBackend.diagnose().values()
    if not BLAS.fast:
        assert "advice" in ml.MlxBackend.diagnose()


@pytest.mark.skipif(not LINUX, reason="other platforms have a fast BLAS")
def test_the_blas_can_be_left_out_and_comes_too_late_after_mlx():
    code = "import mithril as ml; print(ml.MlxBackend.diagnose()['products on the CPU'])"
    assert "MITHRIL_MLX_BLAS=off" in in_a_process(code, MITHRIL_MLX_BLAS="off")
    assert "imported before" in in_a_process("import mlx.core; " + code)


@pytest.mark.skipif(not BLAS.fast or not LINUX, reason="no fast BLAS here")
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_products_are_right(dtype):
    a, b = (random(37, 53, seed=k).astype(dtype) for k in (1, 2))
    if dtype == "complex64":
        a, b = a + 1j * random(37, 53, seed=3), b - 1j * random(37, 53, seed=4)
    product = np.array(mx.array(a) @ mx.array(b).T)
    np.testing.assert_allclose(product, a @ b.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("m", "n"), [(1, 7), (7, 1), (1, 1)])
@pytest.mark.parametrize("swapped", [(), (0,), (1,), (0, 1)])
def test_products_of_one_row_or_column_are_right(dtype, m, n, swapped):
    """Check that a row, a column and sums are also read from within larger arrays and in the other order."""
    a, b, c = (random(*shape, seed=k).astype(dtype) for k, shape in enumerate([(m, 5), (5, n), (m, n)]))
    with mx.stream(mx.cpu):
        padded = mx.array(np.pad(a, ((2, 1), (1, 3))))[2 : 2 + m, 1:6]
        left, right = (mx.array(x.T.copy()).T if k in swapped else mx.array(x) for k, x in enumerate((a, b)))
        np.testing.assert_allclose(np.array(left @ right), a @ b, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.array(padded @ right), a @ b, rtol=1e-5, atol=1e-5)
        summed = mx.addmm(mx.array(c), left, right, alpha=0.5, beta=2.0)
        np.testing.assert_allclose(np.array(summed), 0.5 * (a @ b) + 2 * c, rtol=1e-5, atol=1e-5)


def test_one_row_reads_bfloat16_weights_unchanged():
    compiled = ml.compile(Model(Linear(64, name="wide")), "mlx", shapes={"input": [1, 96]}, precision="bfloat16")
    x, params = random(1, 96), compiled.randomize_params(seed=0)
    y = np.array(compiled.evaluate(params, {"input": x})["output"].astype(mx.float32))
    w, bias = (np.array(params[f"wide.{name}"].astype(mx.float32)) for name in ("weight", "bias"))
    exact = np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32)) @ w.T
    rounded = np.array((mx.array(exact).astype(mx.bfloat16) + mx.array(bias).astype(mx.bfloat16)).astype(mx.float32))
    np.testing.assert_allclose(y, rounded, rtol=1e-2)


@pytest.mark.skipif(BLAS.threads() is None, reason="this BLAS does not count threads")
def test_threads_are_set_for_the_call_only(monkeypatch):
    seen, before = [], BLAS.threads()
    monkeypatch.setattr(execution.mx, "eval", lambda x, real=mx.eval: (seen.append(BLAS.threads()), real(x)))
    compiled = ml.compile(mlp(), "mlx", shapes={"x": [4, 8]}, num_threads=before + 1)
    run(compiled, random(4, 8))
    assert before + 1 in seen
    assert BLAS.threads() == before
    assert "that of products" in str(compiled.decisions)


# -- programs -----------------------------------------------------------------------------------------------------
def test_composites_run_as_one_kernel():
    model = mlp()
    model |= MultiHeadAttention(16, heads=2, causal=True, name="a")(query="s", output="z")
    compiled = ml.compile(model, "mlx", shapes={"x": [4, 8], "s": [1, 4, 16]}, inference=True)
    assert "mx.fast.layer_norm(" in compiled.source
    assert 'mask="causal"' in compiled.source


def test_a_fused_activation_keeps_the_product_with_bias():
    levels = {
        level: ml.compile(mlp(), "mlx", shapes={"x": [8, 8]}, optimization_level=level) for level in ("low", "medium")
    }
    assert [program.source.count("mx.addmm(") for program in levels.values()] == [2, 2]


def test_compiled_programs_give_the_same():
    plain = ml.compile(mlp(), "mlx", shapes={"x": [None, 8]})
    compiled = ml.compile(mlp(), "mlx", shapes={"x": [None, 8]}, jit=True)
    for n in (2, 5):
        np.testing.assert_allclose(run(compiled, random(n, 8)), run(plain, random(n, 8)), rtol=1e-5, atol=1e-6)


def test_gradients_of_both_kinds_agree():
    gradients = []
    for kind in ("graph", "native"):
        compiled = ml.compile(mlp(), "mlx", shapes={"x": [4, 8]}, autodiff=kind)
        g = np.ones((4, 2), np.float32)
        gradients.append(compiled.evaluate(compiled.randomize_params(0), {"x": random(4, 8)}, g)[1])
    for name, x in gradients[0].items():
        np.testing.assert_allclose(np.array(x), np.array(gradients[1][name]), rtol=1e-3, atol=1e-5)


EMPTY = {
    "convolution": (lambda: Model(Conv2d(2, 3, 3, padding=1)), [0, 2, 5, 5]),
    "scan": (lambda: Model(LSTM(3)), [0, 4, 2]),
    "flip": (lambda: Model.create(outputs={"output": ml.ops.flip(Linear(3)(ml.IOKey("input")), axis=1)}), [0, 4, 2]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_gradients_of_an_empty_batch_are_zero(name):
    make, shape = EMPTY[name]
    compiled = ml.compile(make(), "mlx", shapes={"input": shape})
    params = {n: mx.array(x) for n, x in compiled.randomize_params(0).items()}
    x = np.zeros(shape, np.float32)
    outputs = compiled.evaluate(params, {"input": x})
    gradients = compiled.evaluate(params, {"input": x}, output_gradients=dict(outputs))[1]
    function = compiled.to_function(training=True)
    by_mlx = mx.grad(lambda p: sum(y.sum() for y in function(p, {"input": mx.array(x)}).values()))(params)
    for n in params:
        assert not np.array(gradients[n]).any()
        assert not np.array(by_mlx[n]).any()


def test_differentiation_of_empty_arrays_by_mlx_is_refused():
    compiled = ml.compile(mlp(), "mlx", shapes={"x": [None, 8]}, autodiff="native")
    with pytest.raises(ml.MithrilError) as error:
        compiled.evaluate(compiled.randomize_params(0), {"x": random(0, 8)}, np.ones((0, 2), np.float32))
    assert str(error.value) == (
        "the automatic differentiation of MLX does not support empty arrays\n"
        "  input 'x' has shape [0, 8]\n"
        "hint: omit autodiff='native': mithril's own differentiation supports them"
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_slopes_of_relu_are_chosen_bit_by_bit(dtype):
    """Also of cotangents that a product with 0 would turn into nan."""
    model = Model()
    model += Relu()
    compiled = ml.compile(model, "mlx", shapes={"input": [None]}, types={"input": dtype}, trainable=["input"])
    x, g = (compiled.backend.array(v, dtype) for v in ([-1.0, 0.0, 2.0, -3.0], [np.inf, np.nan, -0.5, 1.0]))
    gradient = compiled.evaluate({}, {"input": x}, g, wrt=("input",))[1]["input"]
    assert "masked(" in compiled.source
    np.testing.assert_array_equal(compiled.backend.to_numpy(gradient).astype(np.float32), [0, 0, -0.5, 0])


def test_control_flow_stays_python_and_says_so():
    model = Model()
    model |= If("flag", Relu(), Linear(3))(input="x", flag="flag", output="y")
    options = {"shapes": {"x": [2, 3], "flag": []}, "types": {"flag": "bool"}, "jit": True}
    assert [d.kind for d in ml.compile(model, "mlx", **options).decisions] == ["fallback"]
    with pytest.raises(StrictError):
        ml.compile(model, "mlx", strict=True, **options)


# -- contradictions -----------------------------------------------------------------------------------------------
def test_conflicting_devices_are_rejected():
    with pytest.raises(BackendError, match="compute on one device"):
        ml.MlxBackend(device_mesh=(2,))
    with pytest.raises(OptionError, match="'shapeless' is unknown to the MLX backend"):
        ml.compile(mlp(), "mlx", shapes={"x": [2, 8]}, jit=True, jit_options={"shapeless": True})
    if not mx.is_available(mx.gpu):
        with pytest.raises(BackendError, match="MLX has no device 'gpu' here"):
            ml.MlxBackend(device="gpu")


@pytest.mark.gpu
def test_runs_on_a_gpu():
    if not mx.is_available(mx.gpu):
        pytest.skip("no GPU")
    on_cpu = ml.compile(mlp(), ml.MlxBackend(device="cpu"), shapes={"x": [2, 8]})
    on_gpu = ml.compile(mlp(), ml.MlxBackend(device="gpu"), shapes={"x": [2, 8]})
    np.testing.assert_allclose(run(on_gpu, random(2, 8)), run(on_cpu, random(2, 8)), rtol=1e-3, atol=1e-4)


def test_gradients_of_a_mixture_of_experts_under_mx_compile():
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    gradients = []
    for jit in (False, True):
        model = Model(ml.models.MixtureOfExperts(5, 6, active=2))
        compiled = ml.compile(model, "mlx", shapes={"input": [2, 3, 4]}, jit=jit)
        _, slopes = compiled.evaluate(compiled.randomize_params(0), {"input": x}, x)
        gradients.append({name: ml.backend.to_numpy(g) for name, g in slopes.items()})
    for name, slope in gradients[0].items():
        assert np.abs(slope).max() > 0
        np.testing.assert_allclose(gradients[1][name], slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.T, lambda x: x[:, 1]])
def test_other_engines_read_arrays_of_bfloat16(layout):
    x = layout(mx.array([[1.5, 2.0], [3.0, -4.0]], dtype=mx.bfloat16))
    array = to_numpy(x)
    assert array.dtype.name == "bfloat16"
    np.testing.assert_array_equal(array.astype(np.float32), np.asarray(x.astype(mx.float32)))
