"""Training steps of transformers of several depths on JAX: with layers in a loop (``scan_layers``), over without."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import harness
import jax
import numpy as np

import mithril as ml
from mithril.models import Embedding, IOKey, Linear, Model, TransformerEncoder

TOKENS = 64


class Built(NamedTuple):
    """A training step and its figures."""

    step: Callable[[], Any]
    source: int  # characters
    instructions: int  # of the program that XLA gets
    seconds: float  # processor time of XLA's compiler
    mebibytes: float  # of temporary values


def built(layers: int, features: int, rows: int, **options: Any) -> Built:
    """Return a training step of a transformer."""
    h = Embedding(TOKENS, features)(IOKey("x", dtype="int32"))
    h = TransformerEncoder(layers, features, 4, dropout=0.1, norm_first=True, causal=True)(h)
    model = Model.create(outputs={"y": Linear(TOKENS)(h)})
    ids = np.random.default_rng(0).integers(0, TOKENS, (rows, 64)).astype(np.int32)
    backend = ml.JaxBackend(device="cpu")
    optimizer = ml.AdamW(1e-3)
    trainer = ml.Trainer(model, optimizer, loss="cross_entropy", backend=backend, progress=False, **options)
    batch = {"x": ids, "target": ids}
    trainer.begin(batch)
    run = trainer.engine.prepare(batch).run
    arguments = [jax.ShapeDtypeStruct(i.type.shape, i.type.dtype.numpy) for i in run.graph.arguments]
    names = [i.name for i in run.graph.arguments]
    types = dict(zip(names, arguments, strict=True))
    lowered = run.call.lower(types, types)
    start = time.process_time()
    usage = lowered.compile().memory_analysis()
    seconds = time.process_time() - start
    instructions = lowered.as_text().count(" = ")
    step = partial(trainer.step, batch)
    return Built(step, len(run.source), instructions, seconds, usage.temp_size_in_bytes / 2**20)


def main() -> None:
    arguments = harness.arguments(__doc__, layers=[2, 8, 32], features=128, rows=8)
    for layers in arguments.layers:
        ways = {
            name: built(layers, arguments.features, arguments.rows, scan_layers=scanned)
            for name, scanned in (("loop", True), ("layers", False))
        }
        seconds = harness.interleaved({n: w.step for n, w in ways.items()}, min_rounds=3)
        print(f"{layers} layers, loop over without: step {seconds['loop'] / seconds['layers']:.2f}", flush=True)
        for name, way in ways.items():
            print(
                f"  {name:6} {way.source // 1000:5} thousand characters, {way.instructions:6} instructions, "
                f"compiled in {way.seconds:5.1f} s, {way.mebibytes:.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
