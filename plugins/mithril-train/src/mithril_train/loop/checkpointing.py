"""Saving and restoring a trainer: arrays, progress, position in the data, state of callbacks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import MithrilError
from mithril_parallel.sharding import checkpoint as sharded
from mithril_parallel.sharding.storage import SaveError
from mithril_parallel.sharding.tensor_parts import complete
from mithril_train.loop import checkpoint
from mithril_train.loop.history import History, Totals
from mithril_train.step.step import STATISTIC

Trainer = Any  # ``loop.trainer.Trainer``, which imports this module


def save(trainer: Trainer, path: str | os.PathLike[str]) -> None:
    """Write everything that a bitwise identical continuation needs."""
    if not os.fspath(path).endswith(".safetensors"):
        begin_save(trainer, path, asynchronous=False).finish()
        return
    arrays, progress = contents(trainer)
    tensors = {n: np.array(trainer.engine._numpy(complete(x))) for n, x in arrays.items()}  # every process gathers
    problem = ""
    if trainer.world.rank == 0:
        try:
            checkpoint.write(path, tensors, progress)
        except MithrilError as error:
            if trainer.world.size == 1:
                raise
            problem = str(error)
    problem = trainer.world.from_first(problem, "the end of a save")
    if problem:
        raise SaveError(f"process 0 could not write '{os.fspath(path)}'", facts=[problem])


def begin_save(
    trainer: Trainer,
    path: str | os.PathLike[str],
    *,
    asynchronous: bool,
    shared: bool | None = None,
    format: sharded.Format = "parts",
) -> sharded.Save:
    """Copy the parts that this process holds and write them to a folder; ``asynchronous`` writes in a thread."""
    trainer.check_finite()
    arrays, progress = contents(trainer)
    return sharded.begin_save(
        path, arrays, progress, trainer.world, asynchronous=asynchronous, shared=shared, format=format
    )


def contents(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays and the progress that a checkpoint contains."""
    partial = None
    arrays = dict(trainer.engine.arrays)
    if trainer._totals is not None:
        trainer._read_reports(trainer._totals)
        partial = {"sums": trainer._totals.sums, "weights": trainer._totals.weights}
        arrays.update(trainer._totals.tensors())
    for k, watcher in enumerate(trainer._callbacks):
        arrays.update({f"callback/{k}/{n}": x for n, x in watcher.tensors().items()})
    return arrays, {
        "epoch": trainer.epoch,
        "first_epoch": trainer.first_epoch,
        "learning_rate": trainer._rate if _is_number(trainer._rate) else None,
        "frozen": list(trainer.frozen) if trainer._frozen else None,
        "steps": trainer.steps,
        "micro": trainer._micro,
        "loader": trainer._loader_state,
        "partial": partial,
        "rows": trainer.history.rows,
        "losses": trainer.history.steps,
        "callbacks": [[type(c).__name__, c.state_dict()] for c in trainer._callbacks],
        "optimizer": repr(trainer.recipe.optimizer),
    }


def load(trainer: Trainer, path: str | os.PathLike[str]) -> None:
    """Restore a checkpoint; the arrays wait for the first batch if there is no step yet."""
    stored, progress = checkpoint.read(path)
    tensors = dict(stored)
    if progress["optimizer"] != repr(trainer.recipe.optimizer):
        trainer.engine.decisions.record(
            "choice",
            f"the checkpoint was made with {progress['optimizer']}, training continues with the current settings",
        )
    statistics = {n: complete(tensors.pop(n)) for n in list(tensors) if n.startswith(STATISTIC)}
    totals = None
    if progress["partial"] is not None:
        totals = Totals(trainer.recipe.metrics, trainer.to_numpy)
        totals.restore(progress["partial"], statistics)
    callbacks = _tensors_of_callbacks(tensors, len(progress["callbacks"]))
    arrays = trainer.engine.restored(tensors) if trainer.engine.arrays else {}
    with trainer._interrupts.held():
        _restore_callbacks(trainer, progress["callbacks"], callbacks)
        if progress["learning_rate"] is not None:
            trainer.learning_rate = progress["learning_rate"]
        if progress["frozen"] is not None:
            trainer.frozen = progress["frozen"]
        trainer.engine.arrays, trainer._pending = arrays, None if arrays else tensors
        trainer.epoch, trainer.steps, trainer._micro = progress["epoch"], progress["steps"], progress["micro"]
        trainer.first_epoch = progress["first_epoch"]
        trainer.history = History(progress["rows"], progress["losses"])
        trainer._loader_state, trainer._totals = progress["loader"], totals
        trainer._window, trainer._unnotified = [], []


def _tensors_of_callbacks(tensors: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Remove the arrays of callbacks from ``tensors`` and return those of each."""
    heads = [f"callback/{k}/" for k in range(count)]
    return [{n.removeprefix(h): tensors.pop(n) for n in list(tensors) if n.startswith(h)} for h in heads]


def _restore_callbacks(trainer: Trainer, saved: Sequence[tuple[str, Any]], tensors: Sequence[dict[str, Any]]) -> None:
    """Restore the saved state of each callback by class, in order."""
    waiting = list(trainer._callbacks)
    for (kind, state), arrays in zip(saved, tensors, strict=True):
        watcher = next((w for w in waiting if type(w).__name__ == kind), None)
        if watcher is not None:
            waiting.remove(watcher)
            watcher.load_state_dict(state, arrays)
        elif state or arrays:
            trainer.engine.decisions.record("ignored", f"the checkpoint's state of {kind}: there is no such callback")


def _is_number(rate: Any) -> bool:
    """Whether a rate, or each of several by pattern, is a number, not a schedule."""
    rates = rate.values() if isinstance(rate, Mapping) else [rate]
    return all(isinstance(r, (int, float)) for r in rates)
