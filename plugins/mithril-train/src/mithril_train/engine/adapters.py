"""Adapters for loaders of other libraries: epochs, order and position."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from typing import Any

from mithril.base import InputError, OptionError
from mithril_train.data.loader import DataLoader
from mithril_train.engine.batches import LocalRows


class Loader:
    """Any iterable of batches. Its position is the number of batches read; resuming reads and discards as many."""

    def __init__(self, loader: Any, seed: int) -> None:
        self.loader, self.seed = loader, seed
        self.epoch = self.position = 0
        self._skip = 0

    def batches(self) -> Generator[Any, None, None]:
        """Yield the remaining batches of the epoch."""
        self.prepare()
        skip, self._skip = self._skip, 0
        for batch in islice(iter(self.loader), skip, None):
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def evaluation_batches(self) -> Iterator[Any]:
        """Yield all batches once, for evaluation, without changing the position of the loader."""
        return iter(self.loader)

    def prepare(self) -> None:
        """Set the order of the next epoch."""
        set_epoch = getattr(self.loader, "set_epoch", None) or getattr(
            getattr(self.loader, "sampler", None), "set_epoch", None
        )
        if set_epoch is not None:
            set_epoch(self.epoch)

    def count(self) -> int | None:
        """Return the number of batches of an epoch, if known."""
        try:
            return len(self.loader)
        except TypeError:
            return None

    def part(self) -> tuple[int, int] | None:
        """Return the process whose rows of each batch the loader reads, and the number of processes, if known."""
        return None

    def done(self) -> int:
        """Return the number of batches of this epoch already read."""
        return self.position

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def continues(self, state: Mapping[str, Any] | None) -> bool:
        """Whether the state is a position inside an epoch of such a loader."""
        return bool(state) and state.get("position", 0) > 0 and state.keys() == self.state().keys()  # type: ignore[union-attr]

    def close(self) -> None:
        """Release the resources of an unfinished epoch."""

    def load_state(self, state: Mapping[str, Any] | None, epoch: int) -> None:
        """Continue from a saved position, or from the beginning of an epoch without one."""
        self.epoch, self.position = (int(state["epoch"]), int(state["position"])) if state else (epoch, 0)
        self._skip = self.position


class MithrilLoader(Loader):
    """``ml.DataLoader``, which can resume in the middle of an epoch."""

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
        return int(self.loader.state_dict()["position"])

    def state(self) -> dict[str, Any]:
        return dict(self.loader.state_dict())

    def continues(self, state: Mapping[str, Any] | None) -> bool:
        return super().continues(state) and state is not None and state["seed"] == self.loader.seed

    def load_state(self, state: Mapping[str, Any] | None, epoch: int) -> None:
        position_now = self.loader.state_dict()
        if state is not None and "seed" not in state:
            raise OptionError(
                "the position in the data belongs to another kind of loader",
                facts=[f"saved: {dict(state)}"],
                hint="resume with the data of the interrupted fit",
            )
        self.loader.load_state_dict(
            state or {**position_now, "epoch": max(epoch, position_now["epoch"]), "position": 0}
        )


class TorchLoader(Loader):
    """``torch.utils.data.DataLoader``: each epoch's order comes from a generator seeded by seed and epoch."""

    def __init__(self, loader: Any, seed: int) -> None:
        super().__init__(loader, seed)
        import torch

        uses_global_generator = loader.generator is None and getattr(loader.sampler, "generator", None) is None
        self.generator = torch.Generator() if uses_global_generator else loader.generator or loader.sampler.generator
        if uses_global_generator and hasattr(loader.sampler, "generator"):
            loader.sampler.generator = self.generator

    def batches(self) -> Generator[Any, None, None]:
        with closing(super().batches()) as batches:
            yield from map(self._marked, batches)

    def evaluation_batches(self) -> Iterator[Any]:
        return map(self._marked, iter(self.loader))

    def _marked(self, batch: Any) -> Any:
        """Mark batches whose rows a sampler has divided over the processes."""
        kinds = {c.__name__ for c in type(self.loader.sampler).__mro__}
        return LocalRows(batch) if "DistributedSampler" in kinds else batch

    def prepare(self) -> None:
        super().prepare()
        self.generator.manual_seed((self.seed * 1_000_003 + self.epoch) & 0x7FFFFFFFFFFFFFFF)


class GrainLoader(Loader):
    """A Grain loader, whose iterators save and restore their state."""

    def __init__(self, loader: Any, seed: int) -> None:
        super().__init__(loader, seed)
        self._iterator: Any = None
        self._state: Any = None

    def batches(self) -> Generator[Any, None, None]:
        self._iterator = iter(self.loader)
        if self._state is not None:
            self._iterator.set_state(self._state)
            self._state = None
        for batch in self._iterator:
            self.position += 1
            yield batch
        self.epoch, self.position, self._iterator = self.epoch + 1, 0, None

    def state(self) -> dict[str, Any]:
        inner = self._iterator.get_state() if self._iterator is not None else None
        if isinstance(inner, bytes):
            inner = {"bytes": inner.decode("latin-1")}
        return {**super().state(), "grain": inner}

    def load_state(self, state: Mapping[str, Any] | None, epoch: int) -> None:
        super().load_state(state, epoch)
        inner = state.get("grain") if state else None
        self._state = inner["bytes"].encode("latin-1") if isinstance(inner, dict) and "bytes" in inner else inner


class Portions(Loader):
    """Epochs of ``size`` batches: each continues in the source where the previous one ended."""

    def __init__(self, source: Loader, size: int) -> None:
        super().__init__(source.loader, source.seed)
        self.source, self.size = source, size
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

    def count(self) -> int:
        return self.size

    def state(self) -> dict[str, Any]:
        return {**super().state(), "source": self.source.state()}

    def load_state(self, state: Mapping[str, Any] | None, epoch: int) -> None:
        super().load_state(state, epoch)
        self.close()
        self.source.load_state(state.get("source") if state else None, epoch)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None


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
    if not hasattr(loader, "__iter__"):
        raise InputError(f"a {type(loader).__name__} gives no batches", hint="ml.DataLoader(data, batch_size=32)")
    if iter(loader) is loader:
        raise InputError(
            "an iterator can be read only once, so that it has no epochs",
            hint="pass its source instead: a list, a loader, ml.DataLoader(generator_function)",
        )
    return Loader(loader, seed)
