"""Fully sharded training steps by the TPU compiler, with and without the sharding constraints of the program.

``python benchmarks/bench_constraints.py [number ...]``: nothing runs on a TPU and none is needed, only its compiler
(libtpu). For each pair of a model and a mesh of TPU v5e: memory and exchanged bytes of one device both ways, and the
ratio.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_plans import CASES, gpt, perceptron, sgd

import mithril as ml
import mithril_tpu
from mithril_tpu import backend as tpu_backend

MORE: dict[str, Any] = {
    "gpt 256": (lambda: gpt(4096, 256, layers=2, heads=8, features=512), {"input": [16, 256]}, ()),
    "mlp 1024": (lambda: perceptron(1024, 6), {"input": [512, 1024]}, ()),
}
PAIRS = (
    ("gpt 256", 4, 2),
    ("gpt 256", 8, 1),
    ("gpt 2048", 4, 2),
    ("gpt 2048", 8, 1),
    ("bert 128", 4, 2),
    ("vit 32", 4, 2),
    ("mixer", 4, 2),
    ("gated", 4, 2),
    ("mlp 8192", 2, 4),
    ("mlp 1024", 4, 2),
    ("vgg", 8, 1),
)


def measure(name: str, data: int, model: int) -> tuple[float, float]:
    make, shapes, _ = MORE.get(name) or CASES[name]
    output = "sequence" if "tokens" in shapes else "output"
    compiled = ml.compile(
        make(),
        ml.JaxBackend(),
        target_hardware="tpu_v5e",
        tpu_options={"replicas": data * model, "model_parallelism": model, "effort": 0},
        shapes=shapes,
        parallelism="fsdp",
    )
    analysis = mithril_tpu.training_program(compiled, output, sgd).analysis
    exchanged = sum(c.bytes for c in (analysis.collectives or {}).values())
    return analysis.memory.peak / 2**20, exchanged / 1e6


def main() -> None:
    constrained = tpu_backend.constrained
    print(f"{'':<10}{'mesh':<7}{'MiB':>8}{'without':>9}{'':>6}{'MB':>9}{'without':>9}")
    for k in map(int, sys.argv[1:] or range(len(PAIRS))):
        name, data, model = PAIRS[k]
        peak, exchanged = measure(name, data, model)
        tpu_backend.constrained = lambda graph, *_, **__: graph
        try:
            free_peak, free_exchanged = measure(name, data, model)
        finally:
            tpu_backend.constrained = constrained
        print(
            f"{name:<10}{f'{data} x {model}':<7}{peak:>8.1f}{free_peak:>9.1f}{peak / free_peak:>6.2f}"
            f"{exchanged:>9.1f}{free_exchanged:>9.1f}{exchanged / max(free_exchanged, 1e-3):>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
