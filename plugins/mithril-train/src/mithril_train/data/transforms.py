"""Functions of rows and batches, with random numbers that depend on the seed, the epoch and the sample only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mithril.graph import InputError
from mithril_train.data.datasets import Source, default_collate

Transform = Callable[..., Any]
ROW, BATCH = 0, 1


class Task(NamedTuple):
    """One batch of an epoch: the number of samples before it, and the indices of its samples or these themselves."""

    epoch: int
    number: int
    first: int  # the number of the first sample of a stream
    samples: Any


class Pipeline:
    """Reads the rows of a batch, transforms them, collates them, transforms the batch. Worker processes receive it."""

    def __init__(
        self, source: Source, seed: int, collate: Transform | None, transform: Transform | None, batch: Transform | None
    ) -> None:
        self.source, self.seed, self.collate = source, seed, collate
        self.transform, self.batch = transform, batch
        self.random_rows, self.random_batches = _reads_rng(transform), _reads_rng(batch)

    def __call__(self, task: Task) -> Any:
        batch = self._batch(task)
        if self.batch is None:
            return batch
        return _result(
            self.batch(batch, **self._rng(self.random_batches, BATCH, task.epoch, task.number)), "batch_transform"
        )

    def _batch(self, task: Task) -> Any:
        indexed = self.source.length is not None
        if indexed and self.transform is None and self.collate is None:
            return self.source.fetch(task.samples)
        rows = self.source.rows(task.samples) if indexed else task.samples
        if self.transform is not None:
            numbers = task.samples if indexed else range(task.first, task.first + len(rows))
            rows = [
                _result(self.transform(row, **self._rng(self.random_rows, ROW, task.epoch, int(k))), "transform")
                for row, k in zip(rows, numbers, strict=True)
            ]
        return (self.collate or default_collate)(rows)

    def _rng(self, takes_rng: bool, kind: int, epoch: int, number: int) -> dict[str, np.random.Generator]:
        if not takes_rng:
            return {}
        words = [self.seed & 0xFFFFFFFFFFFFFFFF, (kind << 62) | (epoch & 0x3FFFFFFF) << 32 | number & 0xFFFFFFFF]
        return {"rng": np.random.Generator(np.random.Philox(key=np.array(words, np.uint64)))}


def _reads_rng(function: Transform | None) -> bool:
    """Whether a function has a parameter ``rng``."""
    if function is None:
        return False
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _result(value: Any, who: str) -> Any:
    if value is None:
        raise InputError(f"{who} returned None", hint="return the row or batch")
    return value
