"""The C backend around its kernels: call overhead, compile time, speed and size of exported C.

python benchmarks/bench_c_edges.py [calls] [compiling] [export]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "TVM_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
from interleaved import interleaved  # noqa: E402

import mithril as ml  # noqa: E402
from mithril.models import Gelu, LayerNorm, Linear, Model, Relu, Softmax  # noqa: E402

HERE = Path(__file__).parent


def small(layers: list[Any], features: int) -> Any:
    model = Model()
    for layer in layers:
        model += layer
    compiled = ml.compile(model, "c", shapes={"input": [4, features]}, inference=True)
    return compiled.bind(compiled.randomize_params(seed=0))


def calls() -> None:
    """Microseconds of a call of small graphs, where arithmetic is nothing: ours and torch eager's."""
    import torch

    torch.set_num_threads(1)
    linear, norm = torch.nn.functional.linear, torch.nn.functional.layer_norm
    x = np.ones((4, 16), np.float32)

    def two(t: Any, w: Any) -> Any:
        return linear(torch.relu(linear(t, w["a.weight"], w["a.bias"])), w["b.weight"], w["b.bias"])

    def block(t: Any, w: Any) -> Any:
        t = norm(t, (16,), w["n.weight"], w["n.bias"])
        t = torch.nn.functional.gelu(linear(t, w["a.weight"], w["a.bias"]))
        t = norm(linear(t, w["b.weight"], w["b.bias"]), (16,), w["m.weight"], w["m.bias"])
        return torch.softmax(linear(t, w["c.weight"], w["c.bias"]), -1)

    cases = {
        "linear, relu, linear": ([Linear(16, name="a"), Relu(), Linear(16, name="b")], two),
        "norm, linear, gelu, linear, norm, linear, softmax": (
            [
                LayerNorm(name="n"),
                Linear(16, name="a"),
                Gelu(),
                Linear(16, name="b"),
                LayerNorm(name="m"),
                Linear(16, name="c"),
                Softmax(),
            ],
            block,
        ),
    }
    print("call of a small graph [4, 16], one thread, microseconds")
    for name, (layers, eager) in cases.items():
        compiled = small(layers, 16)
        executable, params = compiled.programs[-1].executable, compiled.params
        weights = {n: torch.tensor(v) for n, v in params.items()}
        t, inputs = torch.tensor(x), {"input": x}
        with torch.inference_mode():
            np.testing.assert_allclose(eager(t, weights).numpy(), compiled(inputs)["output"], atol=1e-5)
            best = interleaved(
                {
                    "torch": lambda eager=eager, t=t, w=weights: eager(t, w),
                    "compiled(inputs)": lambda c=compiled, g=inputs: c(g),
                    "executable": lambda e=executable, p=params, g=inputs: e(p, g),
                    "C function": lambda e=executable: e.run(e.address),
                },
                seconds=3,
            )
        print(f"  {name}")
        for way, seconds in best.items():
            print(f"    {way:<18}{seconds * 1e6:>8.2f}   torch eager takes {best['torch'] / seconds:>6.1f}x")


COMPILE = """
import sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np
import mithril as ml
from gpt import gpt
model = gpt(vocabulary=1024, length=128, layers=12, heads=12, features=768)
start, cpu = time.perf_counter(), time.process_time()
made = ml.compile(model, "c", shapes={"input": [1, 64]}, inference=True, cache=True, cache_dir=sys.argv[2])
print(time.perf_counter() - start, time.process_time() - cpu, "tvm" in sys.modules)
if "tvm" in sys.modules:
    program = made.programs[-1].executable.program
    print(len(program.functions), program.calls)
"""


def compiling() -> None:
    """Compile a GPT of twelve blocks in fresh processes: cold, and from the disk cache."""
    print("compiling a GPT of 12 blocks, 768 features, 64 tokens; each in a fresh process")
    with tempfile.TemporaryDirectory() as folder:
        for way in ("cold", "from the cache", "from the cache"):
            command = [sys.executable, "-c", COMPILE, str(HERE.parent / "examples"), folder]
            words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            more = f", {words[3]} functions for {words[4]} calls" if len(words) > 3 else ""
            print(f"  {way:<16}{float(words[0]):>7.2f} s ({float(words[1]):.2f} s of the processor){more}")


def exported() -> None:
    """Export a perceptron: bytes, and its time over that of the same program in process."""
    model = Model()
    for k, size in enumerate((512, 512, 10)):
        model += Linear(size, name=f"l{k}")
        if k < 2:
            model += Relu()
    x = np.random.default_rng(0).standard_normal((32, 784)).astype(np.float32)
    print("MLP 784-512-512-10, batch 32, exported")
    for options in ({}, {"platform": "linux", "arch": "x86_64", "optimize_size": True, "quantization": "int8"}):
        compiled = ml.compile(model, "c", shapes={"input": [32, 784]}, inference=True, mobile_options=options)
        compiled.bind(compiled.randomize_params(seed=0))
        with tempfile.TemporaryDirectory() as folder:
            files = compiled.export(folder, inputs={"input": x}, library="shared")
            print("  " + "\n  ".join(str(files).splitlines()[1:]))
            if not options:
                print(f"  the C, by the same in Python: {against_python(compiled, Path(folder), x):.2f}x the time")


def against_python(compiled: Any, folder: Path, x: np.ndarray[Any, Any]) -> float:
    import ctypes

    library = ctypes.CDLL(str(folder / "libmodel.so"))
    header = (folder / "model.h").read_text()
    sizes = dict(re.findall(r"#define (\w+) (\d+)", header))
    slots = re.search(r"table\[(\d+)\]", header)
    assert slots is not None
    table = np.zeros(int(slots[1]) + 1, np.int64)
    arena = np.zeros(int(sizes["MODEL_ARENA_BYTES"]) + 64, np.uint8)
    y = np.zeros(int(sizes["MODEL_OUTPUT_SIZE"]), np.float32)
    model, inp, out = (ctypes.c_void_p(a.ctypes.data) for a in (table, x, y))
    library.model_init(model, ctypes.c_void_p(arena.ctypes.data + -arena.ctypes.data % 64))
    for name, w in compiled.params.items():
        library.model_set_weight(model, name.encode(), ctypes.c_void_p(w.ctypes.data))
    executable = compiled.programs[-1].executable
    compiled({"input": x})
    best = interleaved(
        {"C": lambda: library.model_run(model, inp, out), "Python": lambda: executable.run(executable.address)},
        seconds=3,
    )
    return best["C"] / best["Python"]


PARTS = {"calls": calls, "compiling": compiling, "export": exported}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
