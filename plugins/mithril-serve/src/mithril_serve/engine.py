"""Continuous batching: texts of many requests are rows of one program, which they join and leave between steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.compiler import CompiledModel
from mithril.graph import InputError
from mithril_hub.generation.sampling import Sampler, Sampling, undefined
from mithril_hub.generation.session import Session
from mithril_serve.limits import Busy, Closing, answerable


@dataclass(eq=False)
class Job:
    """One text that is generated. ``emit`` receives each token from the thread of the engine, and at the end None.

    ``emit`` returns whether the text ends: at a stop sequence, or because its client left.
    """

    prompt: Sequence[int]
    limit: int
    emit: Callable[[int | None, str | BaseException], bool]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    sample: int = 0  # number of the text among those of the same prompt
    stop: frozenset[int] = frozenset()
    cancelled: bool = False  # set by the thread of the request
    new: list[int] = field(default_factory=list)


class Engine:
    """Generates texts in a thread. At most ``rows`` are generated at once, and ``queue`` wait."""

    def __init__(self, model: CompiledModel, *, rows: int = 8, queue: int = 64) -> None:
        self.rows, self.limit = rows, queue
        self.reader = Session(model)  # reads prompts, and keeps the latest one: its beginning may be that of the next
        self.writer: Session | None = None  # continues the rows
        self.jobs: list[Job | None] = []  # of the rows of the writer; None: a row that has ended
        self.waiting: deque[Job] = deque()
        self.tokens = self.steps = self.read = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mithril-serve", daemon=True)
        # one step compiles the model, and shows how many tokens it knows
        self.vocabulary = int(self.reader.start([[0]]).shape[-1])
        self.capacity = self.reader.capacity
        self._thread.start()

    @property
    def active(self) -> int:
        """The number of texts that are being generated."""
        return sum(job is not None for job in self.jobs)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Add texts; raise Busy if too many wait already."""
        with self._changed:
            if self._closing:
                raise Closing
            # Texts whose clients left while they waited take no place.
            self.waiting = deque(job for job in self.waiting if not job.cancelled)
            if len(self.waiting) + len(jobs) > self.limit:
                raise Busy(len(self.waiting), self.limit)
            self.waiting.extend(jobs)
            self._changed.notify()

    def close(self) -> None:
        """End all texts, and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self.waiting and not self.active and not self._closing:
                    self._changed.wait()
                if self._closing:
                    break
                job = self.waiting.popleft() if self.waiting and self.active < self.rows else None
            # One prompt between two steps: texts that are being generated wait for one prompt at most.
            if job is not None and not job.cancelled:
                self._admit(job)
            if self.active:
                self._step()
        for job in [*self.waiting, *self.jobs]:
            if job is not None:
                job.emit(None, Closing())

    def _admit(self, job: Job) -> None:
        """Read the prompt of a text, and add it to the rows."""
        try:
            logits = self.reader.start([job.prompt])
            self.read += len(job.prompt)
            if self._emitted(job, self._drawn(logits, [job])[0]):
                return
            rows = [n for n, other in enumerate(self.jobs) if other is not None]
            parts = [(self.writer, rows)] if self.writer is not None and rows else []
            spare = self._spare(len(rows) + 1)
            self.writer = Session.joined([*parts, (self.reader, [0] * (1 + spare))])
            self.jobs = [*(self.jobs[n] for n in rows), job, *[None] * spare]
        except Exception as error:
            self._failed([job], error)
            self.reader.reset()

    def _spare(self, count: int) -> int:
        """Return how many rows to add, so that a backend that compiles each size compiles few of them."""
        if not self.reader.backend.capabilities.recompiles:
            return 0
        return min(1 << (count - 1).bit_length(), self.rows) - count

    def _step(self) -> None:
        """Draw one token for each row."""
        assert self.writer is not None
        jobs = [job for job in self.jobs if job is not None]
        try:
            self._leave()
            logits = self.writer.extend([job.new[-1:] if job is not None else [] for job in self.jobs])
            rows = [n for n, job in enumerate(self.jobs) if job is not None]
            jobs = [job for job in self.jobs if job is not None]
            tokens = self._drawn(self.writer.backend.to_numpy(logits)[rows], jobs)
            self.steps += 1
        except Exception as error:
            self._failed(jobs, error)
            self.writer, self.jobs = None, []
            return
        for n, job, token in zip(rows, jobs, tokens, strict=True):
            if job.cancelled or self._emitted(job, token):
                self.jobs[n] = None

    def _leave(self) -> None:
        """Remove rows that have ended once they are half of the rows."""
        assert self.writer is not None
        rows = [n for n, job in enumerate(self.jobs) if job is not None]
        size = len(rows) + self._spare(len(rows))
        if 2 * len(rows) <= len(self.jobs) and size < len(self.jobs):
            self.writer = self.writer.fork([*rows, *[rows[0]] * (size - len(rows))])
            self.jobs = [*(self.jobs[n] for n in rows), *[None] * (size - len(rows))]

    def _emitted(self, job: Job, token: int | None) -> bool:
        """Report a token, or that its logits are nan, and return whether the text has ended."""
        if token is None:  # the other texts continue
            self._failed([job], undefined(0))
            return True
        job.new.append(token)
        self.tokens += 1
        stops = token in job.stop
        try:
            if (not stops and job.emit(token, "")) or job.cancelled:
                return True
        except Exception as error:  # of a tokenizer: the other texts continue
            self._failed([job], error)
            return True
        if stops or len(job.new) >= job.limit:
            job.emit(None, "stop" if stops else "length")
            return True
        return False

    def _failed(self, jobs: Sequence[Job], error: Exception) -> None:
        answer = answerable(error)
        for job in jobs:
            job.emit(None, answer)

    def _drawn(self, logits: Any, jobs: Sequence[Job]) -> list[int | None]:
        """Return the next token of each row of logits [rows, 1, vocabulary]; None if they are nan."""
        scores = np.asarray(self.reader.backend.to_numpy(logits)[:, -1], np.float32)
        undrawn = np.asarray(np.isnan(scores).any(axis=-1))
        tokens = scores.argmax(axis=-1)
        for n, job in enumerate(jobs):
            if job.sampling != Sampling() and not undrawn[n]:
                history = [[*job.prompt, *job.new]]
                # by NumPy on all backends: programs for new settings take no time to compile
                tokens[n] = Sampler(job.sampling, "numpy", job.seed).tokens(scores[n : n + 1], history, [job.sample])[0]
        return [None if skip else int(token) for token, skip in zip(tokens, undrawn, strict=True)]


def check_prompt(engine: Engine, prompt: Sequence[int], limit: int) -> None:
    """Raise InputError if a text does not fit into the cache, or has tokens that the model does not know."""
    if len(prompt) + limit > engine.capacity:
        raise InputError(
            f"the model's context is {engine.capacity} tokens: {len(prompt)} in the prompt and {limit} to generate"
        )
    if max(prompt) >= engine.vocabulary:
        raise InputError(f"token {max(prompt)} is out of range", facts=[f"the model has {engine.vocabulary} tokens"])
