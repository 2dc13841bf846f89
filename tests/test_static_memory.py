"""``static_inference`` keeps one copy of the weights in addition to the caller's: measured in a separate process."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mithril as ml

PROGRAM = """
import ctypes, gc, sys
import numpy as np
import mithril as ml
from mithril.models import Linear, Model

def resident():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def compiled(size):
    model = Model()
    for _ in range(2):
        model += Linear(size, bias=False)
    program = ml.compile(model, sys.argv[1], shapes={"input": [1, size]}, static_inference=True)
    shapes = {name: x.shape for name, x in program.randomize_params(seed=0).items()}
    weights = {name: np.full(shape, 0.01 + 0.01 * k, np.float32) for k, (name, shape) in enumerate(shapes.items())}
    params = {name: program.backend.array(x) for name, x in weights.items()}  # equal ones would be stored once
    return program, params, np.ones((1, size), np.float32)

warm, params, x = compiled(64)
warm.bind(params)({"input": x})
program, params, x = compiled(4096)
before = resident()
program.bind(params)
for _ in range(2):
    y = np.asarray(program({"input": x})["output"])  # some backends compute in the background: wait for the end
print((resident() - before) / sum(np.asarray(p).nbytes for p in params.values()))
assert str(program.graph) and len(program.graph.nodes)  # compiled again to be shown
assert program.memory_report().parameters
print((resident() - before) / sum(np.asarray(p).nbytes for p in params.values()))
assert np.allclose(y, 4096**2 * 0.01 * 0.02, rtol=1e-4)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("backend", sorted(ml.plugins.backends()))
def test_static_inference_costs_one_copy_of_the_weights(backend: str) -> None:
    command = [sys.executable, "-c", PROGRAM, backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    called, shown = map(float, done.stdout.split()[-2:])
    assert called < 1.3
    assert shown < 1.3, "graphs with weights that were compiled again to be shown stayed in memory"
