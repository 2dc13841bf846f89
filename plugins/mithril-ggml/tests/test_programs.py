"""Whole programs: against the references at sizes where other kernels are chosen, memory, threads, views."""

import threading

import numpy as np
import pytest
from random_graphs import Maker

import mithril as ml
from mithril.backend import openblas
from mithril.backend.base import BuildOptions
from mithril.derivatives import gradients
from mithril.graph import Builder
from mithril.graph.decomposition import decompose
from mithril.graph.errors import InputError, MemoryLimitError, OptionError
from mithril.graph.evaluation import evaluate
from mithril.graph.registry import operation as op
from mithril.models import BatchNorm2d, Conv2d, Flatten, Gelu, Linear, Model, Relu

rng = np.random.default_rng(0)


def run(graph, arrays, backend=None, **options):
    params = {i.name: arrays[i.name] for i in graph.arguments if i.role == "param"}
    inputs = {i.name: arrays[i.name] for i in graph.arguments if i.role != "param"}
    executable = (backend or ml.GGMLBackend()).build(graph, BuildOptions(**options))
    return executable(params, inputs)


def near(actual, expected, name=""):
    with np.errstate(all="ignore"):
        finite = np.isfinite(expected)
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert (np.isnan(actual) == np.isnan(expected)).all() and (np.isinf(actual) == np.isinf(expected)).all(), name
        scale = np.abs(expected[finite]).max(initial=1e-3)
        assert np.abs(actual - expected)[finite].max(initial=0) <= 2e-4 * scale, name


@pytest.mark.parametrize("block", range(10))
def test_random_programs(block):
    """Sixty graphs each, of up to forty operations, with views, broadcasting, up to six axes."""
    compared = 0
    for seed in range(block * 60, block * 60 + 60):
        maker = Maker(seed)
        graph = maker.graph(40)
        expected = evaluate(graph, maker.arrays)
        perturbed = evaluate(graph, {n: a * np.float32(1 + 1e-6) for n, a in maker.arrays.items()})
        for name, value in run(graph, maker.arrays).items():
            with np.errstate(all="ignore"):  # where rounding errors grow, as in the sine of large numbers
                shaky = np.abs(perturbed[name] - expected[name]).max(initial=0)
            if np.isfinite(shaky) and shaky < 1e-5 * np.abs(expected[name]).max(initial=1e-3):
                near(value, expected[name], f"seed {seed}, {name}")
                compared += 1
    assert compared > 100


UNARY = ["tanh", "sigmoid", "silu", "gelu", "relu", "exp", "sin", "square", "erf", "floor", "neg", "abs", "softplus"]


@pytest.mark.parametrize("name", [*UNARY, "softmax", "log_softmax", "layer_norm", "rms_norm", "logsumexp", "mish"])
@pytest.mark.parametrize("shape", [(3, 5), (70, 130), (2, 3, 40, 50)])
def test_sizes_choose_kernels_not_values(name, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    with Builder() as b:
        y = op(name)(b.input("x", shape))
    graph = b.build({"y": y})
    near(run(graph, {"x": x})["y"], evaluate(graph, {"x": x})["y"])
    backward = gradients(graph, ["y"], ["x"])
    if all(i.name in ("x", "grad/y") for i in backward.arguments):
        arrays = {"x": x, "grad/y": rng.standard_normal(graph.outputs[0].shape).astype(np.float32)}
        near(run(backward, arrays)["grad/x"], evaluate(backward, arrays)["grad/x"])


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 200])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_many_and_few_rows(rows, transposed):
    a = rng.standard_normal((rows, 300)).astype(np.float32)
    b = rng.standard_normal((120, 300) if transposed else (300, 120)).astype(np.float32)
    with Builder() as builder:
        w = builder.param("b", b.shape)
        y = op("matmul")(builder.input("a", a.shape), op("transpose")(w) if transposed else w)
    graph = builder.build({"y": y})
    near(run(graph, {"a": a, "b": b})["y"], a @ (b.T if transposed else b))


def chain(n=100, size=16):
    with Builder() as b:
        x, y = b.input("x", (size,)), b.input("y", (size,))
        z = x
        for _ in range(n):
            z = z + y
    return b.build({"z": z})


def test_memory_is_planned_and_reused():
    executable = ml.GGMLBackend().build(chain())
    assert executable.plan.size <= 3 * 64 < executable.plan.total
    assert executable.plan.in_place >= 99
    assert len(executable.segments) == 1


def test_memory_limit_is_checked_before_anything_runs():
    graph = chain(4, 1 << 20)
    with pytest.raises(MemoryLimitError, match="mem_size allows 1.05 MB"):
        ml.GGMLBackend(mem_size="1MiB").build(graph)
    assert ml.GGMLBackend(mem_size="64MiB").build(graph).memory.total < 64 << 20
    for wrong in (0, -1, 1.5, "much", True):
        with pytest.raises(OptionError):
            ml.GGMLBackend(mem_size=wrong)


@pytest.mark.parametrize("static", [False, True])
def test_results_are_the_callers_own(static):
    x = {"x": np.ones(16, np.float32), "y": np.ones(16, np.float32)}
    executable = ml.GGMLBackend().build(chain(), BuildOptions(static_inference=static))
    first = executable({}, x)["z"]
    executable({}, {"x": x["x"] * 5, "y": x["y"]})
    assert (first == 101).all()


def test_large_inputs_are_read_where_they_are():
    big = rng.standard_normal((300, 300)).astype(np.float32)
    with Builder() as b:
        y = b.input("x", big.shape) * 2.0
    executable = ml.GGMLBackend().build(b.build({"y": y}))
    assert (executable({}, {"x": big})["y"] == big * 2).all()
    big[0, 0] = 7  # the same object with other contents
    assert executable({}, {"x": big})["y"][0, 0] == 14
    assert (executable({}, {"x": big.T})["y"] == big.T * 2).all()
    assert executable.plan.size <= big.nbytes + 64


def test_wrong_arrays_are_refused():
    executable = ml.GGMLBackend().build(chain())
    good = np.ones(16, np.float32)
    for wrong in (np.ones(15, np.float32), np.ones(16), np.ones((16, 1), np.float32), 3.0, None, "x"):
        with pytest.raises(InputError):
            executable({}, {"x": good, "y": wrong})
    with pytest.raises(InputError, match="missing: 'y'"):
        executable({}, {"x": good})


def test_threads_do_not_mix_their_calls():
    executable = ml.GGMLBackend().build(chain(50))
    wrong = []

    def work(k):
        x = {"x": np.full(16, k, np.float32), "y": np.ones(16, np.float32)}
        for _ in range(300):
            if not (executable({}, x)["z"] == k + 50).all():
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_two_threads_of_ggml():
    x = rng.standard_normal((8, 256)).astype(np.float32)
    w = rng.standard_normal((256, 256)).astype(np.float32)
    with Builder() as b:
        y = op("linear")(b.input("x", x.shape), b.param("w", w.shape))
    near(run(b.build({"y": y}), {"x": x, "w": w}, ml.GGMLBackend(num_threads=2))["y"], x @ w.T)


def test_native_semantics_may_use_ggmls_relu():
    with Builder() as b:
        y = op("relu")(b.input("x", (4,)))
    graph = b.build({"y": y})
    assert "relu" in ml.GGMLBackend().build(graph, BuildOptions(semantics="native")).listing
    x = {"x": np.array([np.nan, -1, 2, 0], np.float32)}
    assert np.isnan(run(graph, x)["y"][0])


def test_a_training_loop_of_the_users_own(numpy_backend):
    """The gradient program runs on ggml, the update on NumPy: the losses equal those of the NumPy backend."""
    from mithril.models import Linear, Relu

    model = ml.Model()
    model += Linear(32)
    model += Relu()
    model += Linear(1)
    x = rng.standard_normal((64, 8)).astype(np.float32)
    target = np.sin(x[:, :1])

    def losses(backend):
        compiled = ml.compile(model, backend, shapes={"input": [64, 8]})
        params = compiled.randomize_params(seed=0)
        history = []
        for _ in range(100):
            out = compiled.evaluate(params, {"input": x}, training=True)["output"]
            history.append(float(((out - target) ** 2).mean()))
            _, grads = compiled.evaluate(params, {"input": x}, 2 * (out - target) / len(x))
            params = {n: p - 0.1 * grads[n] for n, p in params.items()}
        return history

    actual = losses("ggml")
    assert actual[-1] < 0.2 * actual[0]
    np.testing.assert_allclose(actual, losses(numpy_backend), atol=1e-4)


def test_symbolic_sizes_share_one_executable():
    from mithril.graph.dims import Dim

    with Builder() as b:
        x = b.input("x", (Dim("B"), 8))
        y = op("softmax")(op("linear")(x, b.param("w", (4, 8))))
    w = rng.standard_normal((4, 8)).astype(np.float32)
    graph = b.build({"y": y})
    executable = ml.GGMLBackend().build(graph)
    for n in (1, 5, 0, 5, 30):
        x = rng.standard_normal((n, 8)).astype(np.float32)
        near(executable({"w": w}, {"x": x})["y"], evaluate(graph, {"x": x, "w": w})["y"])
    assert len(executable.programs) == 4


def test_operations_on_numpy_are_recorded():
    from mithril.graph.decisions import Decisions

    with Builder() as b:
        y = op("erfinv")(b.input("x", (4,)))
    decisions = Decisions()
    ml.GGMLBackend().build(b.build({"y": y}), BuildOptions(decisions=decisions))
    assert "computed by NumPy as declared, ggml has nothing better: erfinv" in str(decisions)


def test_large_results_belong_to_the_caller_until_released():
    """Their buffers are reused only without references to them or their views."""
    with Builder() as b:
        x = b.input("x", (200, 200))
        y = op("tanh")(x)
        outputs = {"y": y, "same": y, "part": y[10:20], "z": op("linear")(y, b.param("w", (200, 200)))}
    executable = ml.GGMLBackend().build(b.build(outputs))
    w = np.eye(200, dtype=np.float32)
    batches = [{"x": np.full((200, 200), k, np.float32)} for k in range(4)]
    first = executable({"w": w}, batches[0])
    view = first["z"][3:5]
    del first["z"]
    second = executable({"w": w}, batches[1])["z"]
    third = executable({"w": w}, batches[2])
    assert (view == 0).all()
    assert np.allclose(second, np.tanh(1), atol=1e-5)
    assert np.allclose(third["z"], np.tanh(2), atol=1e-5)
    assert np.allclose(third["part"], np.tanh(2)) and third["part"].shape == (10, 200)
    assert np.allclose(first["same"], 0) and np.allclose(third["y"], np.tanh(2))
    address = third["z"].ctypes.data
    del third
    assert executable({"w": w}, batches[3])["z"].ctypes.data == address


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", ["conv", "depthwise", "grouped", "max_pool", "avg_pool"])
def test_windows(name, stride, padding):
    """Forward and gradients at sizes and with values (ties, infinities) that the kit's samples do not have."""
    x = np.round(rng.standard_normal((3, 6, 15, 12)), 1).astype(np.float32)
    attributes = {"stride": (stride, stride), "padding": ((padding, padding), (padding, 0))}
    arrays = {"x": x}
    with Builder() as b:
        v = b.input("x", x.shape)
        if "pool" in name:
            y = op(name)(v, kernel=(2, 3), **attributes)
        else:
            groups = {"conv": 1, "depthwise": 6, "grouped": 2}[name]
            arrays["w"] = rng.standard_normal((6, 6 // groups, 3, 2)).astype(np.float32)
            y = op("conv")(v, b.param("w", arrays["w"].shape), groups=groups, **attributes)
    graph = b.build({"y": y})
    near(run(graph, arrays)["y"], evaluate(graph, arrays)["y"])
    backward = gradients(graph, ["y"], list(arrays))
    arrays["grad/y"] = rng.standard_normal(graph.outputs[0].shape).astype(np.float32)
    if name == "max_pool":
        arrays["grad/y"][0, 0, 0, 0] = np.inf
        x[1, 1] = -np.inf
        x[2, 2, 3, 3] = np.nan
    lowered = decompose(backward, ml.GGMLBackend().lowers)
    actual, expected = run(lowered, arrays), evaluate(backward, arrays)
    for key in expected:
        near(actual[key], expected[key], key)


def test_at_the_end_of_the_process_nothing_is_freed(monkeypatch):
    """Then ggml's functions may be gone already; the process gives all memory back."""
    with Builder() as b:
        y = op("exp")(b.input("x", (2,)))
    executable = ml.GGMLBackend().build(b.build({"y": y}))
    freed = []
    monkeypatch.setattr(type(executable.segments[0]), "free", lambda segment: freed.append(segment))
    executable.__del__(lambda: True)
    assert not freed
    executable.__del__(lambda: False)
    assert len(freed) == len(executable.segments)


@pytest.mark.skipif(openblas() is None, reason="this NumPy multiplies by another library")
def test_threads_limit_products_of_numpy_too(monkeypatch):
    library, seen, matmul = openblas(), [], np.matmul
    before = library.threads()
    w = np.ones((8, 8), np.float32)
    with Builder() as b:
        y = b.input("x", (64, 8)) @ b.input("w", (8, 8))
    graph = b.build({"y": y})
    compiled = ml.compile(graph, "ggml", num_threads=before + 1, strict=True)
    monkeypatch.setattr(np, "matmul", lambda *a, **k: (seen.append(library.threads()), matmul(*a, **k))[1])
    compiled({"x": np.ones((64, 8), np.float32), "w": w})
    assert set(seen) == {before + 1}
    assert library.threads() == before


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_few_rows_read_weights_of_16_bits_unchanged(precision):
    model = Model(Linear(48, name="a"), Relu(), Linear(32, name="b"))
    exact = ml.compile(model, "ggml", shapes={"input": [4, 64]})
    compiled = ml.compile(model, "ggml", shapes={"input": [4, 64]}, precision=precision)
    params = exact.randomize_params(seed=0)
    x = rng.normal(size=(4, 64)).astype(np.float32)
    y = compiled.evaluate({n: compiled.backend.array(a, dtype=precision) for n, a in params.items()}, {"input": x})
    expected = exact.evaluate(params, {"input": x})["output"]
    assert np.abs(y["output"].astype(np.float32) - expected).max() < 0.03 * np.abs(expected).max()
    native = [step.name for step in compiled.programs[-1].executable.steps if step.native]
    assert native.count("mul_mat") == 2
    assert native.count("add") == 2


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_programs_of_16_bits_compute_in_float32_and_round_their_results(precision):
    model = Model(Conv2d(4, kernel_size=3, padding=1), BatchNorm2d(4), Relu(), Flatten(), Linear(8), Gelu())
    compiled = ml.compile(model, "ggml", shapes={"input": [32, 3, 8, 8]}, precision=precision)
    params = compiled.randomize_params(seed=0)
    x = compiled.backend.array(rng.normal(size=(32, 3, 8, 8)), dtype=precision)
    y = compiled.evaluate(params, {"input": x})["output"]
    single = ml.compile(model, "ggml", shapes={"input": [32, 3, 8, 8]})
    upcast = {name: a.astype(np.float32) for name, a in params.items()}
    expected = single.evaluate(upcast, {"input": x.astype(np.float32)})["output"]
    assert y.dtype == ml.dtype(precision).numpy
    np.testing.assert_array_equal(y, expected.astype(y.dtype))
    assert "computed by NumPy as declared" not in str(compiled.decisions)
    assert "choice: float32 computes faster than 16-bit floats here; inputs, weights and results have 16 bits" in str(
        compiled.decisions
    )
