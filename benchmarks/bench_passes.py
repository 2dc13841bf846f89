"""Times of calls with all passes, without each of some, and without any; ``bench_growth.py passes`` has their costs."""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
from gpt import gpt
from resnet18 import resnet18

import mithril as ml
from mithril import plugins
from mithril.models import Model, TransformerEncoderLayer

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
    jit = {"jit": True} if backend == "jax" else {}
    for name, options in variants.items():
        compiled = ml.compile(make(), backend, shapes=shapes, inference=True, **jit, **options)
        params = compiled.randomize_params(0)
        arrays = {n: compiled.backend.array(x) for n, x in inputs.items()}

        def call(compiled: Any = compiled, params: Any = params, arrays: Any = arrays) -> Any:
            return compiled.backend.synchronize(compiled.evaluate(params, arrays))

        ways[name] = call
    return harness.interleaved(ways, seconds=2.0, min_rounds=10)


def main() -> None:
    for backend in ("numpy", "torch", "jax"):
        if backend in plugins.backends():
            rows = {name: switched(backend, *model) for name, model in MODELS.items()}
            harness.table(f"{backend}, one call", rows, "all")
            print()


if __name__ == "__main__":
    main()
