"""Evaluation and predictions of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril.backend import Positive, checked
from mithril.compiler import CompiledModel
from mithril.graph import InputError
from mithril_parallel.processes import World
from mithril_parallel.watchdog import Watchdog
from mithril_train.engine.batches import LocalRows, joined, named, rows
from mithril_train.loop.fit_data import evaluation_source
from mithril_train.loop.history import Totals
from mithril_train.loop.trained_model import prepare
from mithril_train.loop.trainer_values import TrainerValues
from mithril_train.step.loss_binding import SAMPLE_WEIGHT

WINDOW = 8  # steps that may run before their losses are checked for nan and infinity


class TrainerEvaluation(TrainerValues):
    """The methods of a trainer that run the model without training it; the base class of ``Trainer``."""

    compiled: CompiledModel
    world: World
    watchdog: Watchdog

    def begin(self, batch: Any) -> None:
        """Build the executables and initialize the parameters for such batches, without training."""
        raise NotImplementedError

    def join(self) -> None:
        """Join the processes of the backend's mesh."""
        raise NotImplementedError

    def to_numpy(self, value: Any) -> np.ndarray[Any, Any]:
        """Convert an array of the backend to NumPy."""
        with self.watchdog.waiting(f"reading results of step {self.steps}"):
            return self.engine.backend.to_numpy(value)

    def _columns(self, batch: Any) -> dict[str, Any]:
        if isinstance(batch, LocalRows):
            self.join()
            with self.watchdog.waiting("joining the rows of a batch", compiles=True):
                return self.engine.joined_rows(named(batch.batch, self._inputs), self.world)
        return named(batch, self._inputs)

    @property
    def _inputs(self) -> list[str]:
        return list(self.engine.session.specs)

    def _weight(self, batch: Mapping[str, Any]) -> float | None:
        """Return the sum of the weights of the samples of a batch, by which its mean loss counts in the epoch."""
        weights = batch.get(SAMPLE_WEIGHT)
        return None if weights is None else float(self.engine._numpy(weights).sum())

    @checked()
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        batch_size: Positive | None = None,
        ema: bool = False,
    ) -> dict[str, float]:
        """Compute loss and metrics of all samples, of a loader or of arrays; ``ema`` uses the averaged parameters."""
        totals = Totals(self.recipe.metrics, self.to_numpy)
        parameters = self._live_averages() if ema else None
        for item in evaluation_source(x, y, self._inputs, batch_size, sample_weight):
            batch = self._columns(item)
            if not self.engine.arrays:
                self.begin(batch)
            with self.watchdog.waiting("evaluation", compiles=True):
                reports = self.engine.evaluate(batch, parameters)
            totals.add(reports, rows(batch), self._weight(batch))
            if len(totals.pending) >= 4 * WINDOW:
                totals.read_reports()
        row = totals.row()
        if not row:
            raise InputError("nothing to evaluate: the loader yielded no batch")
        return row

    @checked()
    def predict(self, x: Any, *, batch_size: Positive | None = None, ema: bool = False) -> Any:
        """Return the model's outputs as NumPy arrays: for one batch, or concatenated for a loader of batches.

        A batch is an array, a list of rows, or a tuple or dictionary of columns; targets among them are ignored.
        ``batch_size`` splits its rows. Outputs whose sizes differ between batches, such as those of sequences of
        several lengths, are returned as a list with one array per row.
        """
        chunks: list[dict[str, np.ndarray[Any, Any]]] = []
        for batch in evaluation_source(x, None, self._inputs, batch_size):
            columns = self._columns(batch)
            if not self.engine.arrays:
                raise InputError("nothing is trained yet", hint="trainer.fit(loader) first, or trainer.begin(batch)")
            params = self.engine.live(self._live_averages() if ema else None)
            inputs = self.engine.as_inputs(columns)
            with self.watchdog.waiting("prediction", compiles=True):
                # caches of generation are states that training does not have
                state = {**self.compiled.state_for(inputs, None), **self.engine.model_states()}
                outputs = self.compiled.evaluate(params, inputs, state=state, training=False)[0]
                chunks.append({n: np.array(self.engine.backend.to_numpy(x)) for n, x in outputs.items()})
        if not chunks:
            raise InputError("nothing to predict: the loader yielded no batch")
        predictions = {n: joined([chunk[n] for chunk in chunks]) for n in chunks[0]}
        return next(iter(predictions.values())) if len(predictions) == 1 else predictions

    def _bind(self) -> None:
        """Bind copies of the parameters to the compiled model, so that ``compiled(inputs)`` works."""
        if self.engine.arrays:
            if not self.compiled.programs:
                prepare(self.compiled, self.engine)
            copied = self.engine.copied
            with self.watchdog.waiting("the end of training", compiles=True):
                self.compiled.bind(
                    {n: copied(n) for n in self.engine.parameters},
                    {n: copied(n) for n in self.engine.model_states()} or None,
                )
