"""``static_inference`` keeps one copy of the weights in addition to the caller's: measured in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
from mithril.compiler.weight_files import save_file
from mithril.models import Conv2d

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
    for k in range(2):
        model += Linear(size, name=f"l{k}")
    program = ml.compile(model, sys.argv[1], shapes={"input": [1, size]}, static_inference=True)
    shapes = {name: x.shape for name, x in program.randomize_params(seed=0).items()}
    rng = np.random.default_rng(0)  # XLA stores arrays of one repeated number as that number
    weights = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    params = {name: program.backend.array(x) for name, x in weights.items()}
    return program, params, np.ones((1, size), np.float32)

warm, params, x = compiled(64)
warm.bind(params)({"input": x})
program, params, x = compiled(2048)
before, size = resident(), sum(np.asarray(p).nbytes for p in params.values())
expected = np.ones(2048, np.float64)
for k in range(2):
    expected = np.asarray(params[f"l{k}.weight"]) @ expected + np.asarray(params[f"l{k}.bias"])
program.bind(params)
for _ in range(2):
    y = np.asarray(program({"input": x})["output"])  # some backends compute in the background: wait for the end
print((resident() - before) / size)
assert str(program.graph) and len(program.graph.nodes)  # compiled again to be shown
assert program.memory_report().parameters
held = resident() - before
arrays, _ = program.backend.embedded_weights(program.programs[-1].executable, size)
copies = 1 if arrays else program.backend.embedded_copies
print(held / size, program.memory_report().weights.in_memory / (held + size), copies)
assert np.allclose(y, expected, rtol=1e-3)
"""
CODES = """
import ctypes, gc, sys
import numpy as np
import mithril as ml
from mithril.models import Linear

def anonymous():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return next(1024 * int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon"))

def compiled(size):
    model = ml.Model()
    for k in range(8):
        model += Linear(size, size, bias=False, name=f"l{k}")
    setting = {"precision": "bfloat16"}
    if sys.argv[3] == "int4":
        setting = {"quantization": {"weights": "int4", "activations": "dynamic"}}
    return ml.compile(model, "c", shapes={"input": [1, size]}, static_inference=True, **setting)

small = compiled(64)  # imports the compiler
small.bind({f"l{k}.weight": np.ones((64, 64), np.float32) for k in range(8)})
small({"input": np.ones((1, 64), np.float32)})
before = anonymous()
model = compiled(2048)
weights, is_released = ml.open_weights(sys.argv[1]), sys.argv[2] == "released"
if is_released:
    weights = {name: np.array(x) for name, x in weights.items()}
model.bind(weights, release=is_released)
assert not (is_released and weights)
model({"input": np.ones((1, 2048), np.float32)})
measured, report = anonymous() - before, model.memory_report()
print(measured, report.weights.in_memory, report.peak)
dtype = np.float32 if sys.argv[3] == "int4" else model.backend.native_dtype(ml.dtype("bfloat16"))
assert {x.dtype for x in model.params.values()} == {np.dtype(dtype)}
"""

SHARED = """
import ctypes, gc, sys
import numpy as np
import mithril as ml
from mithril.backend import held_weights
from mithril.models import Linear

def anonymous():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return next(1024 * int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon"))

def compiled(size, params, quantization):
    model = ml.Model()
    for k in range(2):
        model += Linear(size, size, bias=False, name=f"l{k}")
    options = {"static_inference": True, "cache": True, "cache_dir": sys.argv[2], "quantization": quantization}
    program = ml.compile(model, "c", shapes={"input": [1, size]}, **options)
    return program.bind(params), program({"input": np.ones((1, size), np.float32)})["output"]

dynamic = {"weights": "int4", "activations": "dynamic"}
for quantization, path in ((None, sys.argv[1]), (dynamic, sys.argv[1]), (None, sys.argv[3])):
    warm = compiled(64, {f"l{k}.weight": np.ones((64, 64), np.float32) for k in range(2)}, quantization)
    before = anonymous()
    program, result = compiled(2048, ml.open_weights(path), quantization)
    constants = program.programs[-1].executable.layout.constants.values()
    print(anonymous() - before, held_weights(constants).mapped, float(result.sum()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("backend", sorted(ml.plugins.backends()))
def test_static_inference_costs_one_copy_of_the_weights(backend: str) -> None:
    command = [sys.executable, "-c", PROGRAM, backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    called, shown, reported, copies = map(float, done.stdout.split()[-4:])
    assert called < copies + 0.3
    assert copies == 1 or backend not in ("c", "jax"), "weights of products are embedded in the program"
    assert shown < copies + 0.3, "graphs with weights that were compiled again to be shown stayed in memory"
    assert abs(reported - 1) < 0.15, "memory_report() is far from the memory of the process"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("source", "kind", "size"),
    [("mapped", "int4", 1.4), ("released", "int4", 1.4), ("mapped", "bfloat16", 2.4)],
)
def test_rounded_weights_are_the_only_ones_in_memory(tmp_path: Path, source: str, kind: str, size: float) -> None:
    """Compare the report with the process; a weight has 4 bytes in float32, 0.56 each as value and packed of 4 bits."""
    pytest.importorskip("mithril_cbackend")
    pytest.importorskip("mithril_hub")
    rng = np.random.default_rng(0)
    weights = {f"l{k}.weight": rng.standard_normal((2048, 2048), dtype=np.float32) for k in range(8)}
    save_file(weights, tmp_path / "w.safetensors", {})
    command = [sys.executable, "-c", CODES, str(tmp_path / "w.safetensors"), source, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured, reported, peak = map(int, done.stdout.split())
    assert measured < size * 8 * 2048 * 2048
    assert abs(measured - reported) < 0.15 * measured
    assert abs(measured - peak) < 0.15 * measured


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_processes_share_the_packed_weights_of_the_cache(tmp_path: Path) -> None:
    """Neither the process that packs weights nor the next one holds a copy next to the cache's file.

    The last rows are of a GGUF file of q8_0, whose blocks are not decoded.
    """
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("mithril_cbackend")
    pytest.importorskip("mithril_hub")
    rng = np.random.default_rng(0)
    weights = {f"l{k}.weight": rng.standard_normal((2048, 2048), dtype=np.float32) for k in range(2)}
    save_file(weights, tmp_path / "w.safetensors", {})
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "none")
    for name, array in weights.items():
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = str(tmp_path / "w.safetensors"), str(tmp_path / "cache"), str(tmp_path / "w.gguf")
    command = [sys.executable, "-c", SHARED, *files]
    runs = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        runs.append([[float(x) for x in line.split()] for line in done.stdout.splitlines()])
    for bytes_per_weight, (first, mapped, result), (second, mapped_again, again) in zip(
        (4, 0.56, 1.06), *runs, strict=True
    ):
        packed = bytes_per_weight * 2 * 2048 * 2048
        assert result == again
        assert min(mapped, mapped_again) > 0.9 * packed
        assert max(first, second) < packed / 4, "a process holds packed weights of its own"


def test_embedded_views_of_a_file_are_not_counted_as_memory(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    weight = np.random.default_rng(0).random((64, 64, 3, 3), np.float32)
    save_file({"weight": weight}, file, {})
    program = ml.compile(
        Conv2d(64, 64, 3, bias=False), "numpy", shapes={"input": [1, 64, 8, 8]}, static_inference=True
    ).bind(ml.open_weights(file))
    program({"input": np.ones((1, 64, 8, 8), np.float32)})
    report = program.memory_report().weights
    assert report.mapped >= weight.nbytes
    assert report.in_memory < 0.1 * weight.nbytes
    assert not report.is_estimate
