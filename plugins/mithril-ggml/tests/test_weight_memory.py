"""Quantized weights are smaller in memory as well: measured, in processes of their own."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, gc, os, sys
import numpy as np
import mithril as ml
from mithril.models import Linear, Model

kind, path = sys.argv[1:]

def resident():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def compiled(size):
    model = Model()
    for _ in range(2):
        model += Linear(size, bias=False)
    program = ml.compile(model, ml.GGMLBackend(quantize=kind), shapes={"input": [1, size]}, static_inference=True)
    names = program.randomize_params(seed=0)  # equal weights would be stored once
    return program, {name: np.full((size, size), 0.01 + k, np.float32) for k, name in enumerate(names)}

x = np.ones((1, 2048), np.float32)
warm, params = compiled(256)
warm.bind(params)({"input": x[:, :256]})
warm.export(path)
ml.load(path)({"input": x[:, :256]})
program, params = compiled(2048)
before = resident()
program.bind(params)({"input": x})
bound = resident() - before
program.export(path)
told = program.programs[-1].executable.memory.total
weights = program.memory_report().parameters
del program, params
before = resident()
loaded = ml.load(path)
loaded({"input": x})
mapped = resident() - before
expected = loaded({"input": x})["output"].copy()
del loaded
before = resident()
loaded = ml.load(path, mapped=False)
os.truncate(path, 0)
assert (loaded({"input": x})["output"] == expected).all()
print(bound, told, weights, mapped, resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_four_bits_take_less_than_eight(tmp_path):
    packed = {"q8_0": 8.9e6, "q4_0": 4.7e6}
    figures = {}
    for kind, size in packed.items():
        command = [sys.executable, "-c", PROGRAM, kind, str(tmp_path / f"{kind}.gguf")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        bound, reported, weights, loaded, copied = (float(n) for n in done.stdout.split()[-5:])
        assert bound < 1.3 * size + 2e6, "float weights, or packed rows beside interleaved ones, stayed in memory"
        assert abs(bound - reported) < 0.15 * reported + 2e6
        assert abs(weights - size) < 0.05 * size, "memory_report() counts float weights"
        assert loaded < 1.3 * size + 2e6, "the file's rows stayed beside the interleaved ones"
        assert copied < 1.3 * size + 2e6, "the copy's rows stayed in memory"
        figures[kind] = loaded
    assert figures["q4_0"] < figures["q8_0"]
