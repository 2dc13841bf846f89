"""Programs of XLA's GPU compiler on a machine without a GPU, if its plugin is installed."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import block, perceptron, scalar_loss

import mithril as ml
import mithril_tpu
from mithril_targets import nvidia
from mithril_tpu.aot import gpus

needs_compiler = pytest.mark.skipif(not gpus.has_compiler(), reason="jax-cuda12-pjrt is not installed")


def compiled(model, target="nvidia_a100", shapes=None, **options):
    return ml.compile(model, ml.JaxBackend(), target_hardware=target, shapes=shapes or {"x": [16, 128]}, **options)


def test_every_target_is_described():
    assert set(gpus.CHIPS) == {t.name for t in nvidia.TARGETS}
    for target in nvidia.TARGETS:
        chip = gpus.CHIPS[target.name]
        text = gpus.description(chip, target)
        assert text.count("{") == text.count("}")
        # The data sheet's rate follows from lanes and clock: one product and one sum per lane and clock.
        assert chip.processors * chip.lanes * 2 * chip.clock * 1e9 == pytest.approx(
            target.peak_flops["float32"], rel=0.05
        )


@pytest.mark.skipif(gpus.has_compiler(), reason="jax-cuda12-pjrt is installed")
def test_missing_compiler_error_names_the_package():
    with pytest.raises(ml.BackendError, match="GPU that is not on this machine") as caught:
        compiled(perceptron())
    assert "jax-cuda12-pjrt" in caught.value.hint


def test_simulating_needs_no_compiler():
    model = compiled(perceptron(), tpu_options={"replicas": 4, "simulate": True})
    out = model.evaluate(model.randomize_params(0), {"x": np.ones((16, 128), np.float32)})
    assert np.asarray(out["y"]).shape == (16, 8)


@needs_compiler
@pytest.mark.parametrize("name", list(gpus.CHIPS))
def test_every_gpu_compiles(name):
    program = mithril_tpu.ahead_of(compiled(perceptron(), name))
    assert program.analysis.memory.peak > 16 * 128 * 4
    assert program.serialized()
    with pytest.raises(ml.BackendError, match="has no GPU"):
        program({}, {})


@needs_compiler
def test_meshes_have_the_expected_collectives():
    model = compiled(scalar_loss(), parallelism="data", tpu_replicas=4)
    assert mithril_tpu.training_program(model, "loss").analysis.collectives["all-reduce"].count >= 1
    pair = compiled(block(), shapes={"x": [8, 64, 128]}, parallelism="model", tpu_replicas=4)
    assert mithril_tpu.ahead_of(pair).analysis.collectives["all-reduce"].count == 2


@needs_compiler
def test_program_that_does_not_fit_is_a_memory_error():
    model = ml.models.Linear(1 << 17, bias=False)
    wrapped = ml.Model.create(outputs={"y": model(ml.models.IOKey("x"))})
    with pytest.raises(ml.MemoryLimitError, match="GiB") as caught:
        compiled(wrapped, "nvidia_a100_40gb", {"x": [8, 1 << 17]})
    options = eval(f"dict({caught.value.hint})")
    compiled(wrapped, "nvidia_a100_40gb", {"x": [8, 1 << 17]}, **options)
