"""Training with ``scan_layers``, on one device and on meshes: equal to separate layers on one device."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import Dropout, IOKey, LayerNorm, Linear, Model, Relu

X = np.random.default_rng(0).standard_normal((8, 32), np.float32)


def network() -> Model:
    h = IOKey("x")
    for k in range(3):
        h = h + Dropout(0.1)(Linear(32, name=f"b{k}")(Relu()(Linear(64, name=f"a{k}")(LayerNorm(32, name=f"n{k}")(h)))))
    return Model.create(outputs={"y": h})


def trained(backend, **options):
    optimizer, batch = ml.SGD(0.1, momentum=0.9), {"x": X, "target": np.flip(X, 0).copy()}
    options |= {
        "loss": "mse",
        "clip_norm": 1.0,
        "backend": backend,
        "seed": 1,
        "progress": False,
        "xla_optimization_level": 0,
    }
    trainer = ml.Trainer(network(), optimizer, **options)
    trainer.step(batch)
    return trainer


@pytest.mark.parametrize(("mesh", "parallelism"), [(None, None), ((4, 2), None), ((8,), "fsdp")])
def test_steps_equal_those_of_separate_layers(mesh, parallelism):
    expected = trained(ml.JaxBackend(device="cpu")).engine.to_numpy()
    trainer = trained(ml.JaxBackend(device="cpu", device_mesh=mesh), scan_layers=True, parallelism=parallelism)
    assert "equal layers are loops: " in str(trainer.engine.decisions)
    for name, x in trainer.engine.to_numpy().items():
        np.testing.assert_allclose(x, expected[name], atol=2e-6, err_msg=name)
