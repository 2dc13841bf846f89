"""The C backend around its kernels: call overhead, speed and size of exported C.

python benchmarks/bench_c_edges.py [calls] [export]
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

import harness
import numpy as np
from models import perceptron

import mithril as ml
from mithril.models import Conv2d, Gelu, LayerNorm, Linear, Model, Relu, Softmax


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
            best = harness.interleaved(
                {
                    "torch": lambda eager=eager, t=t, w=weights: eager(t, w),
                    "compiled(inputs)": lambda c=compiled, g=inputs: c(g),
                    "C function": lambda e=executable: e.run(e.address),
                },
                seconds=3,
            )
        print(f"  {name}")
        for way, seconds in best.items():
            print(f"    {way:<18}{seconds * 1e6:>8.2f}   torch eager takes {best['torch'] / seconds:>6.1f}x")


def convolutions() -> tuple[Any, list[int]]:
    model = Model()
    for k in range(4):
        model += Conv2d(64, kernel_size=3, padding=1, name=f"c{k}")
        model += Relu()
    return model, [1, 64, 28, 28]


DTYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "int8": {"quantization": {"ranges": None}},  # measured
    "int4": {"quantization": {"weights": "int4"}},
    "int4, bytes": {"quantization": {"weights": "int4", "activations": "dynamic"}},
}
SMALL = {"platform": "linux", "arch": "x86_64", "optimize_size": True}


def exported() -> None:
    """Export models of every dtype: bytes, and their times relative to the same program in this process."""
    for title, build, dtypes in (
        ("MLP 768-512-512-10, batch 32", lambda: (perceptron(512, 512, 10), [32, 768]), list(DTYPES)),
        ("4 convolutions of 64 channels at 28", convolutions, ["float32", "bfloat16", "int8"]),
    ):
        print(f"{title}: bytes of weights, arena, machine code; times of gcc, clang; arena, machine code with -Os")
        model, shape = build()
        exact = ml.compile(model, "c", shapes={"input": shape}, inference=True)
        exact.bind(exact.randomize_params(seed=0))
        samples = [{"input": np.random.default_rng(k).standard_normal(shape).astype(np.float32)} for k in range(32)]
        for dtype in dtypes:
            options = dict(DTYPES[dtype])
            if options.get("quantization", {}).keys() == {"ranges"}:
                options["quantization"] = {"ranges": ml.calibrate_ranges(exact, samples)}
            sizes: list[int] = []
            times: dict[str, float] = {}
            for device in ({}, SMALL):
                options |= {"static_inference": True, "mobile_options": device}
                compiled = ml.compile(model, "c", shapes={"input": shape}, **options).bind(exact.params)
                with tempfile.TemporaryDirectory() as folder:
                    files = compiled.export(folder, inputs=samples[0], library="shared")
                    sizes += [files.contents.arena_bytes, files.code_bytes]
                    if not device:
                        sizes.insert(0, len(files.contents.weights))
                        compiled(samples[0])  # whose arrays the program keeps
                        times = against_python(compiled.programs[-1].executable, files)
            texts = [f"{n:,}" for n in sizes]
            texts[3:3] = [f"{ratio:.2f}" for ratio in times.values()]
            print(f"  {dtype:<12}" + "".join(f"{text:>12}" for text in texts), flush=True)


def against_python(executable: Any, files: Any) -> dict[str, float]:
    """Return the times of gcc's and clang's code relative to the program in this process."""
    flags = f"CFLAGS={files.contents.target.flags_of('clang')} -fno-sanitize=all"
    clang = f"CC={sys.executable} -m ziglang cc"
    subprocess.run(["make", "-s", "-B", "-C", files.path, "model.o", clang, flags], check=True)
    other = files.path / "libclang.so"  # linked by gcc, because ziglang compiles a C library first
    subprocess.run(["gcc", "-shared", "-o", other, files.path / "model.o", "-lm"], check=True)
    case = files.contents.cases[0]
    expected = case.results["output"]
    calls: dict[str, Any] = {"Python": lambda: executable.run(executable.address)}
    memory = []
    for name, path in (("gcc", files.library), ("clang", other)):
        library = ctypes.CDLL(str(path))
        library.model_instance_size.restype = library.model_arena_size.restype = ctypes.c_size_t
        sizes = library.model_instance_size(), library.model_arena_size(), len(files.contents.weights)
        buffers = [np.zeros(size + 64, np.uint8) for size in sizes]
        model, arena, weights = (x[-x.ctypes.data % 64 :] for x in buffers)
        weights[: sizes[2]] = np.frombuffer(files.contents.weights, np.uint8)
        arrays = [model, arena, weights, case.inputs["input"], np.empty_like(expected)]
        m, a, w, x, y = (ctypes.c_void_p(array.ctypes.data) for array in arrays)
        assert library.model_init(m, a) == 0
        assert library.model_set_weights(m, w) == 0
        assert library.model_run(m, x, y) == 0
        largest = np.abs(expected.astype(np.float64)).max()
        np.testing.assert_allclose(arrays[-1].astype(np.float64), expected.astype(np.float64), atol=1e-2 * largest)
        memory.append(arrays)
        calls[name] = partial(library.model_run, m, x, y)
    best = harness.interleaved(calls, seconds=3)
    return {name: best[name] / best["Python"] for name in ("gcc", "clang")}


PARTS = {"calls": calls, "export": exported}

if __name__ == "__main__":
    harness.run_parts(__doc__, PARTS)
