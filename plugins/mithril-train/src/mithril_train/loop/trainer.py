"""``ml.Trainer``: the loop over epochs and batches around the compiled training step."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np

from mithril.backend import CheckedType, Least, Positive, checked
from mithril.base import InputError, OptionError
from mithril.compiler import Transformed
from mithril.models import Layer
from mithril.runtime import CompiledModel
from mithril_train.engine.adapters import Loader, as_loader
from mithril_train.engine.batches import is_batch, named, rows
from mithril_train.engine.engine import Engine, compiler_of
from mithril_train.engine.nonfinite import not_finite
from mithril_train.loop import checkpoint
from mithril_train.loop.callbacks import Callback, Checkpoint
from mithril_train.loop.history import History, Totals
from mithril_train.loop.progress import Progress, make_progress
from mithril_train.loop.report import Report
from mithril_train.loop.trained_model import compiled_model, prepare
from mithril_train.loop.training import Training
from mithril_train.optim.optimizers import Optimizer
from mithril_train.step.loss_binding import as_measure, as_metrics
from mithril_train.step.step import FINITE, STATISTIC, ema_name, rate_name
from mithril_train.step.step_config import LossScale, StepConfig

WINDOW = 8  # steps that may run before their losses are checked for nan and infinity


class Trainer(metaclass=CheckedType):
    """Train a model: ``Trainer(model, ml.Adam(1e-3), loss="cross_entropy", backend="jax").fit(loader, epochs=3)``.

    ``model`` is a logical model (with ``backend=`` and any option of ``ml.compile``) or a compiled one.

    ``loss`` is the name of an operation such as ``"cross_entropy"``, a function or layer, the name of a scalar output,
    or None if the model's only scalar output is the loss. The parameters of a function are looked up by name among the
    model's outputs and the columns of the batch; a function of two parameters may read the only output and the only
    target. ``metrics`` are further functions of this kind, by name. Those of ``mithril.models`` are computed over all
    samples, independently of the batch size; a function is averaged over the samples, which is correct for means only.

    ``clip_norm`` bounds the global gradient norm, ``clip_value`` each element. ``frozen`` lists patterns of parameters
    that are not updated; the running statistics of a frozen batch norm still follow the data. ``ema`` is the decay of a
    moving average of the parameters, which evaluation can use. ``loss_scale`` is a number or ``"dynamic"``, for
    float16. ``detect_nan`` stops at the first step that is not finite and names the layer. ``params`` and ``state`` are
    initial arrays; other parameters are initialized from ``seed``.
    """

    argument_hints: ClassVar = {
        "optimizer": "optimizer=ml.Adam(1e-3), or another of mithril_train's",
        "lr": "Trainer(model, ml.Adam(learning_rate=...))",
        "learning_rate": "Trainer(model, ml.Adam(learning_rate=...))",
        "epochs": "trainer.fit(loader, epochs=...)",
        "validation": "trainer.fit(loader, validation=...)",
        "batch_size": "ml.DataLoader(data, batch_size=...)",
        "accumulate": "write gradient_accumulation_steps=",
    }

    def __init__(
        self,
        model: Layer | Transformed | CompiledModel,
        optimizer: Optimizer,
        *,
        loss: Any = None,
        metrics: Any = None,
        backend: Any = None,
        gradient_accumulation_steps: Positive = 1,
        clip_norm: Annotated[float, Least(0, open=True)] | None = None,
        clip_value: Annotated[float, Least(0, open=True)] | None = None,
        frozen: str | Sequence[str] = (),
        ema: float | None = None,
        loss_scale: LossScale | float | str | None = None,
        detect_nan: bool = True,
        params: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        seed: int | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
        **options: Any,
    ) -> None:
        self.compiled = compiled_model(model, backend, options, self._arguments(), self.argument_hints)
        self.recipe = StepConfig(
            optimizer=optimizer,
            loss=self._loss(loss),
            metrics=as_metrics(metrics),
            clip_norm=clip_norm,
            clip_value=clip_value,
            frozen=(frozen,) if isinstance(frozen, str) else tuple(frozen),
            ema=ema,
            loss_scale=LossScale.of(loss_scale),
            detect_nan=detect_nan,
            accumulate=gradient_accumulation_steps,
        )
        self.engine = Engine(self.compiled, self.recipe)
        self.callbacks: list[Callback] = list(callbacks)
        self._callbacks = self.callbacks  # including those of the running fit
        self._totals: Totals | None = None
        self.progress = progress
        self.seed = int(self.compiled.options["seed"]) if seed is None else seed
        self.history = History()
        self.epoch = 0  # completed epochs
        self.steps = 0  # optimizer steps
        self.first_epoch = 0  # epochs completed before the running fit
        self.stopped = ""  # why training was stopped early, if it was
        self._micro = 0  # batches accumulated since the last step
        initial = params if params is not None else self.compiled.params or {}
        self._initial_values = dict(initial), dict(state or {})
        self._rate: Any = None  # set by assignment
        self._window: list[tuple[dict[str, Any], Any, int]] = []
        self._pending: dict[str, np.ndarray[Any, Any]] | None = (
            None  # of a checkpoint that was read before the first batch
        )
        self._loader_state: Any = None
        self._partial: tuple[dict[str, Any], dict[str, Any]] | None = (
            None  # sums of the epoch in which the checkpoint was written
        )

    def _arguments(self) -> list[str]:
        return [*inspect.signature(type(self).__init__).parameters][1:]

    def _loss(self, loss: Any) -> Any:
        outputs = set(compiler_of(self.compiled).source.outputs)
        return loss if loss is None or (isinstance(loss, str) and loss in outputs) else as_measure(loss)

    # -- one step ----------------------------------------------------------------------------------------------------
    def step(self, batch: Any) -> Report:
        """Train on one batch. With gradient accumulation, only every n-th call updates the parameters."""
        return self._step(self._columns(batch))

    def _step(self, batch: dict[str, Any], *, last: bool | None = None) -> Report:
        engine, recipe = self.engine, self.recipe
        if not engine.arrays:
            self.begin(batch)
        if last is None:
            last = self._micro + 1 >= recipe.accumulate
        rates = {rate_name(p): r for p, r in recipe.optimizer.rates(self.steps).items()}
        reports = engine.step(batch, rates, last=last)
        finite = reports.values.pop(FINITE, None)
        if recipe.stops and finite is not None:
            self._window.append((batch, finite, self.steps))
            if len(self._window) >= WINDOW:
                self.check_finite()
        self._micro = 0 if last else self._micro + 1
        self.steps += last
        return Report(
            reports,
            recipe.metrics,
            step=self.steps,
            rates=rates,
            read=self.to_numpy,
            check_finite=self.check_finite,
        )

    def begin(self, batch: Any) -> None:
        """Build the executables and initialize the parameters for such batches, without training."""
        columns = self._columns(batch)
        traced, _, _ = self.engine.traced(columns, training=True)
        self.engine.begin(traced, self.seed, *self._initial_values)
        if self._pending is not None:
            self.engine.restore(self._pending)
            self._pending = None
        self.engine.prepare(columns)

    def check_finite(self) -> None:
        """Raise NotFiniteError if a step since the last check was not finite, naming the first layer affected."""
        window, self._window = self._window, []
        for batch, finite, step in window:
            if not bool(self.engine.backend.to_numpy(finite)):
                raise not_finite(self.engine, batch, step)

    def read(self, value: Any) -> float:
        """Convert a scalar of the backend to a float."""
        return float(self.to_numpy(value))

    def to_numpy(self, value: Any) -> np.ndarray[Any, Any]:
        """Convert an array of the backend to NumPy."""
        return self.engine.backend.to_numpy(value)

    def _columns(self, batch: Any) -> dict[str, Any]:
        return named(batch, list(self.engine.compiler.specs))

    # -- epochs ------------------------------------------------------------------------------------------------------
    @checked(
        by_position="put inputs and targets into a loader: fit(ml.DataLoader((x, y), batch_size=32), epochs=1)",
        y="put inputs and targets into a loader: ml.DataLoader((x, y), batch_size=32)",
        validation_data="write validation=(x, y), or a loader",
        verbose="Trainer(progress=False) is silent",
        batch_size="ml.DataLoader((x, y), batch_size=...)",
        shuffle="ml.DataLoader((x, y), shuffle=True)",
    )
    def fit(
        self,
        loader: Any,
        epochs: Annotated[int, Least(0)] = 1,
        *,
        validation: Any = None,
        callbacks: Sequence[Callback] = (),
        resume: str | os.PathLike[str] | None = None,
    ) -> History:
        """Train for ``epochs`` more epochs and return the history.

        ``resume`` continues an interrupted ``fit`` from a checkpoint, or from the latest one in a directory; then
        ``epochs`` includes the epochs that were completed before. The result is bitwise identical to that of an
        uninterrupted run. ``resume="auto"`` uses the folder of the ``Checkpoint`` callback and starts from the seed if
        it contains no checkpoint yet, so that the same command starts and resumes training.
        """
        if isinstance(loader, CompiledModel | Layer | Transformed):
            raise InputError("fit takes a loader of batches", hint="ml.DataLoader((x, y), batch_size=32)")
        if is_batch(loader):
            raise InputError(
                "fit takes a loader of batches, and this is one batch",
                hint="ml.DataLoader(batch, batch_size=32), or [batch] to train on all of it at once",
            )
        watchers = self._callbacks = [*self.callbacks, *callbacks]
        source = as_loader(loader, self.seed)
        self.first_epoch = self.epoch
        if resume is not None:
            self._resume(resume)
        total = self.first_epoch + epochs
        source.load_state(self._loader_state, self.epoch)
        if self._pending is not None and self.epoch >= total:  # already finished: the parameters are still needed
            self.begin(next(iter(source.evaluation_batches())))
        self.stopped = ""
        bar = make_progress(self.progress)
        try:
            for watcher in watchers:
                watcher.begin(self)
            while self.epoch < total and not self.stopped:
                self._epoch(source, total, validation, watchers, bar)
        finally:
            bar.close()
            for watcher in watchers:
                watcher.end(self)
        self._bind()
        return self.history

    def _epoch(self, source: Loader, epochs: int, validation: Any, watchers: Sequence[Callback], bar: Progress) -> None:
        for watcher in watchers:
            watcher.epoch_begin(self, self.epoch + 1)
        totals = self._totals = Totals(self.recipe.metrics, self.to_numpy)
        if self._partial is not None:
            totals.restore(*self._partial)
            self._partial = None
        bar.epoch(self.epoch + 1, epochs, source.count(), source.done())
        finished = False
        batches = source.batches()
        try:
            for batch, ends in self._grouped(source, batches):
                report = self._step(batch, last=ends)
                totals.add(report.reports, rows(batch))
                if len(totals.pending) >= 4 * WINDOW:
                    self._read_reports(totals)
                bar.step(report)
                if ends:
                    for watcher in watchers:
                        watcher.step_end(self, report)
                if self.stopped:
                    break
            else:
                finished = True
        finally:
            batches.close()
        self.check_finite()
        self._read_reports(totals)
        row = totals.row()
        if not row and not self.stopped:
            raise InputError("the loader gave no batch", hint="check the data set's length, batch_size and drop_last")
        if not finished:
            return
        if validation is not None:
            row.update({f"val_{n}": x for n, x in self.evaluate(validation).items()})
        self.epoch += 1
        self._loader_state = source.state()
        self.history.rows.append(row)
        bar.row(self.epoch, epochs, row)
        for watcher in watchers:
            watcher.epoch_end(self, row)

    def _grouped(self, source: Loader, batches: Iterator[Any]) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield batches, each with a flag for the end of a step: every n-th batch, and the last of an epoch."""
        every = self.recipe.accumulate
        waiting = next(batches, None)
        while waiting is not None:
            batch = self._columns(waiting)
            self._loader_state = source.state()
            ends = self._micro + 1 >= every
            if not ends:
                waiting = next(batches, None)
                yield batch, waiting is None
            else:
                yield batch, True
                waiting = next(batches, None)

    def _read_reports(self, totals: Totals) -> None:
        self.history.steps += [row["loss"] for row in totals.read_reports()]

    def stop(self, reason: str = "requested") -> None:
        """End training after this step."""
        self.stopped = reason

    # -- using the model ---------------------------------------------------------------------------------------------
    @checked()
    def evaluate(self, loader: Any, *, ema: bool = False) -> dict[str, float]:
        """Compute loss and metrics of all samples; ``ema`` evaluates the averaged parameters."""
        totals = Totals(self.recipe.metrics, self.to_numpy)
        parameters = self.averaged if ema else None
        for item in _batches(loader):
            batch = self._columns(item)
            if not self.engine.arrays:
                self.begin(batch)
            reports = self.engine.evaluate(batch, parameters)
            totals.add(reports, rows(batch))
            if len(totals.pending) >= 4 * WINDOW:
                totals.read_reports()
        row = totals.row()
        if not row:
            raise InputError("nothing to evaluate: the loader yielded no batch")
        return row

    @checked()
    def predict(self, inputs: Any, *, ema: bool = False) -> Any:
        """Return the model's outputs as NumPy arrays: for one batch, or concatenated for a loader of batches.

        A batch is an array, a list of rows, or a tuple or dictionary of columns; targets among them are ignored.
        """
        chunks: list[dict[str, np.ndarray[Any, Any]]] = []
        for batch in _batches(inputs):
            columns = self._columns(batch)
            if not self.engine.arrays:
                raise InputError("nothing is trained yet", hint="trainer.fit(loader) first, or trainer.begin(batch)")
            params = self.engine.live(self.averaged if ema else None)
            state = {n: self.engine.arrays[n] for n in self.engine.states}
            outputs = self.compiled.evaluate(params, self.engine.as_inputs(columns), state=state, training=False)[0]
            chunks.append({n: np.array(self.engine.backend.to_numpy(x)) for n, x in outputs.items()})
        if not chunks:
            raise InputError("nothing to predict: the loader yielded no batch")
        predictions = {
            n: np.concatenate([f[n] for f in chunks]) if len(chunks) > 1 else chunks[0][n] for n in chunks[0]
        }
        return next(iter(predictions.values())) if len(predictions) == 1 else predictions

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; ``trainer.learning_rate = ...`` changes its rate."""
        return self.recipe.optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step for parameters whose group does not set a rate.

        Set it to a number, a schedule or a function of the step, at any time; nothing is recompiled.
        """
        return self.optimizer.rates(self.steps)[""]

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        self.recipe = replace(self.recipe, optimizer=replace(self.optimizer, learning_rate=rate))  # type: ignore[call-arg]
        self._rate = rate

    @property
    def params(self) -> dict[str, Any]:
        """Copies of the parameters, as arrays of the backend.

        Assign a dictionary of arrays, of any framework, to replace some or all: ``trainer.params = {"head.bias": b}``.
        The optimizer state of these parameters is kept.
        """
        self._require()
        return {n: self.engine.to_backend(x) for n, x in self.engine.live().items()}

    @params.setter
    def params(self, params: Mapping[str, Any]) -> None:
        self._assign("parameter", self.engine.parameters, params, 0)

    @property
    def averaged(self) -> dict[str, Any]:
        """The moving averages of the parameters (``ema=``)."""
        self._require()
        if self.recipe.ema is None:
            raise OptionError("there is no moving average", hint="Trainer(ema=0.999)")
        return {n: self._like(self.engine.arrays[ema_name(n)], n) for n in self.engine.trained}

    def _like(self, average: Any, name: str) -> Any:
        """Cast an average to the dtype of its parameter."""
        parameter = self.engine.arrays[name]
        if average.dtype == parameter.dtype:
            return average
        read = self.engine.backend.to_numpy
        return self.engine.backend.array(read(average).astype(read(parameter).dtype))

    @property
    def state(self) -> dict[str, Any]:
        """Copies of the model's state: running statistics, the random key. Assign to replace some or all."""
        self._require()
        return {n: self.engine.to_backend(self.engine.arrays[n]) for n in self.engine.states}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self._assign("state", self.engine.states, state, 1)

    def _assign(self, kind: str, names: Sequence[str], arrays: Mapping[str, Any], k: int) -> None:
        """Replace arrays now, or the initial arrays if training has not begun."""
        if self.engine.arrays:
            self.engine.replace(kind, names, arrays)
        else:
            self._initial_values[k].update(arrays)

    def _require(self) -> None:
        if not self.engine.arrays:
            raise InputError("there are no parameters yet", hint="trainer.begin(batch) makes them")

    def _bind(self) -> None:
        """Bind copies of the parameters to the compiled model, so that ``compiled(inputs)`` works."""
        if self.engine.arrays:
            if not self.compiled.programs:
                prepare(self.compiled, self.engine)
            tensors = self.engine.to_numpy()
            array = self.engine.backend.array
            self.compiled.bind(
                {n: array(tensors[n]) for n in self.engine.parameters},
                {n: array(tensors[n]) for n in self.engine.states} or None,
            )

    # -- checkpoints -------------------------------------------------------------------------------------------------
    @checked()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint from which ``load`` or ``fit(resume=...)`` continues bit for bit."""
        self._require()
        self.check_finite()
        partial = None
        tensors = self.engine.to_numpy()
        if self._totals is not None:
            self._read_reports(self._totals)
            if not _at_start(self._loader_state):
                partial = {"sums": self._totals.sums, "weights": self._totals.weights}
                tensors.update(self._totals.tensors())
        for k, watcher in enumerate(self._callbacks):
            tensors.update({f"callback/{k}/{n}": x for n, x in watcher.tensors().items()})
        progress = {
            "epoch": self.epoch,
            "first_epoch": self.first_epoch,
            "learning_rate": self._rate if isinstance(self._rate, (int, float)) else None,
            "steps": self.steps,
            "micro": self._micro,
            "loader": self._loader_state,
            "partial": partial,
            "rows": self.history.rows,
            "losses": self.history.steps,
            "callbacks": [[type(c).__name__, c.state_dict()] for c in self._callbacks],
            "optimizer": repr(self.recipe.optimizer),
        }
        checkpoint.write(path, tensors, progress)

    @checked()
    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint."""
        tensors, progress = checkpoint.read(path)
        if progress["optimizer"] != repr(self.recipe.optimizer):
            self.engine.decisions.record(
                "choice",
                f"the checkpoint was made with {progress['optimizer']}, training continues with the current settings",
            )
        self.epoch, self.steps, self._micro = progress["epoch"], progress["steps"], progress["micro"]
        self.first_epoch = progress.get("first_epoch", 0)
        if progress.get("learning_rate") is not None:
            self.learning_rate = progress["learning_rate"]
        self.history = History(progress["rows"], progress["losses"])
        statistics = {n: tensors.pop(n) for n in list(tensors) if n.startswith(STATISTIC)}
        self._loader_state = progress["loader"]
        self._partial = (progress["partial"], statistics) if progress["partial"] is not None else None
        self._window = []
        self._restore_callbacks(progress["callbacks"], tensors)
        if self.engine.arrays:
            self.engine.restore(tensors)
        else:
            self._pending = tensors

    def _restore_callbacks(self, saved: Sequence[tuple[str, Any]], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        """Restore the saved state of each callback by class, in order; remove its arrays from ``tensors``."""
        waiting = list(self._callbacks)
        for k, (kind, state) in enumerate(saved):
            head = f"callback/{k}/"
            arrays = {n.removeprefix(head): tensors.pop(n) for n in list(tensors) if n.startswith(head)}
            watcher = next((w for w in waiting if type(w).__name__ == kind), None)
            if watcher is not None:
                waiting.remove(watcher)
                watcher.load_state_dict(state, arrays)
            elif state or arrays:
                self.engine.decisions.record("ignored", f"the checkpoint's state of {kind}: there is no such callback")

    def _resume(self, path: str | os.PathLike[str]) -> None:
        if path == "auto":
            folders = [c.folder for c in self._callbacks if isinstance(c, Checkpoint)]
            if not folders:
                raise OptionError(
                    "resume='auto' requires a Checkpoint", hint='fit(..., callbacks=[ml.Checkpoint("run")])'
                )
            newest = next((latest for folder in folders if (latest := checkpoint.latest(folder))), None)
            if newest is not None:
                self.load(newest)
            return
        checkpoint_path = checkpoint.latest(path) if os.path.isdir(path) else path
        if checkpoint_path is None or not os.path.exists(checkpoint_path):
            state = "is empty of checkpoints" if checkpoint_path is None else "does not exist"
            raise InputError(
                f"cannot resume: '{os.fspath(path)}' {state}",
                hint="fit(..., resume='auto', callbacks=[ml.Checkpoint('run')]) starts from the seed the first time",
            )
        self.load(checkpoint_path)

    def __repr__(self) -> str:
        return (
            f"<Trainer of '{self.compiled.name}' on {self.engine.backend.name} with {self.optimizer!r}: "
            f"{self.epoch} epochs, {self.steps} steps>"
        )

    def summary(self) -> str:
        """Summarize the step: its number of operations and its carried arrays."""
        step = next(iter(self.engine._steps.values()), None)
        if step is None:
            return "no step yet: trainer.begin(batch) makes it"
        size = sum(x.size * x.dtype.itemsize for x in self.engine.to_numpy().values())
        return (
            f"one executable on {self.engine.backend.name}: {len(step.graph.nodes)} operations, "
            f"{len(self.engine.trained)} parameters trained, {size / 1e6:.3g} MB carried"
        )


_CALLBACKS_READ: type[Training] = Trainer  # lets mypy check that the trainer implements the interface of callbacks


def _batches(loader: Any) -> Iterable[Any]:
    """Return the batches of a loader; a single batch counts as a loader of one."""
    return [loader] if is_batch(loader) else as_loader(loader, 0).evaluation_batches()


def _at_start(state: Any) -> bool:
    return not state or state.get("position", 0) == 0
