"""``ml.Trainer``: the loop over epochs and batches around the compiled training step."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from mithril.backend import Least, Positive, checked, mismatch
from mithril.compiler import CompiledModel, Transformed
from mithril.graph import InputError, OptionError, log, phrase_here
from mithril.models import Layer
from mithril.system import notebook
from mithril_parallel.processes import TIMEOUT, World
from mithril_parallel.watchdog import Watchdog
from mithril_train.augment.stages import Augmentations
from mithril_train.engine.adapters import Loader, Portions
from mithril_train.engine.batches import is_batch, rows
from mithril_train.engine.engine import Engine, compiler_of
from mithril_train.engine.nonfinite import not_finite
from mithril_train.loop import checkpoint, checkpointing, ranks
from mithril_train.loop.callbacks import Callback, Training, expect_validation
from mithril_train.loop.checkpoint_callback import Checkpoint, load_latest, resume as resume_training
from mithril_train.loop.fit_data import BATCH_SIZE, ClassWeight, source_of, split, validation_source
from mithril_train.loop.history import History, Totals, line
from mithril_train.loop.interrupts import Interrupts
from mithril_train.loop.learning_rates import LearningRates, search_rates
from mithril_train.loop.progress import Progress, make_progress
from mithril_train.loop.report import Report
from mithril_train.loop.trained_model import compiled_model
from mithril_train.loop.trainer_evaluation import WINDOW, TrainerEvaluation
from mithril_train.loop.trainer_values import LayerPatterns
from mithril_train.optim.optimizers import Optimizer
from mithril_train.optim.parts import Parts
from mithril_train.step.loss_binding import as_losses, as_measure, as_metrics
from mithril_train.step.step import FINITE, rate_name
from mithril_train.step.step_config import LossScale, StepConfig
from mithril_train.step.train_step import TrainStep

Epochs = Annotated[int, Least(0)]


class Trainer(TrainerEvaluation):
    """Train a model: ``Trainer(model, ml.Adam(1e-3), loss="cross_entropy", backend="jax").fit(loader, epochs=3)``.

    ``model`` is a logical model (with ``backend=`` and any option of ``ml.compile``) or a compiled one. ``optimizer``
    is an optimizer, the name of one for its default settings (``"adam"``), or several by pattern of parameters.

    ``loss`` is the name of an operation such as ``"cross_entropy"``, a function or layer, the name of a scalar output,
    or None if the model's only scalar output is the loss. The parameters of a function are looked up by name among the
    model's outputs and the columns of the batch; a function of two parameters may read the only output and the only
    target. A dictionary by output holds a loss for each, ``loss_weights`` their weights in the sum. ``metrics`` are
    further functions of this kind, by name. Those of ``mithril.models`` are computed over all samples, independently of
    the batch size; a function is averaged over the samples, which is correct for means only.

    ``regularizers`` are penalties by pattern of parameters, such as ``{"*.weight": ml.L2(1e-4)}``; layers add losses by
    ``add_loss``. ``augment`` are layers without parameters, such as ``ml.RandomFlip()``, that replace columns of the
    batch in the training step. A batch with a column ``sample_weight`` weights the mean of the loss.

    Where patterns of parameters are expected, layers of the model are accepted too: ``frozen=model.encoder``.

    ``clip_norm`` bounds the global gradient norm, ``clip_value`` each element. ``frozen`` lists patterns of parameters
    that are not updated; the running statistics of a frozen batch norm still follow the data. ``ema`` is the decay of a
    moving average of the parameters, which evaluation can use; in the first ``9 / (1 - ema)`` steps it is smaller, ``t
    / (t + 9)`` in step ``t``, so that the average forgets the initial parameters. ``loss_scale`` is a number or
    ``"dynamic"``, for float16. ``detect_nan`` stops at the first step that is not finite and names the layer.
    ``params`` and ``state`` are initial arrays; other parameters are initialized from ``seed``. With several processes,
    training ends with an error that names the process for which the others have waited ``timeout`` seconds.
    """

    argument_hints: ClassVar = {
        "optimizer": "optimizer=ml.Adam(1e-3), or another of mithril_train's",
        "lr": "Trainer(model, ml.Adam(learning_rate=...))",
        "learning_rate": "Trainer(model, ml.Adam(learning_rate=...))",
        "epochs": "trainer.fit(loader, epochs=...)",
        "validation": "trainer.fit(loader, validation=...)",
        "batch_size": "ml.DataLoader(data, batch_size=...)",
        "accumulate": "write gradient_accumulation_steps=",
        "callbacks": "derive a class from ml.Callback, with a method such as epoch_end(self, trainer, row)",
    }
    # Names of trainers elsewhere, separated by spaces, and the way here.
    elsewhere: ClassVar = {
        "model module": "trainer.compiled.model",
        "parameters weights state_dict get_weights": "trainer.params",
        "load_state_dict set_weights load_weights restore": "trainer.set_params(arrays), or trainer.load(path)",
        "train": "trainer.fit(x, y, epochs=...)",
        "validate test score": "trainer.evaluate(x, y)",
        "train_on_batch training_step": "trainer.step(batch)",
        "lr": "trainer.learning_rate",
        "losses logs log": "trainer.history",
        "save_checkpoint save_model save_weights": "trainer.save(path)",
        "load_checkpoint": "trainer.load(path)",
        "resume from_checkpoint load_from_checkpoint": "trainer.fit(x, y, resume=path)",
        "compile": "the arguments of ml.Trainer: optimizer, loss, metrics",
        "export save_pretrained": "ml.compile(model, backend, inference=True).bind(trainer.params).export(path)",
        "lr_find": "trainer.find_learning_rate(x, y)",
    }

    if not TYPE_CHECKING:  # type checkers know all attributes

        def __getattr__(self, name: str) -> Any:
            instead = phrase_here(name, self.elsewhere)
            text = f"'{type(self).__name__}' object has no attribute '{name}'{f'; use {instead}' if instead else ''}"
            raise AttributeError(text, name=name, obj=self)

    def __init__(
        self,
        model: Layer | Transformed | CompiledModel,
        optimizer: Optimizer | str | Mapping[str | Layer, Optimizer | str],
        *,
        loss: Any = None,
        loss_weights: Mapping[str, float] | None = None,
        metrics: Any = None,
        regularizers: Mapping[str | Layer, Callable[..., Any]] | None = None,
        augment: Layer | Sequence[Layer] = (),
        backend: Any = None,
        gradient_accumulation_steps: Positive = 1,
        clip_norm: Annotated[float, Least(0, open=True)] | None = None,
        clip_value: Annotated[float, Least(0, open=True)] | None = None,
        frozen: str | Layer | Sequence[str | Layer] = (),
        ema: float | None = None,
        loss_scale: LossScale | float | str | None = None,
        detect_nan: bool = True,
        params: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        seed: int | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
        timeout: Annotated[float, Least(0, open=True)] = TIMEOUT,
        **options: Any,
    ) -> None:
        self.compiled = compiled_model(model, backend, options, self._arguments(), self.argument_hints)
        layers = LayerPatterns(self.compiled.model)
        optimizers, loss = layers.optimizer(optimizer), layers.table(loss)
        parts = Parts(optimizers=optimizers) if isinstance(optimizers, dict) else optimizers
        self.recipe = StepConfig(
            optimizer=parts,
            loss=self._loss(loss, list(optimizers) if isinstance(optimizers, dict) else ()),
            loss_weights=dict(loss_weights or {}),
            regularizers=layers.table(regularizers or {}),
            metrics=as_metrics(metrics),
            clip_norm=clip_norm,
            clip_value=clip_value,
            frozen=layers.patterns(frozen),
            ema=ema,
            loss_scale=LossScale.of(loss_scale),
            detect_nan=detect_nan,
            accumulate=gradient_accumulation_steps,
        )
        overridden = type(self).train_step is not Trainer.train_step
        if overridden or not parts.standard or self.recipe.loss_of_part:
            self.recipe = replace(self.recipe, program=self.train_step)
        names = list(self.compiled.specs)
        stages = Augmentations(augment, self.compiled.backend, names) if augment else None
        self.engine = Engine(self.compiled, self.recipe, stages)
        self._timeout = timeout
        self.world = ranks.world_of(self.engine, timeout)
        self.callbacks: list[Callback] = list(callbacks)
        self._callbacks = self.callbacks  # including those of the running fit
        self._totals: Totals | None = None  # of the epoch that is not complete
        self._unnotified: list[Callback] = []  # callbacks that do not know yet that the last epoch has ended
        self._interrupts = Interrupts()
        self._bar = Progress()  # of the running fit
        self.progress = progress
        self.seed = int(self.compiled.options["seed"]) if seed is None else seed
        self.history = History()
        self.epoch = 0  # completed epochs
        self.steps = 0  # optimizer steps
        self.first_epoch = 0  # epochs completed before the running fit
        self.stopped = ""  # why training was stopped early, if it was
        self.failed = False  # whether the last fit was ended by an error or an interrupt
        self.watchdog = Watchdog(World())  # that of the running fit
        self._agreed = True  # whether the processes have compared their first batch
        self._micro = 0  # batches accumulated since the last step
        initial = params if params is not None else self.compiled.params or {}
        self._initial_values = dict(initial), dict(state or {})
        self._rate: Any = None  # set by assignment
        self._frozen = False  # whether the frozen set was set by assignment
        self.rate_scale = 1.0  # multiplies all learning rates
        self._class_weight: ClassWeight | None = None  # of the running fit
        # steps that are not known to be finite: batch, flag, and the progress before
        self._window: list[tuple[dict[str, Any], Any, tuple[int, int, Any, int]]] = []
        self._pending: Mapping[str, Any] | None = None  # of a checkpoint that was read before the first batch
        self._loader_state: Any = None  # the position in the data after the last step

    def _arguments(self) -> list[str]:
        return [*inspect.signature(type(self).__init__).parameters][1:]

    def train_step(self, step: TrainStep) -> None:
        """Build the operations of a step; an override may run the model several times and update in any order.

        It is called once for batches of the same shapes; the operations that it emits are one graph.
        """
        self.optimizer.train_step(step)

    def _loss(self, loss: Any, parts: Sequence[str]) -> Any:
        outputs = list(compiler_of(self.compiled).session.source.outputs)
        if isinstance(loss, Mapping):
            return as_losses(loss, outputs, parts)
        return loss if loss is None or (isinstance(loss, str) and loss in outputs) else as_measure(loss)

    # -- one step ----------------------------------------------------------------------------------------------------
    def step(self, batch: Any) -> Report:
        """Train on one batch. With gradient accumulation, only every n-th call updates the parameters."""
        with self._interrupts.handled():
            return self._step(self._columns(batch))

    def _step(self, batch: dict[str, Any], *, last: bool | None = None, position: Any = None) -> Report:
        """Run a step; in ``fit``, ``position`` is the one in the data after this batch."""
        engine, recipe = self.engine, self.recipe
        if not engine.arrays:
            self.begin(batch)
        if last is None:
            last = self._micro + 1 >= recipe.accumulate
        rates = {rate_name(p): r * self.rate_scale for p, r in recipe.optimizer.rates(self.steps).items()}
        pending = len(self._totals.pending) if self._totals is not None else 0
        before = self.steps, self._micro, self._loader_state, pending
        measured = None if position is None else (rows(batch), self._weight(batch))
        engine.prepare(batch)
        # The first step of a shape compiles, for which the watchdog waits longer before it reports a
        # hanging process.
        compiles = not engine.has_run(batch)
        with self.watchdog.waiting(f"step {self.steps + 1}", compiles=compiles):
            self.watchdog.begin_step()
            with self._interrupts.held():
                reports = engine.step(batch, rates, last=last)
                finite = reports.values.pop(FINITE, None)
                if recipe.stops and finite is not None:
                    self._window.append((batch, finite, before))
                self._micro = 0 if last else self._micro + 1
                self.steps += last
                if measured is not None and self._totals is not None:
                    self._totals.add(reports, *measured)
                    self._loader_state = position
        # A check reads a flag and waits for the device, so that it covers several steps; those after a
        # failed one have changed nothing.
        if len(self._window) >= WINDOW:
            self.check_finite()
        return Report(
            reports,
            recipe.metrics,
            step=self.steps,
            rates=rates,
            read=self.to_numpy,
            check_finite=self.check_finite,
        )

    def join(self) -> None:
        """Join the processes of the backend's mesh, which PyTorch may have to start."""
        self.engine.backend.join_processes()
        self.world = ranks.world_of(self.engine, self._timeout)

    def begin(self, batch: Any) -> None:
        """Build the executables and initialize the parameters for such batches, without training."""
        self.join()
        columns = self._columns(batch)
        with self.watchdog.waiting("the initialization", compiles=True):
            arrays = self.engine.begin(columns, self.seed, *self._initial_values, saved=self._pending)
        with self._interrupts.held():
            self.engine.arrays, self._pending = arrays, None

    def check_finite(self) -> None:
        """Raise NotFiniteError if a step since the last check was not finite, naming the first layer affected.

        That step and the later ones changed no array; counters, position and totals return to the values before it.
        """
        window, self._window = self._window, []
        for batch, finite, (steps, micro, position, count) in window:
            if bool(self.to_numpy(finite)):
                continue
            error = not_finite(self.engine, batch, steps)
            with self._interrupts.held():
                self.engine.forget_failure()
                self.steps, self._micro, self._loader_state = steps, micro, position
                if self._totals is not None:
                    del self._totals.pending[count:]
            raise error

    def read(self, value: Any) -> float:
        """Convert a scalar of the backend to a float."""
        return float(self.to_numpy(value))

    # -- epochs ------------------------------------------------------------------------------------------------------
    @checked(
        by_position="fit(x, y, epochs=...), or fit(loader, epochs=...)",
        loader="write x=",
        callbacks=argument_hints["callbacks"],
    )
    def fit(
        self,
        x: Any,
        y: Any = None,
        epochs: Epochs = 1,
        *,
        validation: Any = None,
        validation_data: Any = None,
        validation_split: float | None = None,
        batch_size: Positive | None = None,
        shuffle: bool | None = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        steps_per_epoch: Positive | None = None,
        callbacks: Sequence[Callback] = (),
        resume: str | os.PathLike[str] | None = None,
        verbose: Literal[0, 1, 2] | bool | None = None,
    ) -> History:
        """Train for ``epochs`` more epochs and return the history.

        ``x`` is a loader of batches, or arrays with targets ``y`` (a dictionary by output, or a tuple, if there are
        several), which are read in shuffled batches of ``batch_size``. ``sample_weight`` and ``class_weight``, by
        label, weight the mean of the loss. ``steps_per_epoch`` is the number of batches of an epoch; the next epoch
        continues with the next batch. ``validation`` or ``validation_data`` is a loader, or ``(x, y)``;
        ``validation_split`` is the share of the samples, the last ones, that are kept for it and not trained on.
        ``verbose`` replaces the trainer's ``progress`` in this call: 0 is silent, 1 shows bars, 2 a line per epoch.

        ``resume`` continues an interrupted ``fit`` from a checkpoint, or from the latest one in a directory; then
        ``epochs`` includes the epochs that were completed before. The result is bitwise identical to that of an
        uninterrupted run. ``resume="auto"`` uses the folder of the ``Checkpoint`` callback and starts from the seed if
        it contains no checkpoint yet, so that the same command starts and resumes training.
        """
        # This call is fit(loader, 3): targets are arrays, never a single int.
        if isinstance(y, int) and not isinstance(y, bool) and epochs == 1:  # fit(loader, 3)
            if wrong := mismatch(y, Epochs):
                raise OptionError(f"Trainer.fit: epochs: {wrong}")
            y, epochs = None, y
        if validation is not None and validation_data is not None:
            raise OptionError("validation and validation_data are the same argument", hint="give one of them")
        inputs = self._inputs
        validation = validation if validation_data is None else validation_data
        if validation_split is not None:
            if validation is not None:
                raise OptionError("validation_split and validation data exclude each other", hint="give one of them")
            x, validation = split(x, y, inputs, sample_weight, validation_split)
            y = sample_weight = None
            batch_size = batch_size or BATCH_SIZE
        source = source_of(
            x, y, inputs, seed=self.seed, batch_size=batch_size, shuffle=shuffle, sample_weight=sample_weight
        )
        if y is not None or batch_size is not None:
            batch_size = batch_size or BATCH_SIZE
            validation = validation_source(validation, inputs, batch_size)
        if steps_per_epoch is not None:
            source = Portions(source, steps_per_epoch)
        self._class_weight = None if class_weight is None else ClassWeight(class_weight)
        # Checkpoints come last: they store the state of the other callbacks, and their end may end the process.
        watchers = self._callbacks = sorted([*self.callbacks, *callbacks], key=lambda w: isinstance(w, Checkpoint))
        self.first_epoch = self.epoch
        with self._interrupts.handled(), ranks.taking_part(self):
            progress = self.progress if verbose is None else verbose
            self._train(source, epochs, (validation, batch_size), watchers, resume, progress)
        return self.history

    @checked()
    def find_learning_rate(
        self,
        x: Any,
        y: Any = None,
        *,
        lowest: Annotated[float, Least(0, open=True)] = 1e-7,
        highest: Annotated[float, Least(0, open=True)] = 1.0,
        steps: Annotated[int, Least(10)] = 100,
        batch_size: Positive | None = None,
    ) -> LearningRates:
        """Try learning rates from ``lowest`` to ``highest``, one step each, on the data of ``fit``.

        The result has the rates, the losses, a picture and ``suggestion``. The trainer is as before afterwards:
        ``trainer.learning_rate = trainer.find_learning_rate(x, y).suggestion`` decides.
        """
        source = source_of(x, y, self._inputs, seed=self.seed, batch_size=batch_size, shuffle=None, sample_weight=None)
        with self._interrupts.handled():
            return search_rates(self, source, lowest, highest, steps)

    def _train(
        self,
        source: Loader,
        epochs: int,
        validation: tuple[Any, int | None],
        watchers: Sequence[Callback],
        resume: str | os.PathLike[str] | None,
        progress: int | None,
    ) -> None:
        if validation[0] is None:
            expect_validation(watchers, dict.fromkeys(["loss", *self.engine.recipe.metrics]))
        if resume is not None:
            resume_training(self, resume)
        ranks.agree(self)
        total = self.first_epoch + epochs
        continues = resume is not None or source.continues(self._loader_state)
        source.load_state(self._loader_state if continues else None, self.epoch, self.world.size)
        if not continues:
            if self._totals is not None:
                self.engine.decisions.record("choice", "fit got other data: the rest of the interrupted epoch is left")
            self._totals = None
        if self.epoch >= total:  # already finished: the parameters are still needed
            self._begin_without_step(source)
        self.stopped = ""
        bar = self._bar = make_progress(progress if self.world.rank == 0 else False)
        with ExitStack() as ending:  # in reverse order, each whether or not others fail
            for watcher in reversed(watchers):
                if not isinstance(watcher, Checkpoint):
                    break
                ending.callback(watcher.end, self)
            ending.callback(bar.close)
            for watcher in reversed(watchers):
                if not isinstance(watcher, Checkpoint):
                    ending.callback(watcher.end, self)
            ending.callback(source.close)
            ending.push(self._note_failure)
            for watcher in watchers:
                watcher.begin(self)
            self._notify_of_epoch()
            while self.epoch < total and not self.stopped:
                self._epoch(source, total, validation, watchers, bar)
            if self.stopped:
                self.tell(f"stopped after {self.epoch} epochs and {self.steps} steps: {self.stopped}")
        self._bind()

    def _begin_without_step(self, source: Loader) -> None:
        """Begin with any batch if no step has: arrays of a checkpoint wait for one."""
        if not self.engine.arrays:
            self.begin(next(iter(source.evaluation_batches())))

    def _note_failure(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.failed = kind is not None

    def _epoch(
        self,
        source: Loader,
        epochs: int,
        validation: tuple[Any, int | None],
        watchers: Sequence[Callback],
        bar: Progress,
    ) -> None:
        """Train the batches of an epoch that are left, then end it; after an interrupt, both can be empty."""
        for watcher in watchers:
            watcher.epoch_begin(self, self.epoch + 1)
        totals = self._totals = self._totals or Totals(self.recipe.metrics, self.to_numpy)
        bar.epoch(self.epoch + 1, epochs, source.count(), source.done())
        finished = False
        batches = source.batches()
        try:
            for batch, ends, position in self._grouped(source, batches):
                for watcher in watchers:
                    watcher.batch_begin(self, batch)
                report = self._step(batch, last=ends, position=position)
                if len(totals.pending) >= 4 * WINDOW:
                    self._read_reports(totals)
                bar.step(report)
                for watcher in watchers:
                    watcher.batch_end(self, report)
                if ends:
                    for watcher in watchers:
                        watcher.step_end(self, report)
                if self.stopped:
                    break
            else:
                finished = True
        finally:
            # Workers read ahead: they stop now and not when the garbage collector finds the iterator.
            batches.close()
        self._read_reports(totals)
        row = totals.row()
        if not row and not self.stopped:
            raise InputError("the loader gave no batch", hint="check the data set's length, batch_size and drop_last")
        if not finished:
            return
        self._begin_without_step(source)  # resumed after the last step of the epoch, but before its end
        if validation[0] is not None:
            row.update(self._validated(*validation, watchers))
        position = source.state()
        with self._interrupts.held():
            self.epoch += 1
            self._loader_state, self._totals = position, None
            self.history.rows.append(row)
            self._unnotified = list(watchers)
        bar.row(self.epoch, epochs, row)
        log("info", f"epoch {self.epoch}/{epochs}: {line(row)}")
        self._notify_of_epoch()

    def _notify_of_epoch(self) -> None:
        """Notify the callbacks of the end of the last epoch, each once, also if another one failed before."""
        self._unnotified = [w for w in self._unnotified if w in self._callbacks]
        # Removed before the call: one that fails is not notified again when training resumes.
        while self._unnotified:
            self._unnotified.pop(0).epoch_end(self, self.history.rows[-1])

    def _validated(self, data: Any, batch_size: int | None, watchers: Sequence[Callback]) -> dict[str, float]:
        for watcher in watchers:
            watcher.validation_begin(self)
        batched = batch_size if is_batch(data) else None
        row = {f"val_{n}": x for n, x in self.evaluate(data, batch_size=batched).items()}
        for watcher in watchers:
            watcher.validation_end(self, row)
        return row

    def _grouped(self, source: Loader, batches: Iterator[Any]) -> Iterator[tuple[dict[str, Any], bool, Any]]:
        """Yield batches, each with the position after it and a flag for the end of a step.

        A step ends with every n-th batch, and with the last of an epoch.
        """
        every = self.recipe.accumulate
        waiting = next(batches, None)
        while waiting is not None:
            position = source.state()
            ranks.check_batch(self, waiting, source.part())
            batch = self._columns(waiting)
            if self._class_weight is not None:
                batch = self._class_weight(batch, self._inputs, self.engine._numpy)
            ends = self._micro + 1 >= every
            if not ends:
                waiting = next(batches, None)
                # The next batch is read before this one is used, since only then is it known whether it is
                # the last of the epoch.
                yield batch, waiting is None, position
            else:
                yield batch, True, position
                waiting = next(batches, None)

    def _read_reports(self, totals: Totals) -> None:
        self.check_finite()
        with self._interrupts.held():
            self.history.steps += [row["loss"] for row in totals.read_reports()]

    def stop(self, reason: str = "requested") -> None:
        """End training after this step."""
        self.stopped = reason

    def tell(self, message: str) -> None:
        """Show a message between the rows of the epochs, unless progress is off."""
        self._bar.message(message)
        log("info", message)

    # -- checkpoints -------------------------------------------------------------------------------------------------
    @checked()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint from which ``load`` or ``fit(resume=...)`` continues bit for bit.

        A path that ends with ``.safetensors`` is one file with the complete arrays. Any other path is a folder, to
        which every process writes the parts that it holds. All processes must call it.
        """
        self._require()
        self.check_finite()
        with self.watchdog.waiting(f"the save of step {self.steps}", collective=False):
            checkpointing.save(self, path)

    @checked()
    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint, or the latest one of a directory."""
        with self._interrupts.handled():
            text = os.fspath(path)
            if checkpoint.is_checkpoint(text) or not load_latest(self, text):
                checkpointing.load(self, path)

    def _repr_html_(self) -> str:
        details = notebook.folded("step", notebook.text(self.summary()))
        return notebook.heading(repr(self)[1:-1]) + self.history._repr_html_() + details

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
        size = sum(x.nbytes for x in self.engine.arrays.values())
        return (
            f"one executable on {self.engine.backend.name}: {len(step.graph.nodes)} operations, "
            f"{len(self.engine.trained)} parameters trained, {size / 1e6:.3g} MB carried"
        )


_CALLBACKS_READ: type[Training] = Trainer  # lets mypy check that the trainer implements the interface of callbacks
