"""Callbacks: observers of a running training that can stop it, with one method per event."""

from __future__ import annotations

import csv
import inspect
import json
import math
import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TextIO

import numpy as np

from mithril.backend import CheckedType, Least, Positive
from mithril.graph import OptionError, closest
from mithril_parallel.processes import World
from mithril_parallel.watchdog import Watchdog
from mithril_train.engine.engine import Engine
from mithril_train.step.step_config import StepConfig

if TYPE_CHECKING:
    from mithril_train.loop.report import Report


class Training(Protocol):
    """A running training, implemented by ``mithril_train.loop.trainer.Trainer``."""

    engine: Engine
    world: World
    watchdog: Watchdog
    epoch: int
    steps: int
    rate_scale: float
    stopped: str
    failed: bool
    recipe: StepConfig

    def stop(self, reason: str, /) -> None: ...
    def tell(self, message: str, /) -> None: ...
    def save(self, path: str | os.PathLike[str], /) -> None: ...


Row = Mapping[str, float]
Array = np.ndarray[Any, Any]


class Callback(metaclass=CheckedType):
    """Base class of callbacks; each method does nothing unless it is overridden.

    ``step_end`` receives a report whose values are fetched from the device on access; reading them in every step makes
    the host wait for the device. ``trainer`` is the ``Trainer``; an override may annotate it as ``Trainer`` or
    ``Training``.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse methods that events never call, and those that events cannot call."""
        super().__init_subclass__(**options)
        events = [n for n in vars(Callback) if n in ("begin", "end") or n.endswith(("_begin", "_end"))]
        for name, method in vars(cls).items():
            if name in events and isinstance(method, FunctionType):
                passed = inspect.signature(vars(Callback)[name])
                try:
                    inspect.signature(method).bind(*passed.parameters)
                except TypeError as error:
                    raise OptionError(
                        f"{name}() of {cls.__name__} does not fit its event: {error}",
                        hint=f"def {name}({', '.join(passed.parameters)})",
                    ) from None
            elif name.startswith("on_") or (name.endswith(("_begin", "_start", "_end")) and name not in events):
                event = name.removeprefix("on_").removeprefix("train_").replace("_start", "_begin")
                similar = event if event in events else next(iter(closest(event, events, 1)), None)
                raise OptionError(
                    f"no event calls the method {name}() of {cls.__name__}",
                    facts=[f"events: {', '.join(events)}"],
                    hint=f"did you mean {similar}()?" if similar else None,
                )

    def begin(self, trainer: Any) -> None:
        """Handle the start of a ``fit``, before its first epoch."""

    def epoch_begin(self, trainer: Any, epoch: int) -> None:
        """Handle the start of an epoch, before its first batch; epochs count from 1."""

    def batch_begin(self, trainer: Any, batch: Mapping[str, Any]) -> None:
        """Handle the start of a batch, whose columns are given by name."""

    def batch_end(self, trainer: Any, report: Report) -> None:
        """Handle the end of a batch; a step consists of several if gradients are accumulated."""

    def step_end(self, trainer: Any, report: Report) -> None:
        """Handle the end of an optimizer step."""

    def validation_begin(self, trainer: Any) -> None:
        """Handle the start of the validation after an epoch."""

    def validation_end(self, trainer: Any, row: Row) -> None:
        """Handle the end of validation; the row holds its means as ``val_...``."""

    def epoch_end(self, trainer: Any, row: Row) -> None:
        """Handle the end of an epoch and its validation; the row holds means, those of validation as ``val_...``."""

    def end(self, trainer: Any) -> None:
        """Handle the end of training, by its last epoch or an error."""

    def __repr__(self) -> str:
        shown = {n: x for n, x in vars(self).items() if not n.startswith("_") and isinstance(x, (str, int, float))}
        return f"{type(self).__name__}({', '.join(f'{n}={x!r}' for n, x in shown.items())})"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores (as JSON)."""
        return {}

    def tensors(self) -> dict[str, Array]:
        """Return the arrays that a checkpoint stores."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        """Restore the state and the arrays."""


def better(mode: str, monitor: str) -> str:
    """Return ``min`` or ``max``; ``auto`` decides by the name of the metric."""
    if mode != "auto":
        return mode
    return "max" if any(word in monitor for word in ("accuracy", "precision", "recall", "f1", "r2", "auc")) else "min"


def value_of(row: Row, monitor: str, who: str) -> float:
    if monitor not in row:
        similar = closest(monitor, row, 1)
        hint = f"did you mean '{similar[0]}'?" if similar else "ml.Trainer(..., metrics='accuracy') measures more"
        lacks_validation = monitor.startswith("val_") and not any(name.startswith("val_") for name in row)
        raise OptionError(
            f"{who} watches '{monitor}', which is not measured",
            facts=["measured: " + ", ".join(row)],
            hint="give fit(validation=...)" if lacks_validation else hint,
        )
    return row[monitor]


def expect_validation(watchers: Sequence[Callback], measured: Iterable[str]) -> None:
    """Raise at once, not after an epoch of hours, if one of our callbacks watches a value of validation."""
    if not all(type(watcher).__module__.startswith("mithril_train.") for watcher in watchers):
        return  # a callback of the user may validate, and add columns to the row
    for watcher in watchers:
        monitor = getattr(watcher, "monitor", None) or ""
        if monitor.startswith("val_"):
            value_of(dict.fromkeys(measured, math.nan), monitor, type(watcher).__name__)


class EarlyStopping(Callback):
    """Stop training if ``monitor`` has not improved by ``min_delta`` for ``patience`` epochs.

    With ``restore``, training ends with the parameters of the best epoch. An interrupt or an error does not end it: the
    parameters stay those of the last step, from which the next ``fit`` continues.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: Positive = 3,
        *,
        min_delta: Annotated[float, Least(0)] = 0.0,
        mode: Literal["auto", "min", "max"] = "auto",
        restore: bool = True,
    ) -> None:
        self.monitor, self.patience, self.min_delta, self.restore = monitor, patience, abs(min_delta), restore
        self.mode = better(mode, monitor)
        self.best = math.inf if self.mode == "min" else -math.inf
        self.waited = 0
        self.best_epoch = 0
        self._saved: dict[str, Any] = {}

    def epoch_end(self, trainer: Training, row: Row) -> None:
        value = value_of(row, self.monitor, "EarlyStopping")
        gain = self.best - value if self.mode == "min" else value - self.best
        if gain > self.min_delta:
            self.best, self.waited, self.best_epoch = value, 0, trainer.epoch
            if self.restore:
                self._saved = trainer.engine.snapshot()
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.stop(f"'{self.monitor}' has not improved for {self.waited} epochs")

    def end(self, trainer: Training) -> None:
        if trainer.failed:
            return
        if self._saved and self.waited:
            trainer.engine.restore(self._saved)
            trainer.tell(f"parameters of epoch {self.best_epoch} restored: {self.monitor} {self.best:.4g}")
        self.waited = 0  # the next fit starts to count at 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "best_epoch": self.best_epoch}

    def tensors(self) -> dict[str, Array]:
        return self._saved

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self.best, self.waited = float(state["best"]), int(state["waited"])
        self.best_epoch = int(state["best_epoch"])
        self._saved = dict(tensors)


class ReduceLROnPlateau(Callback):
    """Multiply all learning rates by ``factor`` if ``monitor`` has not improved for ``patience`` epochs.

    Schedules continue, scaled. The product of all factors does not fall below ``lowest``.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: Annotated[float, Least(0, open=True)] = 0.1,
        patience: Positive = 3,
        *,
        min_delta: Annotated[float, Least(0)] = 0.0,
        mode: Literal["auto", "min", "max"] = "auto",
        lowest: Annotated[float, Least(0)] = 0.0,
    ) -> None:
        if not factor < 1:
            raise OptionError(f"ReduceLROnPlateau: factor={factor} must be less than 1")
        self.monitor, self.factor, self.patience = monitor, factor, patience
        self.min_delta, self.lowest = min_delta, lowest
        self.mode = better(mode, monitor)
        self.best = math.inf if self.mode == "min" else -math.inf
        self.waited = 0
        self.scale = 1.0  # the product of all factors so far

    def epoch_end(self, trainer: Training, row: Row) -> None:
        value = value_of(row, self.monitor, "ReduceLROnPlateau")
        gain = self.best - value if self.mode == "min" else value - self.best
        if gain > self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience and self.scale > self.lowest:
            self.scale, self.waited = max(self.scale * self.factor, self.lowest), 0
            trainer.rate_scale = self.scale

    def begin(self, trainer: Training) -> None:
        trainer.rate_scale = self.scale

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self.best, self.waited, self.scale = float(state["best"]), int(state["waited"]), float(state["scale"])


class LearningRateMonitor(Callback):
    """Record the learning rate of every step in ``rates``, and of the last step as a column of the rows."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def step_end(self, trainer: Training, report: Report) -> None:
        self.rates.append(report.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self.rates = [float(r) for r in state["rates"]]


class _File(Callback):
    """A log file with one line per epoch; it is extended after a resume."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def begin(self, trainer: Training) -> None:
        if trainer.world.rank == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if trainer.epoch == 0:
                self.path.unlink(missing_ok=True)

    def epoch_end(self, trainer: Training, row: Row) -> None:
        if trainer.world.rank:
            return
        with self.path.open("a", newline="") as file:
            self.write(file, {"epoch": trainer.epoch, "step": trainer.steps, "time": round(time.time(), 3), **row})

    @abstractmethod
    def write(self, file: TextIO, row: Mapping[str, Any]) -> None:
        """Write one row."""


class CSVLog(_File):
    """Write a CSV file with a line per epoch."""

    def write(self, file: TextIO, row: Mapping[str, Any]) -> None:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(row)
        writer.writerow(row.values())


class JSONLog(_File):
    """Write a JSON object per line and epoch."""

    def write(self, file: TextIO, row: Mapping[str, Any]) -> None:
        file.write(
            json.dumps({n: x if not isinstance(x, float) or math.isfinite(x) else str(x) for n, x in row.items()})
        )
        file.write("\n")
