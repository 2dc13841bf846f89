"""Adapters for loaders of other libraries: epochs, order and position."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from typing import Any

from mithril.graph import InputError, OptionError
from mithril_train.data.loader import DataLoader, require_same
from mithril_train.engine.batches import LocalRows, size_of, without_first


class Loader:
    """Any iterable of batches. Its position is the number of samples read; resuming reads and discards as many."""

    def __init__(self, loader: Any, seed: int) -> None:
        self.loader, self.seed = loader, seed
        self.epoch = self.samples = 0
        self.world = 1  # processes, which may each read other rows
        self._skip = 0  # samples at the beginning of the next iteration
        self._read = 0  # batches of this epoch
        self._divided = False  # whether a batch of this epoch had the rows of this process only

    def batches(self) -> Generator[Any, None, None]:
        """Yield the remaining batches of the epoch; if batches had another size before, the first one is a part."""
        self.prepare()
        skip, self._skip, self._read, self._divided = self._skip, 0, 0, False
        with closing(self._marked_batches()) as marked:
            for batch in marked:
                size = self._samples_of(batch)
                self._read += 1
                if skip >= size > 0:
                    skip -= size
                    continue
                if skip:
                    batch = self._without(batch, skip)
                    size, skip = size - skip, 0
                self.samples += size
                yield batch
        if skip:
            raise InputError(
                f"the data has {skip} samples fewer than its epoch had when the position was saved",
                hint="resume with the data of the interrupted fit",
            )
        self.epoch, self.samples = self.epoch + 1, 0

    def _marked_batches(self) -> Generator[Any, None, None]:
        yield from map(self._marked, self.loader)

    def _marked(self, batch: Any) -> Any:
        """Mark batches that consist of the rows of this process."""
        return batch

    def _samples_of(self, batch: Any) -> int:
        """Return the number of samples of a batch, in all processes."""
        if not isinstance(batch, LocalRows):
            return size_of(batch)
        self._divided = True
        return size_of(batch.batch) * self.world

    def _without(self, batch: Any, count: int) -> Any:
        """Return a batch without its first samples."""
        if not isinstance(batch, LocalRows):
            return without_first(batch, count)
        if count % self.world:
            raise InputError(
                f"the position in the epoch, {self.samples} samples, cannot be divided over {self.world} processes",
                hint="resume with a number of processes that divides it, or from the end of an epoch",
            )
        return LocalRows(without_first(batch.batch, count // self.world))

    def evaluation_batches(self) -> Iterator[Any]:
        """Yield all batches once, for evaluation, without changing the position of the loader."""
        return map(self._marked, self.loader)

    def prepare(self) -> None:
        """Set the order of the next epoch."""
        set_epoch = getattr(self.loader, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)

    def count(self) -> int | None:
        """Return the number of batches of an epoch, if known."""
        try:
            return len(self.loader)
        # Of loaders over iterable data sets.
        except TypeError:
            return None

    def part(self) -> tuple[int, int] | None:
        """Return the process whose rows of each batch the loader reads, and the number of processes, if known."""
        return None

    def done(self) -> int:
        """Return the number of batches of this epoch already read, for progress bars."""
        return self._read

    def identity(self) -> dict[str, Any]:
        """Return the properties of the data and the order that a position depends on, as JSON."""
        if not isinstance(self.loader, list | tuple):
            return {"length": None}
        return {"length": sum(size_of(b.batch if isinstance(b, LocalRows) else b) for b in self.loader)}

    def state(self) -> dict[str, Any]:
        """Return the position. Rows that processes divide in their own way need the same number of processes."""
        return {
            "kind": type(self).__name__,
            "epoch": self.epoch,
            "samples": self.samples,
            "data": self._identity,
            "processes": self.world if self._divided and not self._divides_in_order() else None,
        }

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return self.identity()

    def _divides_in_order(self) -> bool:
        """Whether the rows of all processes together are a beginning of the epoch, for any number of processes."""
        return False

    def continues(self, state: Mapping[str, Any] | None) -> bool:
        """Whether the state is a position inside an epoch of the same data in the same order."""
        return state is not None and self._is_alike(state) and state["samples"] > 0

    def _is_alike(self, state: Mapping[str, Any]) -> bool:
        return bool(state["kind"] == type(self).__name__ and state["data"] == self._identity)

    def close(self) -> None:
        """Release the resources of an unfinished epoch."""

    def load_state(self, state: Mapping[str, Any] | None, epoch: int, world: int = 1) -> None:
        """Continue from a saved position, or from the beginning of an epoch without one."""
        self.world = world
        if state is None:
            self.epoch, self.samples = epoch, 0
        else:
            self._require(state)
            self.epoch, self.samples = int(state["epoch"]), int(state["samples"])
        self._skip = self.samples

    def _require(self, state: Mapping[str, Any]) -> None:
        """Raise if a position was saved by another kind of loader, or for other data."""
        if state["kind"] != type(self).__name__:
            raise OptionError(
                "the position in the data belongs to another kind of loader",
                facts=[f"saved by {state['kind']}, here {type(self).__name__}"],
                hint="resume with the kind of data and the steps_per_epoch of the interrupted fit; to begin an epoch, "
                "trainer.load(checkpoint) and fit without resume=",
            )
        require_same(state["data"], self._identity)
        if state["samples"] and state["processes"] not in (None, self.world):
            raise OptionError(
                "each process read rows of its own, and there are other processes now",
                facts=[f"processes: saved {state['processes']}, here {self.world}"],
                hint="ml.DataLoader(..., rank=rank, world=world) can continue with another number of processes",
            )


class MithrilLoader(Loader):
    """``ml.DataLoader``, which continues inside an epoch by itself."""

    loader: DataLoader

    def batches(self) -> Generator[Any, None, None]:
        with closing(iter(self.loader)) as batches:
            yield from map(self._marked, batches)

    def evaluation_batches(self) -> Iterator[Any]:
        return map(self._marked, self.loader.evaluation_batches())

    def _marked(self, batch: Any) -> Any:
        return LocalRows(batch) if self.loader.returned_own_rows else batch

    def part(self) -> tuple[int, int] | None:
        return (self.loader.rank, self.loader.world) if self.loader.world > 1 else None

    def done(self) -> int:
        return -(-int(self.loader.state_dict()["samples"]) // self.loader.batch_size)

    def identity(self) -> dict[str, Any]:
        return self.loader.identity()

    def state(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "processes": None, **self.loader.state_dict()}

    def load_state(self, state: Mapping[str, Any] | None, epoch: int, world: int = 1) -> None:
        if state is None:
            current = self.loader.state_dict()
            state = {**current, "epoch": max(epoch, current["epoch"]), "samples": 0}
        else:
            self._require(state)
        self.loader.load_state_dict(state)


class TorchLoader(Loader):
    """``torch.utils.data.DataLoader``: each epoch's order comes from generators seeded by seed and epoch."""

    def __init__(self, loader: Any, seed: int) -> None:
        super().__init__(loader, seed)
        import torch

        self.samplers: list[Any] = []
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        while sampler is not None and sampler not in self.samplers:
            self.samplers.append(sampler)
            sampler = getattr(sampler, "sampler", None)
        generator = torch.Generator()
        for sampler in self.samplers:
            if getattr(sampler, "generator", generator) is None:
                sampler.generator = generator
        owners = [loader, *self.samplers]
        self.generators = [x.generator for x in owners if getattr(x, "generator", None) is not None]

    @property
    def _distributed(self) -> Any:
        """The sampler that divides rows over processes, or None."""
        names = ({c.__name__ for c in type(s).__mro__} for s in self.samplers)
        return next((s for s, kinds in zip(self.samplers, names, strict=True) if "DistributedSampler" in kinds), None)

    def _marked(self, batch: Any) -> Any:
        return LocalRows(batch) if self._distributed is not None else batch

    def _divides_in_order(self) -> bool:
        return self._distributed is not None  # process k has the samples k, k + n, k + 2 n, ...

    def identity(self) -> dict[str, Any]:
        dataset = self.loader.dataset
        return {
            "length": len(dataset) if hasattr(dataset, "__len__") else None,
            "seed": self.seed,
            "samplers": [[type(s).__name__, getattr(s, "seed", None)] for s in self.samplers],
        }

    def prepare(self) -> None:
        super().prepare()
        for sampler in self.samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
        for generator in self.generators:
            generator.manual_seed((self.seed * 1_000_003 + self.epoch) & 0x7FFFFFFFFFFFFFFF)


class GrainLoader(Loader):
    """A Grain loader, whose iterators save and restore their state, which counts batches."""

    def __init__(self, loader: Any, seed: int) -> None:
        super().__init__(loader, seed)
        self._iterator: Any = None
        self._state: Any = None
        self._size = 0  # samples of a batch

    def batches(self) -> Generator[Any, None, None]:
        self._iterator = iter(self.loader)
        if self._state is not None:
            try:
                self._iterator.set_state(self._state)
            except ValueError as error:
                raise InputError(
                    f"grain cannot continue there: {error}", hint="keep the loader as it was until the epoch has ended"
                ) from None
            self._state = None
        for batch in self._iterator:
            size = size_of(batch)
            self._size = max(size, self._size)
            self.samples += size
            yield batch
        self.epoch, self.samples, self._iterator = self.epoch + 1, 0, None

    def state(self) -> dict[str, Any]:
        inner = self._iterator.get_state() if self._iterator is not None else None
        if isinstance(inner, bytes):
            inner = {"bytes": inner.decode("latin-1")}
        return {**super().state(), "grain": inner, "batch_size": self._size}

    def load_state(self, state: Mapping[str, Any] | None, epoch: int, world: int = 1) -> None:
        super().load_state(state, epoch, world)
        inner = state["grain"] if state else None
        if state and inner is not None:
            self._size = state["batch_size"]
            size = size_of(next(iter(self.loader)))
            if size != self._size:
                raise OptionError(
                    f"grain continues inside an epoch with batches of the same size: saved {self._size}, here {size}",
                    hint="keep the batch size until the epoch has ended, or resume from the end of an epoch",
                )
        self._state = inner["bytes"].encode("latin-1") if isinstance(inner, dict) and "bytes" in inner else inner


class Portions(Loader):
    """Epochs of ``size`` batches: each continues in the source where the previous one ended."""

    def __init__(self, source: Loader, size: int) -> None:
        super().__init__(source.loader, source.seed)
        self.source, self.size = source, size
        self.position = 0  # batches of this epoch
        self._batches: Generator[Any, None, None] | None = None

    def batches(self) -> Generator[Any, None, None]:
        restarted = False
        while self.position < self.size:
            if self._batches is None:
                self._batches = self.source.batches()
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
                if restarted:
                    return  # the source is empty
                restarted = True
                continue
            restarted = False
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def evaluation_batches(self) -> Iterator[Any]:
        return self.source.evaluation_batches()

    def part(self) -> tuple[int, int] | None:
        return self.source.part()

    def count(self) -> int:
        return self.size

    def done(self) -> int:
        return self.position

    def identity(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "batches": self.position, "source": self.source.state()}

    def continues(self, state: Mapping[str, Any] | None) -> bool:
        """Whether the state is a position inside an epoch of the source: epochs of portions end anywhere in it."""
        return state is not None and self._is_alike(state) and self.source.continues(state["source"])

    def load_state(self, state: Mapping[str, Any] | None, epoch: int, world: int = 1) -> None:
        super().load_state(state, epoch, world)
        self.close()
        self.position = state["batches"] if state else 0
        self.source.load_state(state["source"] if state else None, epoch, world)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None


class Batches:
    """The batches of a generator function, which each epoch calls."""

    def __init__(self, function: Callable[[], Iterator[Any]]) -> None:
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        return self.function()


def as_loader(loader: Iterable[Any], seed: int) -> Loader:
    """Return the adapter for a loader of any kind."""
    if isinstance(loader, Loader):
        return loader
    if isinstance(loader, DataLoader):
        return MithrilLoader(loader, seed)
    module = type(loader).__module__.split(".")[0]
    kinds = {c.__name__ for c in type(loader).__mro__ if c.__module__.startswith("torch.utils.data")}
    if "DataLoader" in kinds:
        return TorchLoader(loader, seed)
    if module == "grain":
        return GrainLoader(loader, seed)
    if inspect.isgeneratorfunction(loader):
        return Loader(Batches(loader), seed)
    if not hasattr(loader, "__iter__"):
        raise InputError(f"a {type(loader).__name__} gives no batches", hint="ml.DataLoader(data, batch_size=32)")
    if iter(loader) is loader:
        raise InputError(
            "an iterator can be read only once, so that it has no epochs",
            hint="pass its source instead: a list, a loader, or the generator function, without calling it",
        )
    return Loader(loader, seed)
