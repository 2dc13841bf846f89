"""Memory: reports against measurements, plans, and savings by checkpointing; `bench_memory.py c jax`.

`bench_memory.py weights` prints the copies of the weights of a file that a process of each backend holds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt import gpt
from resnet18 import resnet18

import mithril as ml
import mithril.models as m
from mithril import plugins
from mithril.backend import plan
from mithril.models import Model, TransformerEncoderLayer

SIZE = [4, 64, 128]


def encoder(layers: int = 24) -> Model:
    model = Model()
    for k in range(layers):
        model += TransformerEncoderLayer(128, 4, 512, name=f"l{k}")
    return model


def plans() -> None:
    """Arena against the most bytes alive at once, on the example models, with gradients."""
    print(f"{'plan, with gradients':<26}{'values':>12}{'alive at once':>16}{'greedy':>18}{'best_fit':>18}")
    models = {
        "encoder, 24 blocks": (encoder(), {"input": SIZE}, {}),
        "ResNet-18, 64 x 64": (resnet18(), {"input": [4, 3, 64, 64]}, {}),
        "GPT, 12 blocks": (
            gpt(vocabulary=256, length=64, layers=12, heads=4, features=64),
            {"input": [4, 64]},
            {"types": {"input": "int32"}},
        ),
    }
    for name, (model, shapes, options) in models.items():
        compiled = ml.compile(model, "numpy", shapes=shapes, **options)
        inputs = {n: np.zeros(s, compiled.get_types()[n].numpy) for n, s in shapes.items()}
        params = compiled.randomize_params(0)
        slopes = {n: np.ones(v.shape, v.dtype) for n, v in compiled.evaluate(params, inputs, training=False).items()}
        compiled.evaluate(params, inputs, slopes, training=False)
        graph = compiled.programs[-1].executable.graph
        plans = {s: plan(graph, s) for s in ("greedy", "best_fit")}
        best = plans["greedy"]
        cells = "".join(f"{m.size / 1e6:>9.1f} MB {m.size / m.peak:.3f}x" for m in plans.values())
        print(f"{name:<26}{best.total / 1e6:>9.1f} MB{best.peak / 1e6:>13.1f} MB{cells}")


def gradients(backend: str, **options: Any) -> tuple[float, float]:
    """Bytes that gradients of the deep encoder take beyond arguments and results: measured, and planned."""
    compiled = ml.compile(encoder(), backend, shapes={"input": SIZE}, **options)
    params = compiled.randomize_params(0)
    to_array = compiled.backend.array
    x = {"input": to_array(np.random.default_rng(0).standard_normal(SIZE).astype(np.float32))}
    (name,) = compiled.evaluate(params, x, training=False)
    slope = {name: to_array(np.ones(SIZE, np.float32))}

    def call() -> Any:
        outputs = compiled.evaluate(params, x, slope, training=False)
        compiled.backend.synchronize(outputs)
        return outputs

    planned = plan(compiled.programs[-1].executable.graph).size if call() else 0
    grown = sum(np.prod(p.shape) * 4 for p in params.values())
    return measured(backend, compiled, call) - grown, planned - grown


def measured(backend: str, compiled: Any, call: Any) -> float:
    """Return the framework's own peak figure."""
    if backend == "numpy":
        tracemalloc.start()
        outputs = call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del outputs
        return float(peak)
    if backend == "mlx":
        import mlx.core as mx

        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        outputs = call()
        peak = mx.get_peak_memory() - before
        del outputs
        return float(peak)
    raise ValueError(f"{backend} does not say how much it takes")


COPIES = """
import ctypes, gc, sys
import numpy as np
import mithril as ml
import mithril.models as m

def anonymous():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return next(1024 * int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon"))

def run(kind, size, channels, weights, static):
    model, shape = m.Model(), [1, size] if kind == "products" else [1, channels, 14, 14]
    for k in range(4):
        products, name = kind == "products", f"l{k}"
        kernel = dict(padding=1, bias=False, name=name)
        model += m.Linear(size, bias=False, name=name) if products else m.Conv2d(channels, channels, 3, **kernel)
    options = {"static_inference": True} if static else {"inference": True}
    program = ml.compile(model, sys.argv[1], shapes={"input": shape}, **options)
    program.bind(weights)
    for _ in range(2):
        program.backend.to_numpy(program({"input": np.ones(shape, np.float32)})["output"])
    return program

kind, path, static = sys.argv[2], sys.argv[3], sys.argv[4] == "static"
shape = (64, 64) if kind == "products" else (16, 16, 3, 3)
warm = run(kind, 64, 16, {f"l{k}.weight": np.ones(shape, np.float32) for k in range(4)}, static)
before = anonymous()
weights = ml.open_weights(path)
total = sum(4 * np.prod(x.shape) for x in weights.values())
program = run(kind, 2048, 512, weights, static)
report = program.memory_report()
held = report.weights.in_memory if report.weights else 0
print((anonymous() - before) / total, held / total)
"""


def copies() -> None:
    """Print the copies of the weights of a file that a process holds after calls: measured (RssAnon), and reported."""
    from mithril.compiler.weight_files import save_file
    from mithril_gguf.writer import stored_tensor, write_gguf

    rng = np.random.default_rng(0)
    shapes = {"products": (2048, 2048), "convolutions": (512, 512, 3, 3)}
    print(f"{'':<26}" + "".join(f"{kind + ' ' + way:>26}" for kind in shapes for way in ("bound", "static")))
    with tempfile.TemporaryDirectory() as folder:
        for kind, shape in shapes.items():
            weights = {f"l{k}.weight": rng.standard_normal(shape, dtype=np.float32) for k in range(4)}
            save_file(weights, Path(folder, f"{kind}.safetensors"), {})
            np.savez(Path(folder, f"{kind}.npz"), **weights)
            write_gguf(Path(folder, f"{kind}.gguf"), {}, [stored_tensor(n, x) for n, x in weights.items()])
        for backend in sorted(plugins.backends()):
            for suffix in ("safetensors", "gguf", "npz"):
                cells = []
                for kind in shapes:
                    for way in ("bound", "static"):
                        command = [sys.executable, "-W", "ignore", "-c", COPIES, backend, kind]
                        command += [str(Path(folder, f"{kind}.{suffix}")), way]
                        done = subprocess.run(command, capture_output=True, text=True, check=False)
                        if done.returncode:
                            cells.append(f"{done.stderr.strip().splitlines()[-1][:24]:>26}")
                            continue
                        measured_copies, reported = map(float, done.stdout.split())
                        cells.append(
                            f"{measured_copies:>16.2f} ({reported:.2f})"
                            if way == "static"
                            else f"{measured_copies:>26.2f}"
                        )
                print(f"{backend + ', ' + suffix:<26}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


def main() -> None:
    if sys.argv[1:] == ["weights"]:
        copies()
        return
    for name in sys.argv[1:] or plugins.backends():
        figures(name)
    if sys.argv[1:]:
        return
    plans()
    print(
        f"\n{'gradients, 24 blocks':<26}{'measured':>14}{'planned':>14}{'checkpointed':>16}{'planned':>14}{'ratio':>8}"
    )
    for backend in ("numpy", "mlx"):
        if backend in plugins.backends():
            plain, lean = gradients(backend), gradients(backend, gradient_checkpointing=True)
            widths = (14, 14, 16, 14)
            cells = "".join(f"{n / 1e6:>{w - 3}.1f} MB" for n, w in zip((*plain, *lean), widths, strict=True))
            print(f"{backend:<26}{cells}{plain[0] / lean[0]:>7.1f}x")
    if "jax" in plugins.backends():
        print(f"{'jax, as XLA reports':<26}" + jax_figures())


def network(*layers: Any) -> Model:
    model = Model()
    for layer in layers:
        model += layer
    return model


# Name: the model, the shape of its input.
TEN: dict[str, tuple[Any, list[int]]] = {
    "perceptron": (lambda: network(*(part for _ in range(6) for part in (m.Linear(256), m.Relu()))), [1024, 256]),
    "perceptron, gelu": (lambda: network(*(part for _ in range(6) for part in (m.Linear(256), m.Gelu()))), [1024, 256]),
    "convolutions": (
        lambda: network(m.Conv2d(3, 16, 3, padding=1), m.Relu(), m.Conv2d(16, 16, 3, padding=1), m.Conv2d(16, 8, 3)),
        [8, 3, 32, 32],
    ),
    "batch norm": (
        lambda: network(m.Conv2d(8, 16, 3, padding=1), m.BatchNorm2d(16), m.Relu(), m.GlobalAvgPool2d(), m.Linear(10)),
        [8, 8, 32, 32],
    ),
    "pooling": (
        lambda: network(m.Conv2d(3, 16, 3), m.MaxPool2d(2), m.Tanh(), m.Conv2d(16, 8, 3), m.AvgPool2d(2)),
        [8, 3, 32, 32],
    ),
    "encoder": (lambda: network(*(m.TransformerEncoderLayer(64, 4, 256) for _ in range(3))), [8, 64, 64]),
    "softmax": (lambda: network(m.Linear(64), m.Softmax(), m.Linear(64), m.LayerNorm(64)), [8, 64, 64]),
    "norms": (lambda: network(m.LayerNorm(256), m.Tanh(), m.LayerNorm(256), m.Sigmoid(), m.Softmax()), [2048, 256]),
    "recurrent": (lambda: network(m.LSTM(64)), [32, 32, 64]),
    "embedding": (lambda: network(m.Embedding(1000, 64), m.Linear(256), m.Relu(), m.Linear(1000)), [16, 64]),
}


def figures(backend: str) -> None:
    """Compare the report with the measured bytes of a call, forward and with gradients."""
    print(f"\n{backend:<26}{'report':>10}{'measured':>10}{'':>7}{'report':>14}{'measured':>10}")
    for name, (build, shape) in TEN.items():
        tokens = name == "embedding"
        options = {"types": {"input": "int32"}} if tokens else {}
        compiled = ml.compile(build(), backend, shapes={"input": shape}, **options)
        x = np.zeros(shape, np.int32) if tokens else np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        inputs, params = {"input": compiled.backend.array(x)}, compiled.randomize_params(seed=0)
        results = compiled.evaluate(params, inputs, training=False)
        slopes = {n: compiled.backend.ones(v.shape) for n, v in results.items()}
        cells = []
        for output_gradients in (None, slopes):
            executable = compiled.program_for(output_gradients is not None).executable

            def call(output_gradients: Any = output_gradients) -> Any:
                return compiled.evaluate(params, inputs, output_gradients, training=output_gradients is not None)

            call()
            reported = compiled.memory_report(gradients=output_gradients is not None).workspace
            measured = compiled.backend.measured_memory(call, executable)
            cells.append(f"{reported / 1e6:>10.2f}{measured / 1e6:>10.2f}{reported / measured - 1:>+7.0%}")
        print(f"{name:<26}{'    '.join(cells)}")


def jax_figures() -> str:
    """Temporary memory of the compiled program, by XLA's own account."""
    rows = []
    for options in ({}, {"gradient_checkpointing": True}):
        compiled = ml.compile(encoder(), "jax", shapes={"input": SIZE}, **options)
        params = compiled.randomize_params(0)
        x = compiled.backend.array(np.zeros(SIZE, np.float32))
        (name,) = compiled.evaluate(params, {"input": x}, training=False)
        compiled.evaluate(params, {"input": x}, {name: x}, training=False)
        lowered = compiled.programs[-1].executable.call.lower(params, {"input": x, f"grad/{name}": x})
        rows.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    return f"{rows[0] / 1e6:>11.1f} MB{'':>14}{rows[1] / 1e6:>13.1f} MB{'':>14}{rows[0] / rows[1]:>7.1f}x"


if __name__ == "__main__":
    main()
