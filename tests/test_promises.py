"""Promises of the documentation about ``ml.compile``, in the spelling of users: each combination runs and computes
the results of the NumPy backend without it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest

import mithril as ml
from mithril.graph.errors import BackendError, MithrilError
from mithril.models import (
    Add,
    BatchNorm2d,
    Conv2d,
    GlobalAvgPool2d,
    Linear,
    Model,
    Relu,
)

BATCH, SIZE = 8, 16
SHAPES = {"input": [BATCH, SIZE]}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, SIZE)).astype(np.float32)
SWITCHES = ("constant_folding", "operator_fusion", "dead_code_elimination", "common_subexpression")
HALF = 0.03


def perceptron() -> Model:
    model = Model()
    model |= Linear(dimension=12)(input="input", output="hidden")
    model += Relu()(input="hidden", output="active")
    model += Linear(dimension=4)(input="active", output="output")
    return model


def image_model() -> Model:
    model = Model()
    model |= Conv2d(3, 8, kernel_size=3)
    model += BatchNorm2d(8)
    model += Relu()
    model += Conv2d(8, 6, kernel_size=3)
    model += GlobalAvgPool2d()
    model += Linear(6, 5)
    return model


def reference(model: Model, x: np.ndarray, **options):
    compiled = ml.compile(model, ml.NumpyBackend(), shapes={"input": list(x.shape)}, **options)
    params = compiled.randomize_params(seed=1)
    return params, compiled.evaluate(params, {"input": x})["output"]


def given_to(compiled, params):
    return {name: compiled.backend.array(array) for name, array in params.items()}


def check(backend, tolerance: float = 1e-4, **options):
    """Compile the perceptron, run it, compare; the compiled model."""
    params, expected = reference(perceptron(), X)
    compiled = ml.compile(model=perceptron(), backend=backend, **options)
    kind = compiled.backend.dtype
    arguments = {name: compiled.backend.array(array, dtype=kind) for name, array in params.items()}
    outputs = compiled.evaluate(arguments, {"input": compiled.backend.array(X, dtype=kind)})
    actual = compiled.backend.to_numpy(outputs["output"]).astype(np.float32)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual / scale, expected / scale, atol=tolerance, rtol=0)
    return compiled


# -- one model, every backend -------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["TorchBackend", "JaxBackend", "MlxBackend", "GGMLBackend", "CBackend"])
def test_an_image_model_is_written_once(backend):
    x = RNG.normal(size=(2, 3, 10, 10)).astype(np.float32)
    params, expected = reference(image_model(), x)
    compiled = ml.compile(image_model(), getattr(ml, backend)(), shapes={"input": [2, 3, 10, 10]})
    outputs = compiled.evaluate(given_to(compiled, params), {"input": x})
    np.testing.assert_allclose(compiled.backend.to_numpy(outputs["output"]), expected, rtol=1e-3, atol=1e-4)


def test_the_compiled_model_has_one_interface():
    compiled = ml.compile(perceptron(), ml.TorchBackend(), shapes=SHAPES)
    params = compiled.randomize_params()
    slope = compiled.backend.ones((BATCH, 4))
    outputs, gradients = compiled.evaluate(params, {"input": X}, output_gradients=slope)
    assert set(gradients) == set(params) and tuple(outputs["output"].shape) == (BATCH, 4)
    assert tuple(compiled.get_shapes()["output"]) == (BATCH, 4) and str(compiled.get_types()["output"]) == "float32"
    compiled.bind(params)
    np.testing.assert_array_equal(
        compiled.backend.to_numpy(compiled({"input": X})["output"]), compiled.backend.to_numpy(outputs["output"])
    )


# -- options --------------------------------------------------------------------------------------------------------
OPTIONS = {
    "shapes": {"shapes": SHAPES},
    "a size left open": {"shapes": {"input": [None, SIZE]}},
    "types": {"shapes": SHAPES, "types": {"input": ml.float32}},
    "static": {"shapes": SHAPES, "static_shapes": True, "static_types": True},
    "switches": {"shapes": SHAPES, "optimizations": dict.fromkeys(SWITCHES, True)},
    "a switch by its short name": {"shapes": SHAPES, "optimizations": {"fusion": False, "memory_planning": True}},
    **{f"level {n}": {"shapes": SHAPES, "optimization_level": n} for n in ("none", "low", "medium", "high")},
    "hints": {
        "shapes": {"input": [None, SIZE]},
        "hints": {"input_batch_size_range": (1, 32), "inference_priority": "latency"},
    },
    "own pass": {"shapes": SHAPES, "custom_passes": [lambda graph: graph]},
    "checkpointing": {"shapes": SHAPES, "gradient_checkpointing": True, "checkpoint_segments": 2},
    "memory": {"shapes": SHAPES, "memory_planning": "greedy", "max_memory_gb": 8},
    "inference": {"shapes": SHAPES, "inference": True, "graph_optimization": True},
    "profile": {"shapes": SHAPES, "profile": True},
    "shape trace": {"shapes": SHAPES, "trace_shapes": True},
    "verbose": {"shapes": SHAPES, "verbose": True},
    "strict": {"shapes": SHAPES, "strict": True, "timeout": 300},
}
BACKENDS = ("NumpyBackend", "TorchBackend", "JaxBackend", "MlxBackend")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_every_backend_has(backend, options, tmp_path):
    check(getattr(ml, backend)(), **options, **({"cache_dir": tmp_path} if "high" in options.values() else {}))


@pytest.mark.parametrize(
    ("make", "options", "tolerance"),
    [
        (lambda: ml.JaxBackend(), {"jit": True}, 1e-4),
        (lambda: ml.JaxBackend(), {"jit": True, "jit_options": {"donate_argnums": (1,)}}, 1e-4),
        (lambda: ml.JaxBackend(precision="bfloat16"), {"mixed_precision": True}, HALF),
        (lambda: ml.JaxBackend(), {"xla_optimization_level": 3}, 1e-4),
        (lambda: ml.JaxBackend(), {"target_hardware": "cpu", "optimize_for": "throughput"}, 1e-4),
        (lambda: ml.JaxBackend(), {"jax_options": {"precision": "highest", "donate_argnums": (1,), "unroll": 4}}, 1e-4),
        (lambda: ml.TorchBackend(), {"jit_options": {"backend": "eager"}, "jit": True}, 1e-4),
        (lambda: ml.TorchBackend(enable_amp=True, cudnn_benchmark=True), {}, HALF),
        (lambda: ml.TorchBackend(), {"torch_options": {"graph_mode": True}}, 1e-4),
        (lambda: ml.TorchBackend(), {"torch_options": {"enable_amp": True, "benchmark_mode": True}}, HALF),
        (lambda: ml.TorchBackend(), {"torch_fx": True}, 1e-4),
        (
            lambda: ml.TorchBackend(),
            {"torch_fx": True, "torch_dynamo": True, "jit_options": {"backend": "eager"}},
            1e-4,
        ),
        (lambda: ml.MlxBackend(), {"jit": True}, 1e-4),
        (lambda: ml.CBackend(), {"target_hardware": "cpu", "cpu_options": {"num_threads": 1, "vectorize": True}}, 1e-4),
        (lambda: ml.GGMLBackend(mem_size=64 << 20), {"inference": True}, 1e-4),
    ],
)
def test_options_of_one_backend(make, options, tolerance):
    check(make(), tolerance, shapes=SHAPES, **options)


def test_quantized_and_static_inference():
    model = Model()
    model |= Linear(dimension=64)(input="input", output="output")
    x = RNG.normal(size=(4, 128)).astype(np.float32)
    params, expected = reference(model, x)
    backend = ml.GGMLBackend(quantize="int8", mem_size=4 * 1024 * 1024 * 1024)
    compiled = ml.compile(
        model, backend, shapes={"input": [4, 128]}, inference=True, static_inference=True, graph_optimization=True
    )
    compiled.bind(params)
    actual = compiled({"input": x})["output"]
    assert np.abs(actual - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("backend", [*BACKENDS, "CBackend", "GGMLBackend"])
@pytest.mark.parametrize("switch", ["fusion", "operator_fusion"])
def test_fusion_is_switched_off(switch, backend):
    plain, fused = (
        ml.compile(perceptron(), getattr(ml, backend)(), shapes=SHAPES, optimizations={switch: on}).graph.nodes
        for on in (False, True)
    )
    assert "relu" in {n.op.name for n in plain} and "relu" not in {n.op.name for n in fused}


@pytest.mark.parametrize("backend", BACKENDS)
def test_hints_bound_batches(backend):
    hints = {"input_batch_size_range": (1, 32), "inference_priority": "latency"}
    compiled = check(getattr(ml, backend)(), hints=hints)
    assert "optimize_for='latency'" in str(compiled.decisions)
    with pytest.raises(MithrilError, match="33"):
        compiled.evaluate(compiled.randomize_params(), {"input": np.ones((33, SIZE), np.float32)})


@pytest.mark.parametrize("backend", ["JaxBackend", "TorchBackend"])
def test_less_precision_takes_ordinary_arrays(backend):
    params, expected = reference(perceptron(), X)
    compiled = ml.compile(model=perceptron(), backend=getattr(ml, backend)(precision="bfloat16"), mixed_precision=True)
    for array in compiled.randomize_params(inputs={"input": X}).values():
        assert "bfloat16" in str(array.dtype)
    output = compiled.evaluate(params, {"input": X})["output"]
    assert "bfloat16" in str(output.dtype)
    values = compiled.backend.to_numpy(output).astype(np.float32)
    assert np.abs(values - expected).max() < HALF * np.abs(expected).max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_of_half_precision(backend):
    compiled = ml.compile(
        model=perceptron(), backend=getattr(ml, backend)(), shapes=SHAPES, types={"input": ml.float16}
    )
    params = compiled.randomize_params()
    assert str(compiled.get_types()["input"]) == "float16"
    (expected,) = compiled.evaluate(params, {"input": X.astype(np.float16)}).values()
    (converted,) = compiled.evaluate(params, {"input": X}).values()
    np.testing.assert_array_equal(compiled.backend.to_numpy(converted), compiled.backend.to_numpy(expected))
    assert "input 'input' is converted" in str(compiled.decisions)


@pytest.mark.parametrize("backend", [*BACKENDS, "GGMLBackend"])
def test_options_of_processors(backend):
    options = {"target_hardware": "cpu", "cpu_options": {"num_threads": 2, "vectorize": True}}
    compiled = check(getattr(ml, backend)(), **options)
    assert "reads the option cpu_options (vectorize)" in str(compiled.decisions)
    assert compiled.options["num_threads"] == 2


def test_targets_that_are_not_here_are_said():
    with pytest.raises(MithrilError) as error:
        options = {"target_hardware": "tpu_v4", "tpu_options": {"replicas": 8, "model_parallelism": 2}}
        ml.compile(perceptron(), ml.JaxBackend(), shapes=SHAPES, **options)
    assert "TPU" in str(error.value) and "libtpu" in str(error.value)


TEMPLATE = """# by {{ backend }}
{% for part in imports + helpers + constants + [signature] %}{{ part }}
{% endfor %}{% for line in body + [closing] %}    {{ line }}
{% endfor %}"""


# -- files ------------------------------------------------------------------------------------------------------------
def test_requested_files(tmp_path):
    (tmp_path / "own.py.j2").write_text(TEMPLATE)
    check(
        ml.NumpyBackend(),
        shapes=SHAPES,
        file_path=tmp_path / "generated.py",
        template_path=tmp_path / "own.py.j2",
        dump_graph=tmp_path / "graphs",
        dump_format="dot",
        save_intermediates=True,
        intermediate_dir=tmp_path / "between",
        profile=True,
        profile_output=tmp_path / "profile.json",
        visualize=True,
        viz_options={
            "format": "svg",
            "show_shapes": True,
            "show_types": True,
            "show_memory": True,
            "output_path": tmp_path / "model.svg",
        },
        cache=True,
        cache_dir=tmp_path / "cache",
    )
    assert (tmp_path / "generated.py").read_text().startswith("# by numpy")
    assert json.loads((tmp_path / "profile.json").read_text())
    assert (tmp_path / "model.svg").read_text().startswith("<svg")
    for folder in ("graphs", "between", "cache"):
        assert any((tmp_path / folder).rglob("*.*")), folder


@pytest.mark.parametrize("backend", [*BACKENDS, "CBackend"])
def test_source_of_a_program_is_written(backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(getattr(ml, backend)(), file_path="generated_model.py")
    assert (tmp_path / "generated_model.py").stat().st_size > 0


# -- models -----------------------------------------------------------------------------------------------------------
def test_equal_branches_share_their_input():
    model = Model()
    model |= Linear(dimension=64)(input="input", output="hidden")
    model += Linear(dimension=32)(input="hidden", output="output1")
    model += Linear(dimension=32)(input="hidden", output="output2")
    compiled = ml.compile(model, ml.NumpyBackend(), shapes=SHAPES)
    assert set(compiled.evaluate(compiled.randomize_params(), {"input": X})) == {"output1", "output2"}
    assert sum(n.op.name == "linear" for n in compiled.graph.nodes) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_of_many_inputs(backend):
    model = Model()
    model |= Conv2d(3, 4, kernel_size=3)(input="image_input", output="maps")
    model += GlobalAvgPool2d()(input="maps", output="pooled")
    model += Linear(dimension=4)(input="text_input", output="text")
    model += Add()(left="pooled", right="text", output="output")
    shapes = {"image_input": [2, 3, 8, 8], "text_input": [2, SIZE]}
    inputs = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    compiled = ml.compile(model=model, backend=getattr(ml, backend)(), shapes=shapes)
    assert tuple(compiled.evaluate(compiled.randomize_params(), inputs)["output"].shape) == (2, 4)


def test_in_place_is_a_new_value_under_the_same_name():
    model = Model()
    model |= Linear(dimension=6)(input="input", output="hidden")
    model += Relu(in_place=True)(input="hidden", output="hidden")
    model += Linear(dimension=3)(input="hidden", output="output")
    params, expected = reference(model, X)
    hidden = np.maximum(X @ params["linear.weight"].T + params["linear.bias"], 0)
    np.testing.assert_allclose(expected, hidden @ params["linear_1.weight"].T + params["linear_1.bias"], atol=1e-5)


def test_parts_on_another_backend():
    model = Model()
    model |= Linear(dimension=12)(input="input", output="hidden")
    part = Linear(dimension=6)
    part.set_attribute("backend", "torch")
    model += part(input="hidden", output="output")
    params, expected = reference(model, X)
    compiled = ml.compile(
        model, ml.JaxBackend(dtype=ml.float32), shapes=SHAPES, backend_map={"torch": ml.TorchBackend(dtype=ml.float32)}
    )
    actual = compiled.evaluate(given_to(compiled, params), {"input": X})["output"]
    np.testing.assert_allclose(compiled.backend.to_numpy(actual), expected, rtol=1e-4, atol=1e-5)


# -- tools ------------------------------------------------------------------------------------------------------------
def test_profiles_and_benchmarks():
    compiled = ml.compile(perceptron(), ml.JaxBackend(), shapes=SHAPES, profile=True)
    params = compiled.randomize_params(seed=0)
    compiled.bind(params)
    compiled({"input": X})
    assert compiled.get_profile_stats().execution_breakdown
    with ml.profile() as prof:
        compiled.evaluate(params, {"input": X})
    assert "linear" in prof.summary()
    config = ml.BenchmarkConfig(
        warmup_iterations=2, benchmark_iterations=10, metrics=["throughput", "latency", "memory_usage"]
    )
    results = ml.run_benchmark(model=compiled, inputs={"input": X}, config=config)
    assert results.throughput > 0 and results.latency > 0 and results.memory_usage > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_is_called_at_once(backend):
    compiled = ml.compile(model=perceptron(), backend=getattr(ml, backend)(), profile=True)
    with pytest.warns(ml.OptionWarning, match="no parameters are bound"):
        outputs = compiled({"input": X})
    _, expected = reference(perceptron(), X)
    assert compiled.backend.to_numpy(outputs["output"]).shape == expected.shape
    assert compiled.get_profile_stats().execution_breakdown
    for batch_size in (1, 2, 4):
        assert len(compiled({"input": X[:batch_size]})["output"]) == batch_size


def test_training_by_accumulated_gradients():
    y = RNG.normal(size=(64, 4)).astype(np.float32)
    loader = ml.DataLoader(
        dataset=(RNG.normal(size=(64, SIZE)).astype(np.float32), y),
        batch_size=BATCH,
        shuffle=True,
        num_workers=2,
        pin_memory=True,
        prefetch_factor=2,
    )
    compiled = ml.compile(perceptron(), ml.NumpyBackend())
    trainer = ml.Trainer(
        model=compiled, optimizer=ml.Adam(learning_rate=0.01), loss="mse", gradient_accumulation_steps=4
    )
    history = trainer.fit(loader, epochs=3)
    assert history["loss"][-1] < history["loss"][0]


# -- hardware ---------------------------------------------------------------------------------------------------------
def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: ml.TorchBackend(device="cuda", cudnn_benchmark=True), {"target_hardware": "nvidia_a100"}),
        (lambda: ml.JaxBackend(device="gpu", pre_allocate=True), {"optimize_for": "throughput"}),
        (lambda: ml.JaxBackend(device="tpu"), {"tpu_replicas": 8}),
    ],
)
def test_unavailable_hardware_is_reported(make, options):
    if has_gpu():
        pytest.skip("there is a GPU")
    with pytest.raises(BackendError) as error:
        ml.compile(perceptron(), make(), shapes=SHAPES, **options)
    assert any(word in str(error.value).lower() for word in ("gpu", "cuda", "tpu"))


def test_pytorch_compiles_for_phones():
    check(ml.TorchBackend(), shapes=SHAPES, inference=True, target_hardware="mobile")


@pytest.mark.parametrize(("quantization", "tolerance"), [(None, 1e-5), ("int8", 0.02)])
def test_pytorch_exports_c_for_the_named_phone(quantization, tolerance, tmp_path):
    model = Model()
    model |= Linear(dimension=32)(input="input", output="hidden")
    model += Relu()(input="hidden", output="active")
    model += Linear(dimension=4)(input="active", output="output")
    telephone = {"platform": "linux", "arch": "arm64-v8a", "quantization": quantization, "optimize_size": True}
    compiled = ml.compile(
        model, ml.TorchBackend(), shapes={"input": [4, 64]}, target_hardware="mobile", mobile_options=telephone
    )
    compiled.bind(compiled.randomize_params())
    exported = compiled.export(tmp_path / "phone", library=None)
    contents, target = exported.contents, exported.contents.target
    assert (target.arch, target.quantization, target.optimize_size) == ("arm64-v8a", quantization, True)
    assert bool(exported.quantization_error) == (quantization == "int8")
    assert (tmp_path / "phone" / "model.c").exists()
    inputs = {name: compiled.backend.array(x) for name, x in contents.inputs.items()}
    expected = compiled.backend.to_numpy(compiled(inputs)["output"])
    np.testing.assert_allclose(contents.results["output"], expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_pytorch_exports_state_to_phones(tmp_path):
    compiled = ml.compile(
        image_model(),
        ml.TorchBackend(),
        shapes={"input": [2, 3, 8, 8]},
        inference=True,
        target_hardware="mobile",
    )
    compiled.bind(compiled.randomize_params())
    contents = compiled.export(tmp_path / "phone", library=None).contents
    inputs = {name: compiled.backend.array(x) for name, x in contents.inputs.items()}
    for name, y in compiled(inputs).items():
        np.testing.assert_allclose(contents.results[name], compiled.backend.to_numpy(y), rtol=1e-4, atol=1e-5)


def test_pytorch_on_a_gpu_rejects_phone_targets(monkeypatch):
    on_gpu = replace(ml.TorchBackend().capabilities, family="cuda", families=("gpu", "nvidia"))
    monkeypatch.setattr(ml.TorchBackend, "capabilities", on_gpu)
    compiled = ml.compile(perceptron(), ml.TorchBackend(), shapes=SHAPES, mobile_options={"arch": "arm64-v8a"})
    assert "nothing on backend 'torch' reads the option mobile_options" in str(compiled.decisions)


def test_no_file_of_a_format_that_is_for_other_backends(tmp_path):
    compiled = ml.compile(perceptron(), ml.NumpyBackend(), shapes=SHAPES)
    for path, format, remedy in ((tmp_path, "c", "'c'"), (tmp_path / "model.pte", "executorch", "'torch'")):
        with pytest.raises(MithrilError, match=f"'{format}' cannot be written for backend 'numpy'") as failed:
            compiled.export(path, format=format)
        assert f"compile the model for backend {remedy}" in str(failed.value)


def test_no_c_export_without_a_named_phone(tmp_path):
    compiled = ml.compile(perceptron(), ml.TorchBackend(), shapes=SHAPES)
    compiled.bind(compiled.randomize_params())
    with pytest.raises(MithrilError, match="backend 'torch' does not export C"):
        compiled.export(tmp_path / "phone")


def test_a_target_that_contradicts_the_device():
    with pytest.raises(MithrilError) as error:
        ml.compile(perceptron(), ml.TorchBackend(device="cpu"), shapes=SHAPES, target_hardware="nvidia_a100")
    assert "nvidia_a100" in str(error.value) and "cpu" in str(error.value)


MESHES = """
    import numpy as np
    import mithril as ml
    from mithril.models import Linear, Model, Relu

    def model():
        made = Model()
        for size in (16, 16, 16, 8):
            made += Linear(size)
            made += Relu()
        return made

    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    plain = ml.compile(model(), "numpy", shapes={"input": [16, 16]})
    params = plain.randomize_params(seed=0)
    expected = plain.evaluate(params, {"input": x})["output"]
    for mesh, options in (
        ((4,), {"parallelism": "data"}),
        ((1, 4), {"parallelism": "model", "tensor_split_dims": {"weights": 1, "activations": 0}}),
        ((4,), {"parallelism": "pipeline", "pipeline_stages": 4, "pipeline_chunks": 8}),
        ((4,), {"pjit": True}),
    ):
        compiled = ml.compile(model(), ml.JaxBackend(device_mesh=mesh), shapes={"input": [16, 16]}, **options)
        backend = compiled.backend
        given = {n: backend.array(a) for n, a in params.items()}
        got = backend.to_numpy(compiled.evaluate(given, {"input": x})["output"])
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    print("ok")
"""


def test_many_devices():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MESHES)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip().endswith("ok"), done.stderr
