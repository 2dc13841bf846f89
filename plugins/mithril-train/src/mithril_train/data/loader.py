"""``ml.DataLoader``: batches of a dataset in a reproducible order, prefetched, resumable in the middle of an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal
from zlib import crc32

import numpy as np

from mithril.backend import CheckedType, Least, Positive
from mithril.graph import InputError, OptionError
from mithril_train.data.datasets import Source, Streamed, as_source
from mithril_train.data.sequences import Buckets
from mithril_train.data.shuffle import batch_count, batches, permutation
from mithril_train.data.transforms import Pipeline, Task
from mithril_train.data.workers import ProcessPool, ahead


class DataLoader(metaclass=CheckedType):
    """Iterate over batches.

    ``dataset``: arrays (a dictionary or tuple of them), a data frame, an Arrow table, an object with ``[]`` and
    ``len``, an iterable or a generator function. ``transform`` is a function of a row, ``collate`` of the list of rows,
    ``batch_transform`` of the batch; a parameter ``rng`` receives a generator that depends on the seed, the epoch and
    the row or batch. ``buckets`` makes batches of similar lengths. With ``shuffle`` the order depends only on ``seed``
    and the epoch. ``num_workers`` threads (or processes with ``worker="process"``) prefetch up to ``prefetch_factor``
    batches each. ``rank`` and ``world`` read the part of each batch that belongs to one process of several;
    ``batch_size`` is that of the complete batch. A batch that cannot be divided, such as the last one, is read whole by
    every process. ``pin_memory`` copies batches to page-locked memory if torch with CUDA is installed. Each ``iter``
    starts an epoch, except after ``load_state_dict`` of a state saved between two batches: it continues with the next
    sample, also with another batch size, number of workers or of processes.
    """

    argument_hints: ClassVar = {
        "collate_fn": "write collate=",
        "persistent_workers": "leave it out: workers stay for the next epoch",
    }

    def __init__(
        self,
        dataset: Any,
        batch_size: Positive = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        num_workers: Annotated[int, Least(0)] = 0,
        worker: Literal["thread", "process"] = "thread",
        prefetch_factor: Positive = 2,
        pin_memory: bool = False,
        drop_last: bool = False,
        transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        buckets: Buckets | None = None,
        sampler: Iterable[int] | None = None,
        rank: Annotated[int, Least(0)] | None = None,
        world: Positive | None = None,
    ) -> None:
        self.source: Source = as_source(dataset)
        self.pipeline = Pipeline(self.source, seed, collate, transform, batch_transform)
        self.buckets = buckets
        if buckets is not None and len(buckets.lengths) != self.source.length:
            shown = "an iterable" if self.source.length is None else f"{self.source.length} samples"
            raise OptionError(f"Buckets has {len(buckets.lengths)} lengths, and the data set is {shown}")
        if sampler is not None and iter(sampler) is sampler:
            raise OptionError(
                "sampler is an iterator, which can be read only once",
                hint="sampler=list(...), or an object with iter()",
            )
        if self.source.length is None and (shuffle or sampler is not None):
            raise OptionError("an iterable dataset comes in its own order", hint="leave out shuffle and sampler")
        if shuffle and sampler is not None:
            raise OptionError("shuffle and sampler both decide the order", hint="give one of them")
        if (rank is None) != (world is None) or (world is not None and rank is not None and rank >= world):
            raise OptionError(
                f"rank={rank} and world={world} do not name a process",
                hint="rank=0, world=2 is the first of two processes",
            )
        self.rank, self.world = rank or 0, world or 1
        self.returned_own_rows = False  # whether the last batch returned contains the rows of this process only
        # of the batches that are read ahead: the samples after each, and whether it has the rows of this process only
        self._ahead: deque[tuple[int, bool]] = deque()
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.num_workers, self.worker, self.prefetch_factor = num_workers, worker, prefetch_factor
        self.drop_last, self.sampler = drop_last, sampler
        self.pin = _pinner() if pin_memory else None
        self.epoch = 0
        self._position = 0  # samples of this epoch already returned, to all processes
        self._start = 0  # sample at which the next iteration begins
        self._data: dict[str, Any] | None = None  # the properties that a position depends on
        self._sampled_sum: int | None = None  # checksum of the order that the sampler gave, or must give again
        self._pool: ProcessPool | None = None  # reused in the next epoch

    def __len__(self) -> int:
        if self.source.length is None:
            raise TypeError("an iterable dataset has no length")
        if self.buckets is not None:
            return len(self.buckets.groups(self.order(), self.batch_size, self.drop_last))
        n = len(list(self.sampler)) if self.sampler is not None else self.source.length
        return batch_count(n, self.batch_size, self.drop_last)

    def __repr__(self) -> str:
        count = "?" if self.source.length is None else len(self)
        order = ", shuffled" if self.shuffle else ""
        return f"<DataLoader: {count} batches of {self.batch_size}{order}>"

    # -- where we are -------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of its samples already returned, and a fingerprint of the data."""
        return {
            "epoch": self.epoch,
            "samples": self._position,
            "data": self.identity(),
            "sampler": self._sampled_sum if self._position else None,
            "buckets": self._bucketing() if self._position else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position where ``state_dict`` was called; the batch size may differ."""
        require_same(state["data"], self.identity())
        if state["samples"] and state["buckets"] != self._bucketing():
            raise OptionError(
                "buckets, whose batches depend on the batch size, continue inside an epoch with the same sizes only",
                facts=[f"batch size and sizes saved: {state['buckets']}, here {self._bucketing()}"],
                hint="keep them until the epoch has ended, or resume from a checkpoint of the end of an epoch",
            )
        self.epoch, self._start = int(state["epoch"]), int(state["samples"])
        self._position, self._sampled_sum = self._start, state["sampler"]

    def _bucketing(self) -> list[int] | None:
        return None if self.buckets is None else [self.batch_size, *self.buckets.sizes.tolist()]

    def identity(self) -> dict[str, Any]:
        """Return the properties of data and order that a position depends on, as JSON."""
        if self._data is None:
            self._data = {"seed": self.seed, "shuffle": self.shuffle, **self.source.fingerprint()}
        return self._data

    # -- batches ------------------------------------------------------------------------------------------------------
    def __iter__(self) -> Generator[Any, None, None]:
        self._position, self._start = self._start, 0
        batches_of_epoch = self._stream() if self.source.length is None else self._indexed()
        self._ahead.clear()
        for batch in batches_of_epoch:
            self._position, self.returned_own_rows = self._ahead.popleft()
            yield self.pin(batch) if self.pin else batch
        self.epoch += 1
        self._position = 0

    def evaluation_batches(self) -> Iterator[Any]:
        """Yield all batches of the current epoch without advancing to the next one, for evaluation."""
        place = self.epoch, self._position, self._start
        self._start = 0
        try:
            yield from self
        finally:
            self.epoch, self._position, self._start = place

    def order(self, epoch: int | None = None) -> np.ndarray[Any, Any]:
        """Return the indices of an epoch in the order in which they are read."""
        if self.sampler is not None:
            return self._sampled(list(self.sampler), self.source.length or 0)
        n = self.source.length or 0
        if not self.shuffle:
            return np.arange(n)
        return permutation(n, self.seed, self.epoch if epoch is None else epoch)

    def _sampled(self, indices: list[Any], n: int) -> np.ndarray[Any, Any]:
        wrong = next((k for k in indices if not isinstance(k, int | np.integer) or not 0 <= k < n), None)
        if wrong is not None:
            raise OptionError(f"sampler gives {wrong!r}, which is not an index of {n} samples")
        return np.array(indices, np.int64)

    def _task(self, start: int, rows: Any) -> Task:
        """Return the task of a batch after ``start`` samples, for the rows that this process reads."""
        size = len(rows)
        divided = self.world > 1 and size % self.world == 0
        first, end = (self.rank * size // self.world, (self.rank + 1) * size // self.world) if divided else (0, size)
        # Tasks are made ahead of the batches: the position that a checkpoint stores is that of batches
        # already returned.
        self._ahead.append((start + size, divided))
        return Task(self.epoch, start, start + first, rows[first:end])

    def _tasks(self) -> Iterator[Task]:
        start, order = self._position, self.order()
        if self.sampler is not None:
            self._check_sampler(order, start)
        if self.buckets is None:
            groups = batches(order, self.batch_size, self.drop_last, start)
        else:
            shuffle = (self.seed, self.epoch) if self.shuffle else None
            groups = self.buckets.batches(order, self.batch_size, self.drop_last, shuffle, start)
        for indices in groups:
            yield self._task(start, indices)
            start += len(indices)

    def _check_sampler(self, order: np.ndarray[Any, Any], start: int) -> None:
        """Raise if an epoch continues in another order than it began."""
        total = crc32(order.tobytes())
        if start and total != self._sampled_sum:
            raise InputError(
                "the sampler gives another order than in the part of the epoch before",
                hint="let its order depend on a seed and the epoch, or leave out sampler= and use shuffle=True",
            )
        self._sampled_sum = total

    def _indexed(self) -> Iterator[Any]:
        tasks = self._tasks()
        depth = max(self.num_workers * self.prefetch_factor, 1)
        if self.num_workers == 0:
            yield from map(self.pipeline, tasks)
        elif self.worker == "thread":
            yield from ahead(tasks, self.pipeline, self.num_workers, depth)
        else:
            pool, self._pool = self._pool or ProcessPool(self.pipeline, self.num_workers), None
            complete = False
            try:
                yield from pool.ahead(tasks, depth)
                complete = True
            finally:
                if complete and self._pool is None:
                    self._pool = pool  # processes start slowly, so the next epoch reuses them
                else:
                    pool.close()

    def close(self) -> None:
        """End the worker processes that wait for the next epoch; they also end with the loader."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self.close()

    def _stream(self) -> Iterator[Any]:
        assert isinstance(self.source, Streamed)
        if hasattr(self.source.dataset, "set_epoch"):
            self.source.dataset.set_epoch(self.epoch)
        samples = self.source.samples()
        start = self._position
        for _ in islice(samples, start):
            pass  # resumed: skip the samples that were read before

        def groups() -> Iterator[Task]:
            position = start
            while rows := list(islice(samples, self.batch_size)):
                if len(rows) == self.batch_size or not self.drop_last:
                    yield self._task(position, rows)
                position += len(rows)

        if self.num_workers == 0:
            yield from map(self.pipeline, groups())
        else:  # reading is sequential; transforms and collating are parallel
            yield from ahead(groups(), self.pipeline, self.num_workers, self.num_workers * self.prefetch_factor)


def _pinner() -> Callable[[Any], Any] | None:
    """Return a function that page-locks a batch, or None without a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None

    def pin(batch: Any) -> Any:
        if isinstance(batch, dict):
            return {k: pin(v) for k, v in batch.items()}
        if isinstance(batch, tuple):
            return tuple(pin(v) for v in batch)
        return torch.from_numpy(np.asarray(batch, order="C")).pin_memory()

    return pin


Identity = Mapping[str, Any]


def require_same(saved: Identity, current: Identity) -> None:
    """Raise if a position was saved for other data or another order than the current ones.

    The order of an epoch depends on the data, the seed and the epoch only. A position, the epoch and the number of its
    samples that were read, means the same samples for any batch size, number of workers, of processes, and engine.
    """
    different = sorted(n for n in {**saved, **current} if saved.get(n) != current.get(n))
    if different:
        raise InputError(
            f"the position in the data belongs to other data: {', '.join(different)}",
            facts=[f"{n}: saved {saved.get(n)}, here {current.get(n)}" for n in different],
            hint="resume with the data, seed and order of the interrupted fit; to begin an epoch of other data, "
            "trainer.load(checkpoint) and fit without resume=",
        )
