"""Saving and restoring a trainer: arrays, progress, position in the data, state of callbacks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.base import InputError, OptionError
from mithril_train.loop import checkpoint
from mithril_train.loop.callbacks import Checkpoint
from mithril_train.loop.history import History
from mithril_train.step.step import STATISTIC

Trainer = Any  # ``loop.trainer.Trainer``, which imports this module


def save(trainer: Trainer, path: str | os.PathLike[str]) -> None:
    """Write everything that a bitwise identical continuation needs."""
    partial = None
    tensors = trainer.engine.to_numpy()
    if trainer._totals is not None:
        trainer._read_reports(trainer._totals)
        if not _at_start(trainer._loader_state):
            partial = {"sums": trainer._totals.sums, "weights": trainer._totals.weights}
            tensors.update(trainer._totals.tensors())
    for k, watcher in enumerate(trainer._callbacks):
        tensors.update({f"callback/{k}/{n}": x for n, x in watcher.tensors().items()})
    progress = {
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
    checkpoint.write(path, tensors, progress)


def load(trainer: Trainer, path: str | os.PathLike[str]) -> None:
    """Restore a checkpoint; the arrays wait for the first batch if there is no step yet."""
    tensors, progress = checkpoint.read(path)
    if progress["optimizer"] != repr(trainer.recipe.optimizer):
        trainer.engine.decisions.record(
            "choice",
            f"the checkpoint was made with {progress['optimizer']}, training continues with the current settings",
        )
    trainer.epoch, trainer.steps, trainer._micro = progress["epoch"], progress["steps"], progress["micro"]
    trainer.first_epoch = progress.get("first_epoch", 0)
    if progress.get("learning_rate") is not None:
        trainer.learning_rate = progress["learning_rate"]
    if progress.get("frozen") is not None:
        trainer.frozen = progress["frozen"]
    trainer.history = History(progress["rows"], progress["losses"])
    statistics = {n: tensors.pop(n) for n in list(tensors) if n.startswith(STATISTIC)}
    trainer._loader_state = progress["loader"]
    trainer._partial = (progress["partial"], statistics) if progress["partial"] is not None else None
    trainer._window = []
    _restore_callbacks(trainer, progress["callbacks"], tensors)
    if trainer.engine.arrays:
        trainer.engine.restore(tensors)
    else:
        trainer._pending = tensors


def _restore_callbacks(
    trainer: Trainer, saved: Sequence[tuple[str, Any]], tensors: dict[str, np.ndarray[Any, Any]]
) -> None:
    """Restore the saved state of each callback by class, in order; remove its arrays from ``tensors``."""
    waiting = list(trainer._callbacks)
    for k, (kind, state) in enumerate(saved):
        head = f"callback/{k}/"
        arrays = {n.removeprefix(head): tensors.pop(n) for n in list(tensors) if n.startswith(head)}
        watcher = next((w for w in waiting if type(w).__name__ == kind), None)
        if watcher is not None:
            waiting.remove(watcher)
            watcher.load_state_dict(state, arrays)
        elif state or arrays:
            trainer.engine.decisions.record("ignored", f"the checkpoint's state of {kind}: there is no such callback")


def resume(trainer: Trainer, path: str | os.PathLike[str]) -> None:
    """Load a file, or the latest checkpoint of a folder; ``auto`` looks in the folders of the callbacks."""
    if path == "auto":
        folders = [c.folder for c in trainer._callbacks if isinstance(c, Checkpoint)]
        if not folders:
            raise OptionError("resume='auto' requires a Checkpoint", hint='fit(..., callbacks=[ml.Checkpoint("run")])')
        newest = next((latest for folder in folders if (latest := checkpoint.latest(folder))), None)
        if newest is not None:
            trainer.load(newest)
        return
    checkpoint_path = checkpoint.latest(path) if os.path.isdir(path) else path
    if checkpoint_path is None or not os.path.exists(checkpoint_path):
        state = "is empty of checkpoints" if checkpoint_path is None else "does not exist"
        raise InputError(
            f"cannot resume: '{os.fspath(path)}' {state}",
            hint="fit(..., resume='auto', callbacks=[ml.Checkpoint('run')]) starts from the seed the first time",
        )
    trainer.load(checkpoint_path)


def _at_start(state: Any) -> bool:
    return not state or state.get("position", 0) == 0


def _is_number(rate: Any) -> bool:
    """Whether a rate, or each of several by pattern, is a number, not a schedule."""
    rates = rate.values() if isinstance(rate, Mapping) else [rate]
    return all(isinstance(r, (int, float)) for r in rates)
