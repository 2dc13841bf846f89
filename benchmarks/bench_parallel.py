"""Overhead of sharding where nothing can be gained: a small transformer block on one CPU.

``python benchmarks/bench_parallel.py``: JAX simulates devices on the same cores, so that all of the difference to one
device is overhead: collectives, dispatch, transfers. The best of interleaved rounds. ``bench_processes.py`` compares
processes of PyTorch.

First outputs and gradients, from ``evaluate``; then a step of ``Trainer``: loss, gradients, clipping by their norm and
Adam's update.
"""

from __future__ import annotations

import os
import time
from typing import Any

import harness

# Four simulated devices wait for one another, so that each needs threads even on few cores.
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "NPROC": "16"}

import jax
import numpy as np

import mithril as ml
from mithril.models import Gelu, IOKey, LayerNorm, Linear, Model, MultiHeadAttention

SHAPE = (8, 32, 64)
WAYS: dict[str, tuple[tuple[int, ...] | None, dict[str, Any]]] = {
    "one device": (None, {}),
    "data 2": ((2,), {}),
    "model 2": ((1, 2), {}),
    "fsdp 2": ((2,), {"parallelism": "fsdp"}),
    "pipeline 2, 4 chunks": ((1, 1, 2), {"pipeline_chunks": 4}),
    "gpipe 2, 4 chunks": ((1, 1, 2), {"pipeline_chunks": 4, "pipeline_schedule": "gpipe"}),
    "data 2 x pipeline 2": ((2, 1, 2), {"pipeline_chunks": 2}),
}


def block(features: int = 64, heads: int = 4, hidden: int = 256) -> Model:
    x = IOKey("x")
    h = x + MultiHeadAttention(features, heads, name="attn")(LayerNorm(features, name="ln_1")(x))
    f = Linear(hidden, name="fc")(LayerNorm(features, name="ln_2")(h))
    return Model.create(outputs={"y": h + Linear(features, name="proj")(Gelu()(f))})


def compiled_for(engine: Any, mesh: tuple[int, ...] | None, options: dict[str, Any]) -> Any:
    return ml.compile(block(), engine(device_mesh=mesh), shapes={"x": list(SHAPE)}, **options)


def gradients(engine: Any, mesh: tuple[int, ...] | None, options: dict[str, Any]) -> Any:
    compiled = compiled_for(engine, mesh, options)
    params = compiled.randomize_params(0)
    x = {"x": compiled.backend.array(np.random.default_rng(0).standard_normal(SHAPE, np.float32))}
    g = compiled.backend.array(np.ones(SHAPE, np.float32))
    return lambda: jax.block_until_ready(compiled.evaluate(params, x, g))


def training(engine: Any, mesh: tuple[int, ...] | None, options: dict[str, Any]) -> Any:
    compiled = compiled_for(engine, mesh, options)
    trainer = ml.Trainer(compiled, ml.Adam(1e-3), loss="mse_loss", clip_norm=1.0, progress=False)
    numbers = np.random.default_rng(0)
    batch = {name: compiled.backend.array(numbers.standard_normal(SHAPE, np.float32)) for name in ("x", "target")}
    return lambda: trainer.step(batch)["loss"]


def main() -> None:
    harness.arguments(__doc__)
    for title, make in (("outputs and gradients", gradients), ("a training step", training)):
        calls = {name: make(ml.JaxBackend, *way) for name, way in WAYS.items()}
        seconds = harness.interleaved(calls, seconds=10, clock=time.perf_counter)
        print(title)
        for name in WAYS:
            print(f"{name:<24}{seconds[name] * 1e3:>10.2f} ms ({seconds[name] / seconds['one device']:>5.1f}x)")


if __name__ == "__main__":
    main()
