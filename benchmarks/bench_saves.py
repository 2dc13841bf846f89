"""Milliseconds that asynchronous saves block training on two processes: ``ml.Checkpoint`` and PyTorch's ``async_save``.

``python benchmarks/bench_saves.py``: a perceptron of 100 MB in parts (``parallelism="fsdp"``) is saved every few steps.
``call`` is the time until training continues, the median and the best; the steps during the write follow.
The parameters and moments of SGD with momentum are 200 MB. Both sides have the same step.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import mithril as ml
from mithril.models import MLP
from mithril_torch.parallel.launcher import launch_others
from mithril_train.loop import checkpointing

WIDTH, LAYERS, ROWS = 2048, 6, 16  # 6 x 2048 x 2048 float32: 100 MB
SAVES, STEPS = 5, 2  # steps between saves


def trained() -> tuple[ml.Trainer, dict[str, Any]]:
    backend = ml.TorchBackend(device_mesh=(2,))
    model = MLP([WIDTH] * LAYERS)
    optimizer = ml.SGD(1e-3, momentum=0.9)
    trainer = ml.Trainer(model, optimizer, loss="mse_loss", backend=backend, parallelism="fsdp", progress=False)
    rows = np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)
    batch = {"input": rows, "target": rows}
    trainer.step(batch)
    return trainer, batch


def timed(call: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, step: Callable[[], Any], begin: Callable[[str], Any], finish: Callable[[Any], Any]) -> None:
    """Print the median of the time that a save takes from training."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    step_time = statistics.median(timed(step) for _ in range(STEPS))
    calls, later, durations = [], [], []
    for k in range(SAVES + 1):
        saves: list[Any] = []
        start = time.perf_counter()
        calls.append(timed(lambda k=k, saves=saves: saves.append(begin(f"{folder[0]}/step-{k:08d}"))))
        later += [timed(step) for _ in range(STEPS)]
        finish(saves[0])
        durations.append(time.perf_counter() - start)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
        call, during, total = (statistics.median(x[1:]) * 1e3 for x in (calls, later, durations))
        print(
            f"{name}: call {call:.0f} ms, best {min(calls) * 1e3:.0f}; step {step_time * 1e3:.0f} ms, "
            f"{during:.0f} during the write, which ends after {total:.0f} ms; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def main() -> None:
    if "RANK" not in os.environ:
        launch_others(2)
    trainer, batch = trained()
    torch.set_num_threads(1)
    step = lambda: float(trainer.step(batch)["loss"])  # noqa: E731
    arrays = trainer.engine.arrays
    if dist.get_rank() == 0:
        print(f"{sum(x.to_local().nbytes for x in arrays.values() if hasattr(x, 'to_local')) / 1e6:.0f} MB per process")
    for format in ("dcp", "parts"):
        measure(
            f"ml.Checkpoint, {format}",
            step,
            lambda path, f=format: checkpointing.begin_save(trainer, path, asynchronous=True, shared=True, format=f),
            lambda save: save.finish(),
        )
    measure(
        "torch.distributed.checkpoint.async_save",
        step,
        lambda path: dcp.async_save(dict(trainer.engine.arrays), checkpoint_id=path),
        lambda future: future.result(),
    )


if __name__ == "__main__":
    main()
