"""All frameworks loaded into one process, in any order: each computes the same, and threads are one option for all."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from mithril import plugins

NAMES = [n for n in ("numpy", "jax", "torch", "mlx", "c", "ggml") if n in plugins.backends()]
CODE = """
    import sys
    import numpy as np
    import mithril as ml
    from mithril.models import Linear, Model, Relu

    model = Model()
    model += Linear(96)
    model += Relu()
    model += Linear(32)
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    made = []
    for name in sys.argv[1:]:
        backend = ml.JaxBackend(num_threads=1) if name == "jax" else name
        compiled = ml.compile(model, backend, shapes={"input": [64, 128]}, num_threads=1, strict=True)
        made.append((name, compiled, compiled.randomize_params(0)))
    found = {}
    for name, compiled, params in [*made, *reversed(made)]:  # each before and after all others have run
        outputs, slopes = compiled.evaluate(params, {"input": x}, np.ones((64, 32), np.float32))
        arrays = {n: compiled.backend.to_numpy(a).copy() for n, a in {**outputs, **slopes}.items()}
        found.setdefault(name, []).append(arrays)
    expected = found[sys.argv[1]][0]
    for name, runs in found.items():
        for arrays in runs:
            for n, a in arrays.items():
                np.testing.assert_allclose(a, expected[n], rtol=1e-3, atol=1e-3, err_msg=f"{name} {n}")
    print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]], ids=["as listed", "reversed"])  # each before every other one
def test_frameworks_get_along(order):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CODE), *order]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.stdout.strip() == "fine", done.stderr[-3000:]
