"""Simulated programs, which need no compiler of a TPU: the options of XLA that results depend on."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder
from mithril_jax.execution import PASSES_AGAINST_BARRIERS

WINDOW = {"kernel": (2, 2), "stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}


def test_gradients_of_max_pool_find_the_maximum():
    """Pool values that XLA would compute again for the comparison with their maximum, unless barriers stay."""
    with Builder() as b:
        u = b.input("x", (64, 8)) + b.param("w", (64, 8)) * 0.5
        v = ops.exp(u * 0.3) * u + u * 1.1
        graph = b.build({"y": ops.max_pool(ops.reshape(v, shape=(1, 1, 64, 8)), **WINDOW), "z": v + 1.0})
    rng = np.random.default_rng(26)
    x, w, slope = (rng.standard_normal(s).astype(np.float32) for s in ((64, 8), (64, 8), (1, 1, 63, 7)))
    gradients = []
    for options in ({}, {"target_hardware": "tpu_v5e", "tpu_options": {"simulate": True}}):
        compiled = ml.compile(graph, ml.JaxBackend(), **options)
        slopes = {"y": slope, "z": np.zeros((64, 8), np.float32)}
        gradients.append(np.asarray(compiled.evaluate({"w": w}, {"x": x}, slopes)[1]["w"]))
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_stages": 2, "pipeline_schedule": "interleaved1f1b"}, "is a schedule of PyTorch"),
        ({"pipeline_stages": 0}, "of at least 1"),
        ({"pipeline_stages": 2, "pipeline_chunks": 0}, "of at least 1"),
    ],
)
def test_pipelines_that_a_tpu_cannot_run_are_refused(options, message):
    with Builder() as b:
        graph = b.build({"y": b.input("x", (8, 16)) * b.param("w", (8, 16))})
    simulated = {"target_hardware": "tpu_v5e", "tpu_options": {"simulate": True}}
    with pytest.raises(ml.OptionError, match=message):
        ml.compile(graph, ml.JaxBackend(), **simulated, **options)


def test_a_pipeline_keeps_the_barriers_of_its_stages():
    """Compare inside of a stage; the options of the whole program decide whether XLA removes the barriers."""
    with Builder() as b:
        x = b.input("x", (8, 16))
        for k in range(2):
            v = ops.exp(x * 0.3) * x + b.param(f"w{k}", (8, 16))
            x = ops.where(ops.equal(v, ops.max(v, axis=1, keepdims=True)), v, v * 0.1)
        graph = b.build({"y": x})
    compiled = ml.compile(graph, ml.JaxBackend(), pipeline_stages=2, pipeline_chunks=2)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((8, 16)).astype(np.float32) for _ in range(4)]
    compiled.evaluate({"w0": arrays[0], "w1": arrays[1]}, {"x": arrays[2]}, arrays[3])
    executable = compiled.programs[-1].executable
    assert "optimization_barrier" in str(executable.source)
    assert all(name in str(executable.call.compiler_options) for name in PASSES_AGAINST_BARRIERS)
