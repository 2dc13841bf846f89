"""Training by several processes: their agreement at the start, and on the first batch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mithril.graph import BackendError, InputError
from mithril.system import launched_task
from mithril_parallel.processes import World, current_world, grouped, named
from mithril_parallel.watchdog import Watchdog
from mithril_train.engine.batches import LocalRows, named as columns_of
from mithril_train.engine.engine import Engine

Trainer = Any  # ``loop.trainer.Trainer``, which imports this module
MESHES = ("device_mesh", "mesh")  # attributes of backends that are not None on several devices
OPTIONS = ("parallelism", "pipeline_stages")


def world_of(engine: Engine, timeout: float) -> World:
    """Return the processes over which the backend distributes a program; a backend of one device has one."""
    settings = engine.session.settings
    meshes = [getattr(engine.backend, name, None) for name in MESHES]
    if all(x is None for x in (*meshes, *(settings.get(name) for name in OPTIONS))):
        return World()
    return current_world(timeout)


@contextmanager
def taking_part(trainer: Trainer) -> Iterator[None]:
    """Register this process for the training inside the block, and tell the others if it fails."""
    start(trainer)
    try:
        yield
    except BaseException as error:
        trainer.watchdog.failed(error)
        with trainer.watchdog.waiting("the end of training", collective=False):  # the store may not answer
            trainer.world.leave(f"{type(error).__name__}: {error}".partition("\n")[0])
        raise
    finally:
        trainer.watchdog.stop()


def start(trainer: Trainer) -> None:
    """Check that a launcher's processes train together, and start to watch them."""
    trainer.join()
    task = launched_task()
    if trainer.world.size == 1 and task is not None and task.size > 1 and not trainer.engine.is_distributed:
        raise BackendError(
            f"{task.launcher} started {task.size} processes, but this backend computes on one device: each would train "
            "separately and write the same files",
            hint=f"use a backend with device_mesh=({task.size},), or start one process",
        )
    trainer.world.enter()
    trainer.watchdog = Watchdog(trainer.world)
    trainer.watchdog.start()
    trainer._agreed = trainer.world.size == 1


def agree(trainer: Trainer) -> None:
    """Raise if the processes would start from different values or at different steps, naming those that differ."""
    if trainer.world.size == 1:
        return
    params, state = trainer._initial_values
    trainer.world.agree(
        {
            "step": trainer.steps,
            "epoch": trainer.epoch,
            "batches accumulated": trainer._micro,
            "seed": trainer.seed,
            "position in the data": trainer._loader_state,
            "optimizer": repr(trainer.recipe.optimizer),
            "model": trainer.compiled.name,
            "inputs": {n: f"{s.shape} {s.dtype}" for n, s in trainer.engine.session.specs.items()},
            "initial parameters": checksum({**params, **state}, trainer.engine._numpy),
            "callbacks": [type(c).__name__ for c in trainer._callbacks],
        },
        "the start of training",
    )


def check_batch(trainer: Trainer, batch: Any, part: tuple[int, int] | None) -> None:
    """Compare the first batch of a ``fit`` between processes: the same one, or different rows of it.

    ``part`` is the process, of how many, whose rows the loader reads, if it tells.
    """
    if trainer._agreed:
        return
    trainer._agreed = True
    parts = trainer.world.exchange(part, "the parts that loaders read")
    wrong = [k for k, p in enumerate(parts) if p is not None and tuple(p) != (k, trainer.world.size)]
    if wrong:
        process, (rank, world) = wrong[0], parts[wrong[0]]
        raise InputError(
            f"the DataLoader of process {process} of {trainer.world.size} reads the rows of rank={rank}, world={world}",
            facts=["processes are numbered by the launcher, which may have other variables than RANK and WORLD_SIZE"],
            hint=f"pass rank={process}, world={trainer.world.size} there, or omit both to read complete batches",
        )
    is_local = isinstance(batch, LocalRows)
    columns = columns_of(batch.batch if is_local else batch, trainer._inputs)
    arrays = {
        n: x for n, x in columns.items() if getattr(x, "is_fully_addressable", True) and not hasattr(x, "to_local")
    }
    trainer.world.agree(
        {"batch": {n: f"{list(x.shape)} {x.dtype}" for n, x in arrays.items()}, "own rows": is_local}, "the first batch"
    )
    sums = trainer.world.exchange(checksum(arrays, trainer.engine._numpy), "the first batch")
    if not is_local and len(set(sums)) > 1:
        raise InputError(
            "the processes read different batches, and each must read the complete batch",
            facts=[f"checksums of the first batch: {grouped(sums)}"],
            hint="ml.DataLoader(..., rank=rank, world=world) or torch's DistributedSampler reads a part of each batch "
            "per process; ml.LocalRows(batch) marks the batches of another loader",
        )
    if is_local and len(set(sums)) < len(sums):
        equal_ranks = next([k for k, x in enumerate(sums) if x == y] for y in sums if sums.count(y) > 1)
        trainer.engine.decisions.record(
            "assumed",
            f"{named(equal_ranks)} read the same rows of the first batch, which count {len(equal_ranks)} times; "
            "rank= of the DataLoader, or the rank of the sampler, should differ between processes",
            warn=True,
        )


def checksum(arrays: Mapping[str, Any], read: Any) -> int:
    """Return a number that differs between different arrays."""
    total = 0
    for name in sorted(arrays):
        array = np.asarray(read(arrays[name]), order="C")
        total = zlib.crc32(array.tobytes(), zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), total))
    return total
