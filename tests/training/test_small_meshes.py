"""Fully sharded training on JAX over one to four simulated devices: the same losses, whatever a mesh can divide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

pytest.importorskip("jax")

PROGRAM = """
import json, numpy as np, mithril as ml
from mithril.models import Dropout, IOKey, Linear, Model, Relu

x = np.random.default_rng(0).standard_normal((24, 12), np.float32)
data = {"x": x, "target": x[:, :1] * 2}
results = {}
for devices in (4, 3, 2, 1):
    hidden = Dropout(0.25)(Relu()(Linear(48, name="a")(IOKey("x"))))
    model = Model.create(outputs={"y": Linear(1, name="b")(hidden)})
    backend = ml.JaxBackend(device_mesh=(devices,))
    trainer = ml.Trainer(model, ml.Adam(0.01), loss="mse_loss", backend=backend, parallelism="fsdp", progress=False)
    trainer.fit(ml.DataLoader(data, 12, seed=1), 2)
    arrays = trainer.engine.arrays
    small = [n for n, a in arrays.items() if a.size < 64 and not a.sharding.is_fully_replicated]
    split = not arrays["a.weight"].sharding.is_fully_replicated
    results[devices] = {"loss": trainer.history["loss"], "small": small, "split": split}
print(json.dumps(results))
"""


def test_keys_and_small_arrays_are_not_divided():
    """A random key has two words, which a mesh of two devices could divide."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    for devices, result in results.items():
        assert result["small"] == []
        assert result["split"] == (int(devices) > 1)
        np.testing.assert_allclose(result["loss"], results["1"]["loss"], rtol=1e-5)
