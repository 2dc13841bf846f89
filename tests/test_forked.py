"""After a fork, models run or raise our error; none waits for threads that are not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
import mithril as ml
from mithril.graph.errors import BackendError
from mithril.models import Linear, Model

def model():
    m = Model()
    m |= Linear(3)(input="input", output="output")
    return ml.compile(m, sys.argv[1], shapes={"input": [2, 3]})

compiled = model()
params = compiled.randomize_params(seed=0)
x = {"input": compiled.backend.array(np.ones((2, 3), np.float32))}
for _ in range(3):
    first = compiled.evaluate(params, x)["output"]
uses = {
    "quick": lambda: compiled.evaluate(params, x),
    "slow": lambda: compiled.evaluate(params, {"input": np.ones((2, 3), np.float32)}),
    "gradients": lambda: compiled.evaluate(params, x, output_gradients={"output": x["input"]}),
    "parameters": lambda: compiled.randomize_params(seed=1),
    "bind": lambda: compiled.bind(params)(x),
    "compile": model,
}
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(300)
for name, use in uses.items():
    try:
        use()
        print(name, "ran", flush=True)
    except BackendError as error:
        assert "spawn" in str(error), error
        print(name, "raised", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
@pytest.mark.parametrize("backend", ["numpy", "torch", "c", "ggml", "jax", "mlx"])
def test_a_forked_process_runs_or_raises(backend):
    done = subprocess.run([sys.executable, "-c", PROGRAM, backend], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = "raised" if backend in ("jax", "mlx") else "ran"
    assert [line.split()[1] for line in done.stdout.splitlines()] == [expected] * 6
