"""Loggers of steps and epochs: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mithril.backend import Positive
from mithril.graph import MithrilError, PluginError
from mithril_train.loop.callbacks import Callback, Row
from mithril_train.loop.event_files import EventFile

if TYPE_CHECKING:
    from mithril_train.loop.callbacks import Training
    from mithril_train.loop.report import Report

PENDING = 64  # reports that may wait on the device before they are read together


class StepLogger(Callback):
    """Base class: ``log(values, step)`` receives the values of every ``every``-th step, and the rows of epochs.

    The values of steps have their names, those of epochs the prefix ``epoch/``. They are read from the device in
    groups, so that a step does not wait for the previous one. Of several processes the first one logs.
    """

    every = 1
    _waiting: tuple[Report, ...] = ()

    @abstractmethod
    def log(self, values: dict[str, float], step: int) -> None:
        """Write finite values."""

    def step_end(self, trainer: Training, report: Report) -> None:
        if trainer.world.rank == 0 and report.step % self.every == 0:
            self._waiting = (*self._waiting, report)
        if len(self._waiting) >= PENDING:
            self.flush()

    def flush(self) -> None:
        """Write all steps that wait."""
        waiting, self._waiting = self._waiting, ()
        for report in waiting:
            self.log(_finite({**report, "learning_rate": report.learning_rate}), report.step)

    def epoch_end(self, trainer: Training, row: Row) -> None:
        if trainer.world.rank:
            return
        self.flush()
        self.log(_finite({f"epoch/{n}": x for n, x in row.items()}), trainer.steps)

    def end(self, trainer: Training) -> None:
        with suppress(MithrilError):  # steps that are not finite have raised already
            self.flush()


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {n: float(x) for n, x in values.items() if math.isfinite(x)}


class TensorBoard(StepLogger):
    """Write scalars for TensorBoard, which shows each folder as one run; no package is needed to write."""

    def __init__(self, folder: str | os.PathLike[str], *, every: Positive = 1) -> None:
        self.every = every
        self.folder = os.fspath(folder)
        self._file: EventFile | None = None

    def begin(self, trainer: Training) -> None:
        if trainer.world.rank == 0:
            self._file = EventFile(self.folder)

    def log(self, values: dict[str, float], step: int) -> None:
        assert self._file is not None
        self._file.scalars(step, values)

    def epoch_end(self, trainer: Training, row: Row) -> None:
        super().epoch_end(trainer, row)
        if self._file is not None:
            self._file.flush()

    def end(self, trainer: Training) -> None:
        if self._file is not None:
            super().end(trainer)
            self._file.close()
            self._file = None


class WandB(StepLogger):
    """Log to Weights & Biases: ``settings`` are those of ``wandb.init``, or ``run`` is a run that is open."""

    def __init__(self, run: Any = None, *, every: Positive = 1, **settings: Any) -> None:
        self.every = every
        self.settings = settings
        self._own_run, self._run = run, run

    def begin(self, trainer: Training) -> None:
        if self._own_run is None and trainer.world.rank == 0:
            self._run = _library("wandb").init(**{"config": described(trainer), **self.settings})

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def end(self, trainer: Training) -> None:
        super().end(trainer)
        if self._own_run is None and self._run is not None:
            self._run.finish()
            self._run = None


class MLflow(StepLogger):
    """Log to MLflow, in the active run or a new one, which ``settings`` of ``mlflow.start_run`` describe."""

    def __init__(self, *, every: Positive = 1, **settings: Any) -> None:
        self.every = every
        self.settings = settings
        self._library: Any = None
        self._opened = False

    def begin(self, trainer: Training) -> None:
        if trainer.world.rank:
            return
        self._library = _library("mlflow")
        self._opened = self._library.active_run() is None
        if self._opened:
            self._library.start_run(**self.settings)
        self._library.log_params(described(trainer))

    def log(self, values: dict[str, float], step: int) -> None:
        self._library.log_metrics(values, step=step)

    def end(self, trainer: Training) -> None:
        if self._library is not None:
            super().end(trainer)
            if self._opened:
                self._library.end_run()
            self._library = None


def described(trainer: Training) -> dict[str, Any]:
    """Return the settings of a training that loggers store."""
    return {"optimizer": repr(trainer.recipe.optimizer), "backend": trainer.engine.backend.name}


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise PluginError(
            f"'{name}' is not installed", facts=[str(error)], hint=f'pip install "mithril-train[{name}]"'
        ) from None
