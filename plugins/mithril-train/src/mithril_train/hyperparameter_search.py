"""Hyperparameter search with Optuna, which is imported when a search begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

from mithril.graph import InputError, OptionError, PluginError
from mithril_train.data.loader import DataLoader
from mithril_train.loop.callbacks import Callback, Row, better, value_of
from mithril_train.loop.trainer import Trainer


@dataclass(frozen=True)
class Found:
    """The best trial of a search."""

    settings: dict[str, Any]
    value: float
    trainer: Trainer
    study: Any  # Optuna's study, for its plots and tables


def search(
    make: Callable[[Any], Trainer],
    loader: Iterable[Any] | Callable[[Any], Iterable[Any]],
    *,
    validation: Iterable[Any] | None = None,
    epochs: int = 1,
    trials: int = 20,
    monitor: str = "val_loss",
    mode: str = "auto",
    seed: int = 0,
    study: Any = None,
) -> Found:
    """Train ``make(trial)`` repeatedly and return the best trial by ``monitor`` in its last epoch.

    ``make`` queries the trial for settings: ``ml.Adam(trial.suggest_float("rate", 1e-4, 1e-1, log=True))``. ``loader``
    may also be a function of the trial, for example to vary the batch size. A trial that is worse than the median of
    the previous ones at the same epoch is stopped early. A seed determines the search. ``study`` continues an existing
    Optuna study.
    """
    optuna = _optuna()
    _check_arguments(make)
    if trials < 1:
        raise OptionError(f"trials={trials} must be at least 1")
    direction = {"min": "minimize", "max": "maximize"}[better(mode, monitor)]
    search = study or optuna.create_study(
        direction=direction,
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
    )
    best: dict[str, Trainer] = {}

    def run(trial: Any) -> float:
        trainer = make(trial)
        if not isinstance(trainer, Trainer):
            raise InputError(f"make(trial) gave a {type(trainer).__name__}, expected a Trainer")
        data = loader(trial) if callable(loader) and not hasattr(loader, "__iter__") else loader
        if isinstance(data, DataLoader):
            data.load_state_dict({**data.state_dict(), "epoch": 0, "samples": 0})
        watch = Pruning(trial, monitor)
        trainer.fit(data, epochs, validation=validation, callbacks=[watch])
        earlier = [t.value for t in search.trials if t.value is not None and t.state.name == "COMPLETE"]
        if not earlier or (watch.last < min(earlier) if direction == "minimize" else watch.last > max(earlier)):
            best["trainer"] = trainer
        return watch.last

    search.optimize(run, n_trials=trials)
    if "trainer" not in best:
        raise InputError("no trial of this search was better than those before it", hint="raise trials=")
    return Found(dict(search.best_params), float(search.best_value), best["trainer"], search)


def _check_arguments(make: Callable[[Any], Trainer]) -> None:
    """Raise unless ``make`` can be called with a trial alone: Optuna would log a TypeError first."""
    form = signature(make)
    try:
        form.bind(None)
    except TypeError:
        raise OptionError(
            f"make{form} cannot be called with one argument, the trial",
            hint='write def make(trial), which asks it for settings: trial.suggest_float("rate", 1e-4, 1e-1, log=True)',
        ) from None


class Pruning(Callback):
    """Report every epoch to an Optuna trial, and stop the trial if Optuna prunes it."""

    def __init__(self, trial: Any, monitor: str = "val_loss") -> None:
        self.trial, self.monitor = trial, monitor
        self.last = float("nan")

    def epoch_end(self, trainer: Trainer, row: Row) -> None:
        self.last = value_of(row, self.monitor, "Pruning")
        self.trial.report(self.last, trainer.epoch)
        if self.trial.should_prune():
            raise _optuna().TrialPruned


def _optuna() -> Any:
    try:
        return import_module("optuna")
    except ImportError:
        raise PluginError("a search for settings needs Optuna", hint="pip install optuna") from None
