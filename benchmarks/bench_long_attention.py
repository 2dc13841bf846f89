"""Attention of long sequences on JAX, forward and backward: in blocks, over with the scores of all positions."""

from __future__ import annotations

from collections.abc import Callable

import harness
import jax
import numpy as np

import mithril as ml
from mithril.models import IOKey, Model, MultiHeadAttention
from mithril_jax import lowering
from mithril_jax.execution import analysis

FEATURES = 64


def compiled(positions: int, smallest: int) -> tuple[Callable[[], None], float]:
    """Return a function that computes outputs and gradients, and the MiB that XLA reserves for its values."""
    lowering.LONG = smallest
    model = Model.create(outputs={"y": MultiHeadAttention(FEATURES, 4, kv_heads=2, causal=True)(IOKey("x"))})
    x = np.random.default_rng(0).standard_normal((2, positions, FEATURES), np.float32)
    program = ml.compile(model, ml.JaxBackend(device="cpu"), shapes={"x": list(x.shape)})
    params = program.randomize_params(0)

    def run() -> None:
        jax.block_until_ready(program.evaluate(params, {"x": x}, {"y": x}))

    run()
    return run, analysis(program.programs[-1].executable, {}).temp_size_in_bytes / 2**20


def main() -> None:
    for positions in harness.arguments(__doc__, positions=[512, 1024, 2048, 4096]).positions:
        (blocks, small), (dense, large) = (compiled(positions, smallest) for smallest in (0, 2**62))
        seconds = harness.interleaved({"blocks": blocks, "dense": dense}, min_rounds=3)
        times = seconds["blocks"] / seconds["dense"]
        print(f"{positions} positions: time {times:.2f}, {small:.0f} MiB instead of {large:.0f}", flush=True)


if __name__ == "__main__":
    main()
