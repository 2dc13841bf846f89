"""Targets and meshes need no JAX: each script runs in processes that refuse to import it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "mithril_jax", "mithril_tpu"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Refuse())
"""
MODEL = """
import numpy as np
import mithril as ml
from mithril.models import IOKey, Linear, Model, Relu

model = Model.create(outputs={"y": Linear(4, name="down")(Relu()(Linear(8, name="up")(IOKey("x"))))})
x = np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)
"""
TELEPHONE = """
compiled = ml.compile(model, "c", target_hardware="mobile", shapes={"x": [8, 6]})
assert compiled.programs[-1].executable.target.arch == "arm64-v8a"
compiled.export("bundle", params=compiled.randomize_params(0), library=None)
"""
MESH = """
expected = ml.compile(model, "torch", shapes={"x": [8, 6]})
compiled = ml.compile(model, ml.TorchBackend(device_mesh=(1, 2)), shapes={"x": [8, 6]})
y = compiled.evaluate(compiled.randomize_params(0), {"x": x})["y"]
np.testing.assert_allclose(y, expected.evaluate(expected.randomize_params(0), {"x": x})["y"], rtol=1e-5, atol=1e-6)
"""
PLAN = """
assert ml.plan(model, "tpu_v5e", shapes={"x": [8, 6]}, devices=2, of="y").best.fits
"""


@pytest.mark.parametrize("job", [TELEPHONE, MESH, PLAN], ids=["telephone", "mesh", "plan"])
def test_jobs_run_where_jax_cannot_be_imported(job, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(REFUSE)  # read by each process that the job starts, too
    (tmp_path / "job.py").write_text(MODEL + job)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "job.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
