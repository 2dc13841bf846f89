"""Fully sharded training steps by the TPU compiler: memory, operations and exchanged bytes of one device, and the plan.

``python benchmarks/bench_fsdp.py``: nothing runs on a TPU and none is needed, only its compiler (libtpu). For each
model and mesh one line without fsdp, one with it, and one with ``fsdp_reshard=False``; ratios are plan / compiler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt import gpt

import mithril as ml
import mithril_tpu
from mithril.models import IOKey, Linear, Model, Relu


def perceptron(width: int, layers: int) -> Model:
    x = IOKey("input")
    for k in range(layers):
        x = Relu()(Linear(width, name=f"layer{k}")(x))
    return Model.create(outputs={"output": x})


Case = tuple[str, Callable[[], Any], list[int], str, tuple[tuple[int, int], ...]]
CASES: tuple[Case, ...] = (
    ("gpt 256", lambda: gpt(4096, 256, layers=2, heads=8, features=512), [16, 256], "tpu_v5p", ((4, 4), (16, 1))),
    ("gpt 256", lambda: gpt(4096, 256, layers=2, heads=8, features=512), [16, 256], "tpu_v5e", ((4, 2), (8, 1))),
    ("gpt 2048", lambda: gpt(8192, 2048, layers=2, heads=8, features=512), [8, 2048], "tpu_v5e", ((4, 2), (8, 1))),
    ("mlp 8192", lambda: perceptron(8192, 4), [64, 8192], "tpu_v5e", ((2, 4), (8, 1))),
    ("mlp 1024", lambda: perceptron(1024, 6), [512, 1024], "tpu_v5e", ((4, 2), (8, 1))),
)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fsdp": {"parallelism": "fsdp"},
    "once": {"parallelism": "fsdp", "fsdp_reshard": False},
}


def sgd(params: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] - 0.1 * gradients[name] for name in params}


def main() -> None:
    print(f"{'':<10}{'':<9}{'mesh':<6}{'':<7}{'peak MiB':>9}{'plan':>6}{'MB':>9}{'plan':>6}{'GFLOP':>9}{'plan':>6}")
    for name, make, shape, target, meshes in CASES:
        shapes = {"input": shape}
        plan = ml.plan(make(), target, shapes=shapes, devices=sorted({d * m for d, m in meshes}), of="output")
        for data, model in meshes:
            for way, options in WAYS.items():
                tpu = {"replicas": data * model, "model_parallelism": model, "effort": 0}
                compiled = ml.compile(
                    make(), ml.JaxBackend(), target_hardware=target, tpu_options=tpu, shapes=shapes, **options
                )
                a = mithril_tpu.training_program(compiled, "output", sgd).analysis
                carried = sum(c.bytes for c in a.collectives.values())
                line = f"{name:<10}{target:<9}{f'{data}x{model}':<6}{way:<7}"
                figures = [(a.memory.peak / 2**20, ""), (carried / 1e6, ""), ((a.flops or 0) / 1e9, "")]
                entry = next(
                    (w for w in plan if w.mesh.axes == {"data": data, "model": model} and w.fsdp == bool(options)), None
                )
                if entry is not None and way != "once":
                    ratios = (
                        entry.memory.peak / a.memory.peak,
                        entry.work.exchanged / max(carried, 1),
                        entry.work.flops / (a.flops or 1),
                    )
                    figures = [(x, f"{r:.2f}") for (x, _), r in zip(figures, ratios, strict=True)]
                print(line + "".join(f"{x:>9.1f}{r:>6}" for x, r in figures), flush=True)


if __name__ == "__main__":
    main()
