"""Programs of the TPU compiler on a machine without a TPU: one device, meshes, inference and training."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from small_models import block, perceptron, scalar_loss

import mithril as ml
import mithril_tpu
from mithril_targets.tpu import GENERATIONS
from mithril_tpu.aot import serialized_hlo
from mithril_tpu.aot.analysis import Collective, collectives, serialized_collectives
from mithril_tpu.aot.artifact import trees
from mithril_tpu.aot.program import AheadProgram

pytest.importorskip("libtpu")
QUICK = {"effort": 0}


def compiled(model, target="tpu_v5e", shapes=None, **options):
    tpu = {**QUICK, **options.pop("tpu_options", {})}
    return ml.compile(
        model, ml.JaxBackend(), target_hardware=target, tpu_options=tpu, shapes=shapes or {"x": [16, 128]}, **options
    )


# ----------------------------------------------------------------------------------------------------- one device
@pytest.mark.parametrize("g", GENERATIONS, ids=lambda g: g.name)
def test_every_generation_compiles(g):
    program = mithril_tpu.ahead_of(compiled(perceptron(), g.name))
    assert program.target.name == g.name
    assert program.analysis.memory.peak > 0
    assert program.analysis.flops >= 2 * 16 * (128 * 32 + 32 * 8)


def test_program_reports_its_analysis():
    program = mithril_tpu.ahead_of(compiled(perceptron(256, 128)))
    a = program.analysis
    assert a.memory.arguments >= 4 * (16 * 128 + 128 * 256 + 256 + 256 * 128 + 128)
    assert a.flops == pytest.approx(2 * 16 * (128 * 256 + 256 * 128), rel=0.1)
    assert a.collectives == {}
    assert "ENTRY" in program.hlo
    assert "stablehlo.dot_general" in program.stablehlo
    assert "tpu_v5e" in program.report()


def test_artifact_is_saved(tmp_path):
    program = mithril_tpu.ahead_of(compiled(perceptron()))
    out = program.save(tmp_path / "made")
    metadata = json.loads((out / "analysis.json").read_text())
    assert metadata["target"] == "tpu_v5e"
    assert metadata["analysis"]["memory"]["peak"] == program.analysis.memory.peak
    assert (out / "program.bin").stat().st_size > 1000
    assert "stablehlo" in (out / "program.stablehlo.mlir").read_text()
    with pytest.raises(ml.BackendError, match="which this machine does not have"):
        mithril_tpu.load_program(out)
    with pytest.raises(ml.InputError, match="does not contain a saved program"):
        mithril_tpu.load_program(tmp_path / "elsewhere")


def test_program_of_other_versions_is_rejected(tmp_path):
    file = mithril_tpu.ahead_of(compiled(perceptron())).save(tmp_path) / "analysis.json"
    metadata = json.loads(file.read_text())
    assert set(metadata["versions"]) == {"mithril-tpu", "jaxlib", "libtpu"}
    metadata["versions"]["libtpu"] = "0.0.1"
    file.write_text(json.dumps(metadata))
    with pytest.raises(ml.BackendError, match="saved with other versions of libtpu") as caught:
        mithril_tpu.load_program(tmp_path)
    assert "pip install 'libtpu==0.0.1'" in caught.value.hint
    del metadata["versions"]
    file.write_text(json.dumps(metadata))
    with pytest.raises(ml.BackendError, match="does not say with which versions"):
        mithril_tpu.load_program(tmp_path)


def test_structure_of_a_saved_program_follows_from_its_names(tmp_path):
    from jax.experimental import serialize_executable

    program = mithril_tpu.training_program(compiled(scalar_loss()), "loss")
    _, arguments, results = serialize_executable.serialize(program.compiled)
    metadata = json.loads((program.save(tmp_path) / "analysis.json").read_text())
    assert trees(metadata) == (arguments, results)


def test_call_without_a_tpu_proposes_simulation():
    model = compiled(perceptron())
    with pytest.raises(ml.BackendError, match="has no TPU") as caught:
        model.evaluate(model.randomize_params(0), {"x": np.ones((16, 128), np.float32)})
    assert "simulate" in caught.value.hint


def test_bfloat16_from_either_option():
    for options in ({"precision": "bfloat16"}, {"tpu_options": {"precision": "bfloat16"}}):
        program = mithril_tpu.ahead_of(compiled(perceptron(), **options))
        assert "bf16" in program.stablehlo


# ---------------------------------------------------------------------------------------------------------- meshes
def test_work_is_divided_by_the_mesh():
    shapes = {"x": [8, 64, 256]}
    model = block(256, 8, 1024)
    single = mithril_tpu.ahead_of(compiled(model, shapes=shapes)).analysis
    for mesh in ({"replicas": 8}, {"replicas": 8, "model_parallelism": 8}, {"replicas": 8, "model_parallelism": 2}):
        a = mithril_tpu.ahead_of(compiled(model, shapes=shapes, tpu_options=mesh)).analysis
        assert a.flops == pytest.approx(single.flops / 8, rel=0.1), mesh


def test_weight_pair_costs_one_all_reduce_forward():
    model = compiled(block(), shapes={"x": [8, 64, 128]}, parallelism="model", tpu_replicas=4)
    program = mithril_tpu.ahead_of(model)
    assert {kind: c.count for kind, c in program.analysis.collectives.items()} == {"all-reduce": 2}
    assert program.strategy.splits["fc.weight"] == ("model", None)
    assert program.strategy.splits["proj.weight"] == (None, "model")


def test_data_parallelism_reduces_gradients_only():
    model = compiled(scalar_loss(), parallelism="data", tpu_replicas=4)
    assert mithril_tpu.ahead_of(model).analysis.collectives.keys() <= {"all-reduce"}  # reduction of the loss
    step = mithril_tpu.training_program(model, "loss")
    assert step.analysis.collectives["all-reduce"].count >= 1


def test_training_step_reuses_the_buffers_of_old_parameters():
    model = compiled(scalar_loss(256))
    step = mithril_tpu.training_program(model, "loss", lambda p, g: {n: p[n] - 0.1 * g[n] for n in p})
    parameters = sum(4 * np.prod(shape) for n, shape in model.get_shapes().items() if "weight" in n or "bias" in n)
    assert step.analysis.memory.aliased >= parameters * 0.9


def test_training_step_is_compiled_once(monkeypatch):
    model = compiled(scalar_loss(64))
    runs = []
    compile_ = AheadProgram._compile
    monkeypatch.setattr(AheadProgram, "_compile", lambda self, lowered: runs.append(1) or compile_(self, lowered))
    mithril_tpu.training_program(model, "loss", lambda p, g: {n: p[n] - 0.1 * g[n] for n in p})
    assert len(runs) == 1
    gradients = mithril_tpu.training_program(model, "loss")
    assert "compile" in gradients.seconds
    assert len(runs) == 2


def test_update_must_return_every_parameter():
    model = compiled(scalar_loss(64))
    with pytest.raises(ml.InputError) as caught:
        mithril_tpu.training_program(model, "loss", lambda p, g: {"first.weight": p["first.weight"], "other": 1.0})
    assert str(caught.value) == (
        "the update of a training program must return exactly the parameters\n"
        "  missing: first.bias, second.bias, second.weight\n"
        "  unknown: other\n"
        "hint: pass lambda params, gradients: {n: params[n] - 0.1 * gradients[n] for n in params}"
    )


def test_native_gradients_compile():
    model = compiled(scalar_loss(), autodiff="native")
    step = mithril_tpu.training_program(model, "loss")
    assert step.analysis.flops > mithril_tpu.ahead_of(model).analysis.flops


@pytest.mark.parametrize("name", ["tpu_v4", "tpu_v3", "tpu_v7x", "tpu_v6e"])
def test_meshes_compile_for_other_generations(name):
    program = mithril_tpu.ahead_of(compiled(perceptron(), name, tpu_options={"replicas": 8, "model_parallelism": 2}))
    assert program.analysis.memory.peak > 0
    assert program.mesh.devices.shape == (4, 2)


def test_unreadable_hlo_is_none_and_prints_nothing(capfd):
    program = mithril_tpu.ahead_of(compiled(perceptron(), "tpu_v7x", tpu_replicas=4, parallelism="model"))
    capfd.readouterr()
    text = program.hlo
    assert capfd.readouterr().err == ""
    if text is None:
        assert "cannot read the program's text" in program.report()


# ------------------------------------------------------------------------------------------------------- not fitting
def test_hint_of_a_memory_limit_error_compiles():
    x = ml.models.IOKey("x")
    for k in range(6):
        x = ml.models.Linear(16384, bias=False, name=f"up{k}")(x)
        x = ml.models.Linear(16384, bias=False, name=f"down{k}")(ml.models.Relu()(x))
    model = ml.Model.create(outputs={"y": x})
    shapes = {"x": [8, 16384]}
    with pytest.raises(MemoryError) as caught:
        compiled(model, "tpu_v5e", shapes)  # 12 weights of 1 GiB each, and their transposes
        mithril_tpu.training_program(compiled(model, "tpu_v5e", shapes), "y")
    error = caught.value
    assert isinstance(error, ml.MemoryLimitError)
    assert error.what.count("GiB") == 2, error.what
    assert "15.75 GiB" in error.what
    options = eval(f"dict({error.hint})")
    assert (
        mithril_tpu.training_program(compiled(model, shapes=shapes, **options), "y").analysis.memory.peak
        < 15.75 * 2**30
    )


# --------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tpu_options": {"replica": 8}}, "replica"),
        ({"tpu_options": {"replicas": 4}, "tpu_replicas": 8}, "set the same option to different values"),
        ({"tpu_options": {"precision": "bfloat16"}, "precision": "float16"}, "conflicts with precision"),
        ({"tpu_options": {"replicas": 8, "model_parallelism": 3}}, "cannot be divided"),
        ({"tpu_options": {"effort": 7}}, "effort"),
        ({"tpu_options": {"model_parallelism": "2"}}, "int"),
        ({"tpu_options": {"topology": "2x4"}}, "8 devices"),
        ({"tpu_options": {"topology": "2by4"}}, "not a topology"),
        ({"tpu_replicas": 3}, "tpu_v5e is not available with 3 devices"),
        ({"parallelism": "data", "tpu_options": {"replicas": 4, "model_parallelism": 2}}, "conflicts"),
        ({"tpu_replicas": 32}, "cannot be divided over 32"),
    ],
)
def test_wrong_options_are_rejected_at_compile_time(options, words):
    with pytest.raises(ml.OptionError, match=words):
        compiled(perceptron(), **options)


def test_other_backends_and_devices_are_rejected():
    with pytest.raises(ml.BackendError, match="conflicts with the backend"):
        ml.compile(perceptron(), "numpy", target_hardware="tpu_v5e")
    with pytest.raises(ml.BackendError, match="conflicts with the backend"):
        ml.compile(perceptron(), ml.JaxBackend(), target_hardware="apple_m2")


def test_tensor_split_dims_override_the_default():
    model = compiled(
        perceptron(32, 6), parallelism="model", tpu_replicas=4, tensor_split_dims={"first.*": 0, "second.weight": 0}
    )
    program = mithril_tpu.ahead_of(model)
    assert program.strategy.splits["first.weight"] == ("model", None)
    assert program.strategy.splits["first.bias"] == ("model",)
    assert "second.weight" in program.strategy.unsplit
    assert "cannot be divided by 4" in str(model.decisions)
    with pytest.raises(ml.OptionError, match="no parameter is called"):
        compiled(perceptron(), parallelism="model", tpu_replicas=4, tensor_split_dims={"third": 0})


# -------------------------------------------------------------------------------------------------------- simulating
@pytest.mark.parametrize(
    "mesh", [{}, {"replicas": 8}, {"replicas": 4, "model_parallelism": 4}, {"replicas": 8, "model_parallelism": 2}]
)
def test_simulated_meshes_equal_one_device(mesh):
    model, shapes = block(), {"x": [8, 16, 128]}
    plain = ml.compile(model, "jax", shapes=shapes)
    simulated = compiled(model, shapes=shapes, tpu_options={**mesh, "simulate": True})
    params = plain.randomize_params(1)
    x = np.random.default_rng(0).normal(size=(8, 16, 128)).astype(np.float32)
    g = np.random.default_rng(1).normal(size=(8, 16, 128)).astype(np.float32)
    expected, gradients = plain.evaluate(params, {"x": x}, {"y": g})
    for _ in range(3):
        outputs, grads = simulated.evaluate(params, {"x": x}, {"y": g})
    np.testing.assert_allclose(np.asarray(outputs["y"]), np.asarray(expected["y"]), rtol=2e-5, atol=2e-5)
    for name, a in gradients.items():
        np.testing.assert_allclose(np.asarray(grads[name]), np.asarray(a), rtol=2e-4, atol=2e-4, err_msg=name)
    assert "CPU device" in str(simulated.decisions)
    assert mithril_tpu.ahead_of(simulated).analysis.memory.peak > 0


# ---------------------------------------------------------------------------------------------------- many processes
SCRIPT = """
import mithril as ml, mithril_tpu
from mithril.models import IOKey, Linear, Model
model = Model.create(outputs={"y": Linear(8)(IOKey("x"))})
made = ml.compile(model, ml.JaxBackend(), target_hardware="tpu_v5e", tpu_options={"effort": 0}, shapes={"x": [8, 8]})
print(mithril_tpu.ahead_of(made).analysis.memory.peak)
"""


def test_concurrent_processes_compile_without_output():
    import os

    quiet = {k: v for k, v in os.environ.items() if not k.startswith("TPU_")} | {"JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=-1, stderr=-1, text=True, env=quiet) for _ in range(3)
    ]
    outputs = [p.communicate(timeout=300) for p in running]
    assert [p.returncode for p in running] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert all(err == "" for _, err in outputs)


# ------------------------------------------------------------------------------------------------- reading HLO text
def test_collectives_are_counted_in_hlo():
    text = """
      %all-reduce.1 = f32[64,4096]{1,0:T(8,128)} all-reduce(f32[64,4096]{1,0} %x), channel_id=1
      %all-reduce.2 = (f32[8]{0}, bf16[4,2]{1,0}) all-reduce(%a, %b), channel_id=2
      %all-gather-start = (f32[4]{0}, f32[16]{0}) all-gather-start(f32[4]{0} %p), dimensions={0}
      %all-gather-done = f32[16]{0} all-gather-done(%all-gather-start)
      %exchange = bf16[16,8]{1,0} ragged-all-to-all(%rows, %zeros, %starts, %sizes, %targets, %incoming), channel_id=3
      %fusion = f32[2]{0} fusion(%all-reduce.1), calls=%c
    """
    counts = collectives(text)
    assert {k: (c.count, c.bytes) for k, c in counts.items()} == {
        "all-reduce": (2, 64 * 4096 * 4 + 32 + 16),
        "all-gather": (1, 64),
        "ragged-all-to-all": (1, 16 * 8 * 2),
    }


def test_a_collective_in_several_fusions_is_counted_once():
    """Read three fusions that begin, continue and end one exchange, and two that do so with another one."""
    parts = [(7, 1, 0), (8, 1, 0), (9, 1, 0), (10, 3, 2), (11, 3, 2)]
    text = "\n".join(
        f"  %all-gather.{k} = f32[16,8]{{1,0}} all-gather(%p), channel_id={channel}, dimensions={{0}}, "
        f'frontend_attributes={{chain_id="{chain}"}}'
        for k, channel, chain in parts
    )
    assert collectives(text) == {"all-gather": Collective(2, 2 * 16 * 8 * 4)}
    opcode, channel, chain = b"\x12\x0aall-gather", b"\xd0\x01\x03", b"\xa2\x04\x0f\n\x0d\n\x08chain_id\x12\x012"
    assert serialized_hlo._instruction(opcode + channel + chain) == ("all-gather", [], (3, b"2"))
    assert serialized_hlo._instruction(opcode + channel) == ("all-gather", [], None)


def test_collectives_of_a_serialized_program_equal_those_of_its_text():
    model = compiled(block(), shapes={"x": [16, 16, 128]}, tpu_replicas=8, parallelism="fsdp", semantics="native")
    program = mithril_tpu.training_program(model, "y")
    assert len(program.analysis.collectives) >= 2
    assert serialized_collectives(program.compiled.runtime_executable().serialize()) == program.analysis.collectives
    assert serialized_collectives(b"another format") is None


def test_collectives_are_known_where_jaxlib_cannot_print_the_program(capfd):
    model = compiled(block(), "tpu_v7x", shapes={"x": [16, 16, 128]}, tpu_replicas=16, semantics="native")
    program = mithril_tpu.training_program(model, "y", lambda p, g: {n: p[n] - 0.1 * g[n] for n in p})
    capfd.readouterr()
    assert program.analysis.collectives["all-reduce"].bytes >= 4 * 12 * 128 * 128  # all gradients
    assert "all-reduce" in program.report()
    assert capfd.readouterr().err == ""


# --------------------------------------------------------------------------------------------------- ml.Trainer's step
def test_step_of_a_trainer_is_one_program():
    pytest.importorskip("mithril_train")
    model = compiled(perceptron(256, 8), tpu_replicas=4, parallelism="fsdp", semantics="native")
    trainer = ml.Trainer(model, ml.Adam(0.01), loss="mse_loss", clip_norm=1.0, progress=False)
    batch = {"x": np.zeros((16, 128), np.float32), "target": np.zeros((16, 8), np.float32)}
    program = mithril_tpu.step_program(trainer, batch)
    parameters = 4 * (128 * 256 + 256 * 8)
    assert program.analysis.memory.arguments >= 3 * parameters / 4  # a quarter on each device, with two moments
    assert program.analysis.memory.arguments < parameters
    assert program.analysis.memory.aliased >= 0.9 * 3 * parameters / 4
    assert "all-reduce" in program.analysis.collectives
    with pytest.raises(ml.InputError, match="requires a model compiled for a TPU"):
        mithril_tpu.step_program(ml.Trainer(ml.compile(perceptron(), "jax"), ml.SGD(0.1), loss="mse_loss"), batch)


def test_float32_products_are_exact_except_with_native_semantics():
    exact = mithril_tpu.ahead_of(compiled(perceptron()))
    assert "precision = [HIGHEST, HIGHEST]" in exact.stablehlo
    quick = compiled(perceptron(), semantics="native")
    assert "HIGHEST" not in mithril_tpu.ahead_of(quick).stablehlo
    assert "float32 products use the default precision of tpu_v5e" in str(quick.decisions)


# ------------------------------------------------------------------------------------------------- stages and parts
def test_pipeline_is_one_program_for_all_stages():
    options = {"shapes": {"x": [8, 16, 128]}, "semantics": "native"}
    model = compiled(block(), pipeline_stages=2, pipeline_chunks=2, tpu_replicas=4, **options)
    program, single = mithril_tpu.ahead_of(model), mithril_tpu.ahead_of(compiled(block(), **options))
    assert dict(program.mesh.shape) == {"data": 2, "model": 1, "pipeline": 2}
    assert {"all-to-all", "collective-permute"} <= program.analysis.collectives.keys()
    assert program.analysis.memory.arguments < 0.7 * single.analysis.memory.arguments
    with pytest.raises(ml.BackendError, match="has no TPU"):
        model.evaluate(model.randomize_params(0), {"x": np.ones((8, 16, 128), np.float32)})


@pytest.mark.slow
def test_simulated_pipeline_equals_one_device():
    x, g = ({"x": np.ones((8, 16, 128), np.float32)}, np.ones((8, 16, 128), np.float32))
    model = compiled(
        block(),
        shapes={"x": [8, 16, 128]},
        tpu_options={"simulate": True},
        pipeline_stages=2,
        pipeline_chunks=2,
        tpu_replicas=4,
    )
    params = model.randomize_params(0)
    one = ml.compile(block(), ml.JaxBackend(), shapes={"x": [8, 16, 128]})
    for actual, expected in zip(model.evaluate(params, x, g), one.evaluate(params, x, g), strict=True):
        for name in expected:
            np.testing.assert_allclose(actual[name], expected[name], rtol=1e-3, atol=1e-3)


def test_fully_sharded_parameters_need_a_fraction_of_the_memory():
    def arguments(**options):
        model = compiled(perceptron(512, 512), tpu_options={"replicas": 8}, **options)
        return mithril_tpu.ahead_of(model).analysis.memory.arguments

    assert arguments(parallelism="fsdp") < arguments() / 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallelism": "data", "pipeline_stages": 2}, "conflicts with pipeline_stages"),
        ({"tpu_replicas": 3, "pipeline_stages": 2}, "cannot be divided into 2 stages"),
        ({"pipeline_stages": 0}, "of at least 1"),
    ],
)
def test_invalid_stages_are_rejected(options, message):
    with pytest.raises(ml.OptionError, match=message):
        compiled(perceptron(), **options)


def test_programs_with_static_weights_contain_them(tmp_path):
    static = compiled(perceptron(256, 128), static_inference=True)
    params = static.randomize_params(0)
    program = mithril_tpu.ahead_of(static.bind(params))
    metadata = json.loads((program.save(tmp_path) / "analysis.json").read_text())
    assert metadata["params"] == []
    assert program.stablehlo.count('dense<"0x') >= 2
