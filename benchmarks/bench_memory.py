"""Memory: what is planned, what the framework itself takes, and what checkpointing saves."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt import gpt
from resnet18 import resnet18

import mithril as ml
from mithril import plugins
from mithril.backend.memory_plan import plan
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
        made = {s: plan(graph, s) for s in ("greedy", "best_fit")}
        best = made["greedy"]
        cells = "".join(f"{m.size / 1e6:>9.1f} MB {m.size / m.peak:.3f}x" for m in made.values())
        print(f"{name:<26}{best.total / 1e6:>9.1f} MB{best.peak / 1e6:>13.1f} MB{cells}")


def gradients(backend: str, **options: Any) -> tuple[float, float]:
    """Bytes that gradients of the deep encoder take beyond what is given and returned: measured, and planned."""
    compiled = ml.compile(encoder(), backend, shapes={"input": SIZE}, **options)
    params = compiled.randomize_params(0)
    to = compiled.backend.array
    x = {"input": to(np.random.default_rng(0).standard_normal(SIZE).astype(np.float32))}
    (name,) = compiled.evaluate(params, x, training=False)
    slope = {name: to(np.ones(SIZE, np.float32))}

    def call() -> Any:
        made = compiled.evaluate(params, x, slope, training=False)
        compiled.backend.synchronize(made)
        return made

    planned = plan(compiled.programs[-1].executable.graph).size if call() else 0
    grown = sum(np.prod(p.shape) * 4 for p in params.values())
    return measured(backend, compiled, call) - grown, planned - grown


def measured(backend: str, compiled: Any, call: Any) -> float:
    """The peak of what the framework itself counts."""
    if backend == "numpy":
        tracemalloc.start()
        made = call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del made
        return float(peak)
    if backend == "mlx":
        import mlx.core as mx

        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        made = call()
        peak = mx.get_peak_memory() - before
        del made
        return float(peak)
    raise ValueError(f"{backend} does not say how much it takes")


def main() -> None:
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


def jax_figures() -> str:
    """Temporary memory of the compiled program, by XLA's own account."""
    found = []
    for options in ({}, {"gradient_checkpointing": True}):
        compiled = ml.compile(encoder(), "jax", shapes={"input": SIZE}, **options)
        params = compiled.randomize_params(0)
        x = compiled.backend.array(np.zeros(SIZE, np.float32))
        (name,) = compiled.evaluate(params, {"input": x}, training=False)
        compiled.evaluate(params, {"input": x}, {name: x}, training=False)
        lowered = compiled.programs[-1].executable.call.lower(params, {"input": x, f"grad/{name}": x})
        found.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    return f"{found[0] / 1e6:>11.1f} MB{'':>14}{found[1] / 1e6:>13.1f} MB{'':>14}{found[0] / found[1]:>7.1f}x"


if __name__ == "__main__":
    main()
