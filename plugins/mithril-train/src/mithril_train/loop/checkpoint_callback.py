"""``ml.Checkpoint``: saves checkpoints during training, and the choice of the one to resume from."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mithril.backend import Positive
from mithril.graph import InputError, MithrilError, OptionError
from mithril_parallel.sharding.checkpoint import Format, Save, import_libraries, is_shared
from mithril_parallel.sharding.storage import DamagedError, SaveError
from mithril_train.loop import checkpoint, checkpointing
from mithril_train.loop.callbacks import Array, Callback, Row, better, value_of

if TYPE_CHECKING:
    from mithril_parallel.watchdog import Watchdog
    from mithril_train.loop.callbacks import Training
    from mithril_train.loop.report import Report

Trainer = Any  # ``loop.trainer.Trainer``, which imports this module
SIGTERM = "SIGTERM"  # the reason to stop


class Checkpoint(Callback):
    """Save checkpoints to ``folder``: at the end of each epoch, and every ``every`` steps.

    The latest ``keep`` are kept. A save that fails, for example because the disk is full, ends training only if it is
    the first of this ``fit``; later ones warn, and the next one tries again. With ``monitor`` the best epoch is also
    kept as ``best``. The signal SIGTERM, by which schedulers of clusters announce the end, saves after the current step
    and then ends the process as it does without this callback; ``fit(resume=...)`` continues there.

    A checkpoint of one device is a file, ``step-00000100.safetensors``. On several devices it is a folder to which
    every process writes its parts; it counts when all have finished. ``asynchronous`` writes such folders while
    training continues. ``folder`` may have a protocol of fsspec, such as ``s3://bucket/run``.

    With ``format="orbax"`` or ``"dcp"`` the tensors are a checkpoint of Orbax or of
    ``torch.distributed.checkpoint`` inside the folder, which their programs can read; the commit remains.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: Positive | None = None,
        keep: Positive = 2,
        monitor: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        asynchronous: bool = True,
        format: Format = "parts",
    ) -> None:
        self.folder, self.every, self.keep, self.monitor = os.fspath(folder), every, keep, monitor
        self.asynchronous, self.format = asynchronous, format
        import_libraries(format)  # a save that takes long would count as one that hangs
        self._save_in_progress: Save | None = None
        self._shared = True  # whether all processes see the folder
        self.mode = better(mode, monitor or "")
        self.best = math.inf if self.mode == "min" else -math.inf
        self._terminated = False
        self._has_saved = False  # in this fit
        self._watchdog: Watchdog | None = None
        self._handler: Any = None  # of SIGTERM before this fit

    def begin(self, trainer: Training) -> None:
        self._watchdog = trainer.watchdog
        import_libraries(self.format)  # those of a backend that did not exist before
        self._has_saved = False
        self._shared = is_shared(self.folder, trainer.world)
        if trainer.world.rank == 0 or not self._shared:
            checkpoint.remove_unfinished(self.folder)
        if threading.current_thread() is threading.main_thread():  # Python handles signals there only
            self._handler = signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: Any) -> None:
        self._terminated = True
        if self._watchdog is not None:
            self._watchdog.request_stop()

    def end(self, trainer: Training) -> None:
        with (
            suppress(MithrilError) if trainer.failed else nullcontext(),  # the error of training must not be hidden
            trainer.watchdog.waiting("the end of the last save", collective=False),
        ):
            self._finish(trainer)
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None
        # Not after an error or a stop of one process: others would still train, and not answer.
        if not trainer.failed and trainer.stopped in ("", SIGTERM):
            # Training may be complete before all have agreed to end.
            self._terminated = any(trainer.world.exchange(self._terminated, "the end of all saves"))
            trainer.world.finish("the end of all saves")
        if self._terminated:
            self._terminated = False
            if trainer.failed:  # the signal ends the process before anything prints the error
                traceback.print_exc()
                sys.stderr.flush()
            signal.raise_signal(signal.SIGTERM)

    def batch_end(self, trainer: Training, report: Report) -> None:
        """Save after SIGTERM: of several processes all save after the same step, and all end."""
        dog = trainer.watchdog
        stops = self._terminated
        if trainer.world.size > 1:
            stops = dog.stop_at is not None and dog.steps >= dog.stop_at
        if stops and not trainer.stopped:
            self._terminated = True
            self._save(trainer)
            trainer.stop(SIGTERM)

    def step_end(self, trainer: Training, report: Report) -> None:
        if self.every is not None and trainer.steps % self.every == 0:
            self._save(trainer)

    def epoch_end(self, trainer: Training, row: Row) -> None:
        if self.monitor is not None:
            value = value_of(row, self.monitor, "Checkpoint")
            if value < self.best if self.mode == "min" else value > self.best:
                self.best = value
                self._write(trainer, "best")
        self._save(trainer)

    def _save(self, trainer: Training) -> None:
        self._write(trainer, f"step-{trainer.steps:08d}")

    def _write(self, trainer: Training, name: str) -> None:
        """Start to write a checkpoint; the previous one must be complete, so that one copy of the arrays is waiting."""
        with trainer.watchdog.waiting(f"the save of step {trainer.steps}", collective=False):
            self._write_waiting(trainer, f"{self.folder}/{name}")

    def _write_waiting(self, trainer: Training, path: str) -> None:
        self._finish(trainer)
        if not trainer.engine.is_distributed and "://" not in path and self.format == "parts":
            with self._tolerated(trainer):
                trainer.save(f"{path}.safetensors")
            return
        self._save_in_progress = checkpointing.begin_save(
            trainer, path, asynchronous=self.asynchronous, shared=self._shared, format=self.format
        )
        if not self.asynchronous:
            self._finish(trainer)

    def _finish(self, trainer: Training) -> None:
        """Wait for the save in progress, then remove checkpoints that are too old."""
        save, self._save_in_progress = self._save_in_progress, None
        if save is not None:
            with self._tolerated(trainer):
                save.finish()

    @contextmanager
    def _tolerated(self, trainer: Training) -> Iterator[None]:
        """Remove old checkpoints after a save. One that fails does not end training if the fit has saved before.

        The first one does: its folder, permissions or space are wrong, and training would never be saved.
        """
        try:
            yield
        except (SaveError, OptionError) as error:
            if not self._has_saved:
                raise
            trainer.engine.decisions.record(
                "fallback",
                f"a checkpoint was not written, training continues with the previous one: {error}",
                warn=True,
            )
            return
        self._has_saved = True
        self._remove_old(trainer)

    def _remove_old(self, trainer: Training) -> None:
        if trainer.world.rank and self._shared:
            return
        for old in checkpoint.candidates(self.folder)[self.keep :]:
            checkpoint.remove(old)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self.best = float(state["best"])

    def latest(self) -> Path | str | None:
        """Return the latest checkpoint, for ``fit(resume=...)``, or None."""
        path = next((candidate.path for candidate in checkpoint.candidates(self.folder)), None)
        return path if path is None or "://" in path else Path(path)


def resume(trainer: Trainer, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint, or the latest intact one of a folder; ``auto`` looks in the folders of the callbacks."""
    if path == "auto":
        folders = [c.folder for c in trainer._callbacks if isinstance(c, Checkpoint)]
        if not folders:
            raise OptionError("resume='auto' requires a Checkpoint", hint='fit(..., callbacks=[ml.Checkpoint("run")])')
        for folder in folders:
            if load_latest(trainer, folder):
                return
        return
    text = os.fspath(path)
    if checkpoint.is_checkpoint(text):
        trainer.load(text)
    elif not load_latest(trainer, text):
        state = "is empty of checkpoints" if checkpoint.exists(text) else "does not exist"
        raise InputError(
            f"cannot resume: '{text}' {state}",
            hint="fit(..., resume='auto', callbacks=[ml.Checkpoint('run')]) starts from the seed the first time",
        )


def load_latest(trainer: Trainer, folder: str) -> bool:
    """Load the latest checkpoint that every process has and can read; return whether there is one."""
    paths = {(c.step, c.id): c.path for c in checkpoint.candidates(folder)}
    answers = trainer.world.exchange([list(key) for key in paths], "the checkpoints to resume from")
    common = set(paths).intersection(*({(step, token) for step, token in answer} for answer in answers))
    for key in sorted(common, key=lambda k: (-k[0], k[1])):
        problem = ""
        try:
            checkpoint.verify(paths[key], trainer.world)
            trainer.load(paths[key])
        except DamagedError as error:
            problem = str(error)
        problems = trainer.world.exchange(problem, f"the checkpoint of step {key[0]}")
        damaged = {k: text for k, text in enumerate(problems) if text}
        if not damaged:
            return True
        trainer.engine.decisions.record(
            "choice",
            f"the checkpoint of step {key[0]} is damaged, training resumes from an older one: "
            + "; ".join(f"process {k}: {text}" for k, text in damaged.items()),
            warn=True,
        )
    if common:
        raise InputError(f"cannot resume: no checkpoint in '{folder}' is intact", facts=list(damaged.values()))
    if any(answers):
        raise InputError(
            f"cannot resume: the processes have no checkpoint in common in '{folder}'",
            facts=[f"process {k}: steps {sorted({step for step, _ in answer})}" for k, answer in enumerate(answers)],
            hint="use a folder that all processes share, or remove the checkpoints of other runs",
        )
    return False
