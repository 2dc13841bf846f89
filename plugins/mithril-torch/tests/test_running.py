"""Options of the PyTorch backend: their effects, that they are restored, and which of them conflict."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import mithril as ml
from mithril import ops
from mithril.graph import Builder
from mithril.graph.errors import OptionError, StrictError
from mithril.models import Gelu, If, LayerNorm, Linear, Model, Relu

# torch.compile's own parts warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def mlp():
    model = Model()
    model |= Linear(16, name="first")(input="x", output="h")
    model += Gelu()(input="h", output="r")
    model += LayerNorm(name="norm")(input="r", output="n")
    model += Linear(2, name="second")(input="n", output="y")
    return model


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(compiled, x, params=None):
    params = compiled.randomize_params(0) if params is None else params
    return compiled.evaluate(params, {"x": x})["y"].numpy()


def test_compiled_programs_give_the_same_for_every_batch():
    eager = ml.compile(mlp(), "torch", shapes={"x": [None, 8]})
    jitted = ml.compile(mlp(), "torch", shapes={"x": [None, 8]}, jit=True)
    for n in (2, 3, 17):
        np.testing.assert_allclose(run(jitted, random(n, 8)), run(eager, random(n, 8)), rtol=1e-5, atol=1e-6)
    assert len(jitted.programs) == 1


@pytest.mark.slow
def test_compiled_programs_select_keys():
    """Select the next key where gradients are finite, as a training step does."""
    with Builder() as b:
        x, key = b.input("x", (2,)), b.input("key", (2,), "uint32")
        graph = b.build({"y": ops.where(ops.sum(x) > 0.0, ops.fold_in(key, 3), key)})
    inputs = {"x": np.ones(2, np.float32), "key": np.array([7, 2**32 - 1], np.uint32)}
    eager, jitted = (ml.compile(graph, "torch", jit=jit).evaluate({}, inputs)["y"] for jit in (False, True))
    assert jitted.tolist() == eager.tolist()


def test_gradients_of_compiled_programs():
    x, g = random(4, 8), np.ones((4, 2), np.float32)
    results = []
    jitted = {"jit": True, "jit_options": {"backend": "aot_eager"}}
    for options in ({}, jitted, {"autodiff": "native"}, {"autodiff": "native", **jitted}):
        compiled = ml.compile(mlp(), "torch", shapes={"x": [4, 8]}, **options)
        results.append(compiled.evaluate(compiled.randomize_params(0), {"x": x}, g)[1])
    for other in results[1:]:
        for name, gradient in results[0].items():
            np.testing.assert_allclose(other[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_small_products_do_not_check_for_onednn():
    """The check at run time takes a microsecond per layer; static sizes decide it at compile time."""
    for rows, checks in ((1, False), (4096, True), (None, True)):
        source = ml.compile(mlp(), "torch", shapes={"x": [rows, 512]}, inference=True).source
        assert ("onednn_pays" in source) == checks, rows


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
@pytest.mark.parametrize(("images", "size", "stride", "padding"), [(1, 7, 1, 1), (3, 5, 2, (0, 1)), (2, 3, 1, 0)])
def test_large_kernels_with_small_outputs(monkeypatch, images, size, stride, padding):
    """These use im2col, with bias and activation fused, and equal PyTorch's convolution."""
    model = ml.Model()
    model += ml.models.Conv2d(128, 1024, kernel_size=3, stride=stride, padding=padding)(input="x")
    model += ml.models.Relu()(output="y")
    compiled = ml.compile(model, "torch", shapes={"x": [images, 128, size, size]}, inference=True)
    params, x = compiled.randomize_params(0), random(images, 128, size, size)
    calls = []
    linear = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *a: calls.append(a) or linear(*a))
    y = compiled.evaluate(params, {"x": x})["y"]
    weight, bias = params.values()
    expected = torch.relu(torch.nn.functional.conv2d(torch.from_numpy(x), weight, bias, stride, padding))
    assert calls
    assert y.is_contiguous()  # otherwise later operations would continue in channels-last layout
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_jit_and_file_go_together(tmp_path):
    compiled = ml.compile(
        mlp(), "torch", shapes={"x": [2, 8]}, jit=True, jit_options={"backend": "eager"}, file_path=tmp_path / "g.py"
    )
    run(compiled, random(2, 8))
    assert "def forward(params, inputs):" in (tmp_path / "g.py").read_text()


def test_captured_programs(tmp_path):
    compiled = ml.compile(mlp(), "torch", shapes={"x": [2, 8]}, torch_fx=True)
    expected = run(ml.compile(mlp(), "torch", shapes={"x": [2, 8]}), random(2, 8))
    np.testing.assert_allclose(run(compiled, random(2, 8)), expected, rtol=1e-5, atol=1e-6)


def test_captured_programs_are_compiled_with_both_options():
    options = {"torch_fx": True, "torch_dynamo": True, "jit_options": {"backend": "eager"}}
    compiled = ml.compile(mlp(), "torch", shapes={"x": [2, 8]}, **options)
    expected = run(ml.compile(mlp(), "torch", shapes={"x": [2, 8]}), random(2, 8))
    np.testing.assert_allclose(run(compiled, random(2, 8)), expected, rtol=1e-5, atol=1e-6)
    call = compiled.programs[-1].executable.call
    captured = next(c.cell_contents for c in call.__closure__ if hasattr(c.cell_contents, "modules"))
    (module,) = captured.modules.values()
    assert type(module).__name__ == "Compiled"


@pytest.mark.parametrize("setting", ["backend", "option"])
def test_amp_is_the_mixed_precision_of_all_backends(setting):
    """This includes gradients, whose dtype autocast would not fix."""
    plain = ml.compile(mlp(), "torch", shapes={"x": [64, 8]})
    if setting == "backend":
        amp = ml.compile(mlp(), ml.TorchBackend(enable_amp=True), shapes={"x": [64, 8]})
    else:
        amp = ml.compile(mlp(), "torch", shapes={"x": [64, 8]}, torch_options={"enable_amp": True})
    params, x, g = plain.randomize_params(0), {"x": random(64, 8)}, {"y": random(64, 2, seed=1)}
    (values, slopes), (expected, expected_slopes) = amp.evaluate(params, x, g), plain.evaluate(params, x, g)
    assert "bfloat16" in amp.source and values["y"].dtype == torch.float32
    np.testing.assert_allclose(values["y"], expected["y"], rtol=0.1, atol=0.1)
    for name, slope in expected_slopes.items():
        np.testing.assert_allclose(slopes[name], slope, rtol=0.1, atol=0.1 * float(slope.abs().max()))


def test_threads_are_set_for_the_call_only():
    seen = []
    before = torch.get_num_threads()

    def watch(code):
        return code.replace("def forward(params, inputs):", "def forward(params, inputs):\n    SEEN(torch)")

    torch.SEEN = lambda t: seen.append(t.get_num_threads())
    compiled = ml.compile(
        mlp(),
        "torch",
        shapes={"x": [2, 8]},
        num_threads=before + 1,
        code_transformers=[lambda c: watch(c).replace("SEEN(torch)", "torch.SEEN(torch)")],
    )
    run(compiled, random(2, 8))
    del torch.SEEN
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_compiled_code_is_cached(tmp_path, monkeypatch):
    """The user's cache directory takes precedence over the one of torch.compile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    seen = []

    def watching(graph, examples):
        seen.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
        return graph.forward

    options = {"jit": True, "jit_options": {"backend": watching}, "cache": True, "cache_dir": str(tmp_path)}
    compiled = ml.compile(mlp(), "torch", shapes={"x": [2, 8]}, **options)
    run(compiled, random(2, 8))
    assert seen == [str(tmp_path / "inductor")]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torch_dynamo": True, "jit": False}, "conflicts with jit=False"),
        ({"jit": True, "jit_options": {"backend": "inducto"}}, "inductor"),
        ({"jit": True, "jit_options": {"modes": "x"}}, "mode"),
        ({"jit": True, "jit_options": {"mode": "default", "options": {}}}, "not both"),
        ({"jit": True, "jit_options": {"mode": "fast"}}, "torch.compile rejected"),
        ({"jit": True, "jit_options": {"dynamic": "yes"}}, "torch.compile rejected"),
        ({"jit": True, "jit_options": {"options": {"bogus": 1}}}, "torch.compile rejected"),
        ({"torch_options": {"amp": True}}, "enable_amp"),
        ({"torch_options": {"script_optimization": 7}}, "0 to 3"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(OptionError) as caught:
        ml.compile(mlp(), "torch", shapes={"x": [2, 8]}, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "options"),
    [({"enable_amp": False}, {"enable_amp": True}), ({"cudnn_benchmark": True}, {"benchmark_mode": False})],
)
def test_backend_and_torch_options_must_agree(backend, options):
    with pytest.raises(OptionError, match="conflicts with .*backend"):
        ml.compile(mlp(), ml.TorchBackend(**backend), shapes={"x": [2, 8]}, torch_options=options)


def test_compilation_failure_is_reported():
    """The error names the compiler instead of showing a traceback of its internals."""

    def broken(graph, examples):
        raise ArithmeticError("not today")

    compiled = ml.compile(mlp(), "torch", shapes={"x": [2, 8]}, jit=True, jit_options={"backend": broken})
    with pytest.raises(ml.BackendError, match="torch.compile cannot compile this program"):
        run(compiled, random(2, 8))


def test_control_flow_stays_python_and_says_so():
    model = Model()
    model |= If("flag", Relu(), Linear(3))(input="x", flag="flag", output="y")
    options = {"shapes": {"x": [2, 3], "flag": []}, "types": {"flag": "bool"}, "jit": True}
    compiled = ml.compile(model, "torch", **options)
    assert [d.kind for d in compiled.decisions] == ["fallback"]
    with pytest.raises(StrictError):
        ml.compile(model, "torch", strict=True, **options)


def test_devices_that_are_not_there():
    with pytest.raises(ml.BackendError, match="PyTorch has no device 'mps' here"):
        ml.TorchBackend(device="mps")


def test_tensors_are_shared_not_copied():
    backend = ml.TorchBackend()
    x = torch.ones(3)
    assert backend.array(x).data_ptr() == x.data_ptr()


@pytest.mark.gpu
def test_runs_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    on_cpu = ml.compile(mlp(), ml.TorchBackend(device="cpu"), shapes={"x": [2, 8]})
    on_cuda = ml.compile(mlp(), ml.TorchBackend(device="cuda"), shapes={"x": [2, 8]})
    y = on_cuda.evaluate(on_cuda.randomize_params(0), {"x": random(2, 8)})["y"]
    assert y.device.type == "cuda"
    np.testing.assert_allclose(y.cpu(), run(on_cpu, random(2, 8)), rtol=1e-3, atol=1e-4)
