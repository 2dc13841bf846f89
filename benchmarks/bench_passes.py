"""Speedup by each pass, its cost per node, and the time that the cache saves a second process."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt import gpt
from interleaved import interleaved, table
from resnet18 import resnet18

import mithril as ml
from mithril import plugins
from mithril.compiler import installed
from mithril.graph import Builder, Graph
from mithril.models import Model, TransformerEncoderLayer
from mithril.ops import add, layer_norm, linear, mul, relu, tanh
from mithril.passes import PassContext, PassManager

SWITCHED = ("operator-fusion", "linear-activation", "simplify", "common-subexpression", "constant-folding")


def random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def encoder() -> Model:
    model = Model()
    for k in range(4):
        model += TransformerEncoderLayer(128, 4, 512, name=f"l{k}")
    return model


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "encoder, 4 x 128, 64 tokens": (encoder, {"input": random(2, 64, 128)}),
    "GPT, 4 x 64, 32 tokens": (
        lambda: gpt(vocabulary=256, length=32, layers=4, heads=4, features=64),
        {"input": np.random.default_rng(0).integers(0, 256, (2, 32)).astype(np.int32)},
    ),
    "ResNet-18, 32 x 32": (resnet18, {"input": random(1, 3, 32, 32)}),
}


def switched(backend: str, make: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Processor seconds of a call with all passes, without each of them, without any."""
    shapes = {n: list(x.shape) for n, x in inputs.items()}
    ways = {}
    variants: dict[str, dict[str, Any]] = {"all": {}}
    variants |= {f"no {name}": {"optimizations": {name: False}} for name in SWITCHED}
    variants["none"] = {"optimization_level": "none"}
    for name, options in variants.items():
        compiled = ml.compile(make(), backend, shapes=shapes, inference=True, jit=backend == "jax", **options)
        params = compiled.randomize_params(0)
        arrays = {n: compiled.backend.array(x) for n, x in inputs.items()}

        def call(compiled: Any = compiled, params: Any = params, arrays: Any = arrays) -> Any:
            return compiled.backend.synchronize(compiled.evaluate(params, arrays))

        ways[name] = call
    return interleaved(ways, seconds=2.0, min_rounds=10, clock=time.process_time)


def chain(nodes: int) -> Graph:
    """Build a deep graph on which every pass finds some work."""
    with Builder("chain") as b:
        x = b.input("x", (4, 16))
        w, c = b.param("w", (16, 16)), b.param("c", (16,))
        y = x
        for k in range(nodes // 5):
            y = relu(linear(y, w, c)) if k % 2 else layer_norm(y, c, c)
            y = add(mul(tanh(y), 0.5), x)
    return b.build({"y": y})


def per_node() -> None:
    """Microseconds per node of each pass, and the exponent with which its time grows."""
    sizes = (1_000, 5_000, 20_000, 50_000)
    names = [n for n, entry in plugins.passes().items() if entry.spec.level in ("low", "medium", "high")]
    print(f"{'us per node':<28}" + "".join(f"{n:>10}" for n in sizes) + f"{'exponent':>10}")
    graphs = {n: chain(n) for n in sizes}
    for name in names:
        row = []
        for size in sizes:
            manager = PassManager([installed(name)], check="none")
            best = float("inf")
            for _ in range(3):
                start = time.perf_counter()
                manager.run(graphs[size], PassContext())
                best = min(best, time.perf_counter() - start)
            row.append(best)
        slope = math.log(row[-1] / row[0]) / math.log(sizes[-1] / sizes[0])
        cells = "".join(f"{1e6 * t / n:>10.2f}" for t, n in zip(row, sizes, strict=True))
        print(f"{name:<28}{cells}{slope:>10.2f}")


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import mithril as ml
from gpt import gpt
ml.compile(gpt(layers=1, vocabulary=64, length=32, heads=2, features=16), "numpy", shapes={"input": [None, 32]})
model = gpt(layers=48, vocabulary=64, length=32, heads=2, features=16)
start = time.perf_counter()
ml.compile(model, "numpy", shapes={"input": [None, 32]}, cache=True, cache_dir=sys.argv[2])
print(time.perf_counter() - start)
"""


def cached() -> None:
    """Compiling a GPT of 48 blocks for NumPy in a first process and in later ones."""
    examples = str(Path(__file__).parents[1] / "examples")
    with tempfile.TemporaryDirectory() as folder:
        times = [
            float(
                subprocess.run(
                    [sys.executable, "-c", SCRIPT, examples, folder], check=True, capture_output=True, text=True
                ).stdout
            )
            for _ in range(6)
        ]
    print(
        f"GPT-48, first process {times[0]:.3f} s, later ones {min(times[1:]):.3f} s: {times[0] / min(times[1:]):.1f}x"
    )


def main() -> None:
    for backend in ("numpy", "torch", "jax"):
        if backend in plugins.backends():
            rows = {name: switched(backend, *model) for name, model in MODELS.items()}
            table(f"{backend}, one call", rows, "all")
            print()
    per_node()
    print()
    cached()


if __name__ == "__main__":
    main()
