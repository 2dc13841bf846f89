"""One GPU, several engines: products, a convolution, attention, and training steps of a network and an encoder.

``python benchmarks/bench_gpu.py`` compares ``c:cuda``, ``torch:cuda`` and ``jax:gpu``, interleaved, in under eight
minutes; other engines are named as arguments, such as ``c:opencl c:webgpu torch:cpu``. Cells are
microseconds of a synchronized call and the ratio to the first engine; an engine that cannot be used here is named with
the reason. ``--small`` selects sizes for drivers that run on CPUs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import numpy as np

import mithril as ml
from mithril.models import Add, Conv2d, Flatten, Linear, Model, Relu, Sequential, TransformerEncoderLayer

ENGINES = ("c:cuda", "torch:cuda", "jax:gpu")
CLASSES = {"c": "CBackend", "torch": "TorchBackend", "jax": "JaxBackend"}
SMALL = "--small" in sys.argv
SECONDS = 0.5 if SMALL else 5.0  # of each row


def residual(channels: int) -> Model:
    """Return a block of two convolutions and the sum with its input."""
    block = Model()
    block |= Sequential(Conv2d(channels, kernel_size=3, padding=1), Relu(), Conv2d(channels, kernel_size=3, padding=1))(
        input="input", output="inner"
    )
    block |= Add()("input", "inner", output="output")
    return block


def rows() -> dict[str, tuple[Any, tuple[int, ...], bool]]:
    """Return models, the shapes of their inputs, and whether a step has gradients, by name."""
    n, images, tokens = (64, 2, 16) if SMALL else (4096, 32, 512)
    features = 64 if SMALL else 768
    encoder = partial(TransformerEncoderLayer, features, features // 64 or 1, 4 * features, dropout=0.0)
    network = [Conv2d(32, kernel_size=3, padding=1), residual(32), Relu(), residual(32), Flatten(), Linear(10)]
    return {
        f"product {n} x {n}": (Sequential(Linear(n, bias=False)), (n, n), False),
        "convolution": (Sequential(Conv2d(64, kernel_size=3, padding=1)), (images, 64, 32, 32), False),
        "encoder layer": (Sequential(encoder()), (4, tokens, features), False),
        "step of a residual network": (Sequential(*network), (images, 3, 32, 32), True),
        "step of an encoder": (Sequential(encoder(), encoder()), (4, tokens, features), True),
    }


def opened(engine: str) -> Any:
    name, _, device = engine.partition(":")
    backend = getattr(ml, CLASSES[name])(device=device)
    backend.synchronize(backend.zeros((1,)))
    return backend


def way(model: Any, backend: Any, shape: tuple[int, ...], trains: bool, weights: dict[str, Any]) -> Callable[[], Any]:
    """Return a synchronized call with arrays of the device; ``weights`` are shared by all engines."""
    compiled = ml.compile(model, backend, shapes={"input": list(shape)}, inference=not trains)
    if not weights:
        drawn = compiled.randomize_params(seed=0)
        weights |= {n: backend.to_numpy(a) for n, a in drawn.items()}
    params = {n: backend.array(a) for n, a in weights.items()}
    x = backend.array(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    ones = {n: backend.array(np.ones(y.shape, np.float32)) for n, y in compiled.evaluate(params, {"input": x}).items()}
    keywords = {"output_gradients": ones} if trains else {}

    def call() -> None:
        backend.synchronize(compiled.evaluate(params, {"input": x}, **keywords))

    return call


if __name__ == "__main__":
    engines: dict[str, Any] = {}
    for engine in harness.arguments(__doc__, "ENGINE", small=False).words or ENGINES:
        try:
            engines[engine] = opened(engine)
        except (ml.MithrilError, RuntimeError, AttributeError) as error:
            print(f"{engine} is left out: {str(error).splitlines()[0]}")
    begin, results = time.time(), {}
    for label, (model, shape, trains) in rows().items() if engines else ():
        weights: dict[str, Any] = {}
        ways = {engine: way(model, backend, shape, trains, weights) for engine, backend in engines.items()}
        results[label] = harness.interleaved(ways, SECONDS, min_rounds=3, clock=time.perf_counter)
    if results:
        harness.table("microseconds", results, next(iter(engines)))
        print(f"{time.time() - begin:.0f} s")
