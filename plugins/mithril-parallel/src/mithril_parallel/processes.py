"""The processes of one program: their ranks, values that they agree on, and errors that name a missing process.

Processes exchange small values through the key-value store of the rendezvous (``torch.distributed`` or
``jax.distributed``), which works while devices compute and, unlike a collective, can tell which process is missing.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

from mithril.graph import BackendError, MithrilError
from mithril.system import launched_task, shared_attempt

TIMEOUT = 600.0  # seconds
PREFIX = "mithril"  # of the keys in the store of an engine
POLL = (0.001, 0.05)  # shortest and longest seconds between two looks at the store


class KeyValues(Protocol):
    """Texts by key that all processes of one attempt of a job share.

    Errors of the connection are RuntimeErrors of the engine.
    """

    def set(self, key: str, text: str, /) -> None: ...
    def get(self, key: str, /) -> str | None: ...
    def delete(self, key: str, /) -> None: ...


class TorchKeyValues:
    """The store of ``torch.distributed``."""

    def __init__(self) -> None:
        from torch.distributed import distributed_c10d

        self.prefix: str = PREFIX
        self.store: Any = distributed_c10d._get_default_store()

    def set(self, key: str, text: str) -> None:
        self.store.set(f"{self.prefix}/{key}", text)

    def get(self, key: str) -> str | None:
        key = f"{self.prefix}/{key}"
        # ``get`` alone waits for the key until the timeout of the store.
        return self.store.get(key).decode() if self.store.check([key]) else None

    def delete(self, key: str) -> None:
        self.store.delete_key(f"{self.prefix}/{key}")


class JaxKeyValues:
    """The coordination service of ``jax.distributed``."""

    def __init__(self) -> None:
        from jax._src import distributed  # JAX has no public name for it

        self.prefix: str = PREFIX
        self.store: Any = distributed.global_state.client

    def set(self, key: str, text: str) -> None:
        self.store.key_value_set(f"{self.prefix}/{key}", text, allow_overwrite=True)

    def get(self, key: str) -> str | None:
        try:
            text: str = self.store.key_value_try_get(f"{self.prefix}/{key}")
        except RuntimeError as error:
            # jaxlib has one class for all errors of the service; only the text tells an absent key from a
            # lost connection.
            if "NOT_FOUND" in str(error):
                return None
            raise
        return text

    def delete(self, key: str) -> None:
        self.store.key_value_delete(f"{self.prefix}/{key}")


class World:
    """The processes that run one program: ``rank`` of this one, ``size`` of all, and exchanges between them.

    All processes must call the methods in the same order. An exchange that takes longer than ``timeout`` seconds raises
    BackendError in every process that waits, which names those that are missing.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: KeyValues | None = None,
        *,
        local_rank: int = 0,
        timeout: float = TIMEOUT,
    ) -> None:
        self.rank, self.size, self.local_rank, self.timeout = rank, size, local_rank, timeout
        self.store = store
        self.waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext  # of the watchdog
        self._entries = 0  # calls of ``enter``
        self._rounds = itertools.count()  # since the last of them
        self._last_round: str | None = None
        self.numbers = itertools.count()  # for names that all processes choose in the same order

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size})"

    def exchange(self, value: Any, purpose: str) -> list[Any]:
        """Return the values of all processes by rank; ``purpose`` names them in errors."""
        if self.size == 1:
            return [value]
        key = f"round/{self._entries}/{next(self._rounds)}"
        with self.waiting(purpose):
            values = self.gather(key, {"purpose": purpose, "value": value}, purpose)
            if self.rank == 0 and self._last_round is not None:
                self._forget(self._last_round)  # all have read it, since all have sent their next value
            self._last_round = key
        purposes = {item["purpose"] for item in values}
        if len(purposes) > 1:
            raise BackendError(
                "the processes do not run the same program",
                facts=[f"process {k}: {item['purpose']}" for k, item in enumerate(values)],
                hint="every process must call fit, evaluate, save and load in the same order",
            )
        return [item["value"] for item in values]

    def gather(self, key: str, value: Any, purpose: str) -> list[Any]:
        """Return the values that all processes give for a key, which is used once; any thread may call it."""
        if self.size == 1:
            return [value]
        assert self.store is not None
        self._call(self.store.set, f"{key}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            return self._collect(key, purpose)
        # Process 0 names those that are missing first.
        answer = self._wait(f"{key}/all", self.timeout + 1.0, leaver=0)
        if answer is None:
            raise self.missing([0], purpose)
        result = json.loads(answer)
        if "missing" in result:
            raise self.missing(result["missing"], purpose)
        values: list[Any] = result["values"]
        return values

    def _collect(self, key: str, purpose: str) -> list[Any]:
        """Wait for the values of all processes and publish them together, so that each reads one key only."""
        assert self.store is not None
        end = time.monotonic() + self.timeout
        names = [f"{key}/{k}" for k in range(self.size)]
        texts = [self._wait(name, end - time.monotonic(), leaver=k) for k, name in enumerate(names)]
        absent = [k for k, text in enumerate(texts) if text is None]
        values = [json.loads(text) for text in texts if text is not None]
        self._call(self.store.set, f"{key}/all", json.dumps({"missing": absent} if absent else {"values": values}))
        if absent:
            raise self.missing(absent, purpose)
        return values

    def _forget(self, key: str) -> None:
        assert self.store is not None
        for name in (*range(self.size), "all"):
            self._call(self.store.delete, f"{key}/{name}")

    def agree(self, values: Mapping[str, Any], purpose: str) -> None:
        """Raise if the values differ between processes, with the values of each group of processes."""
        answers = self.exchange(dict(values), purpose)
        different = [n for n in values if any(answer.get(n) != values[n] for answer in answers)]
        if different:
            raise BackendError(
                f"the processes do not agree on {purpose}: {', '.join(different)}",
                facts=[f"{n}: {grouped([answer.get(n) for answer in answers])}" for n in different],
                hint="run the same script with the same options and data on every process",
            )

    def from_first(self, value: Any, purpose: str) -> Any:
        """Return the value of process 0."""
        return self.exchange(value if self.rank == 0 else None, purpose)[0]

    def barrier(self, purpose: str) -> None:
        """Wait for all processes."""
        self.exchange(None, purpose)

    # -- processes that end ------------------------------------------------------------------------------------------
    def enter(self) -> None:
        """Take part, also after an error: processes that it ended at different exchanges count from the same one."""
        self._entries += 1
        self._rounds = itertools.count()

    def leave(self, reason: str) -> None:
        """Tell the others why this process stops taking part; they then do not wait for it."""
        if self.store is not None and self.size > 1:
            try:
                self.store.set(f"left/{self._entries}/{self.rank}", reason)
            except (RuntimeError, OSError):
                return  # without a connection the others notice by themselves

    def finish(self, purpose: str) -> None:
        """Let process 0 wait until the others need it no more; each process calls it when it is about to end.

        The store ends with process 0, while others may still read an answer that process 0 gave. One that does not
        call it delays the end, but raises nothing.
        """
        if self.size == 1 or self.store is None:
            return
        key = f"finished/{self._entries}"
        with self.waiting(purpose), suppress(BackendError):
            if self.rank > 0:
                self._call(self.store.set, f"{key}/{self.rank}", "finished")
                return
            end = time.monotonic() + self.timeout
            for k in range(1, self.size):
                self._wait(f"{key}/{k}", end - time.monotonic(), leaver=k)

    def missing(self, ranks: Sequence[int], purpose: str) -> BackendError:
        """Return the error that names the processes that did not arrive."""
        facts = [f"this is process {self.rank} of {self.size}"]
        for k in ranks:
            reason = self.reason(k)
            facts.append(
                f"process {k} ended: {reason}" if reason else f"process {k} did not answer for {self.timeout:g} s"
            )
        return BackendError(
            f"{named(ranks)} did not arrive at: {purpose}",
            facts=facts,
            hint=f"read the output of {named(ranks)}; Trainer(timeout=...) sets the time to wait",
        )

    def reason(self, rank: int) -> str | None:
        """Return the error with which a process has left, or None."""
        try:
            return self.store.get(f"left/{self._entries}/{rank}") if self.store is not None else None
        except (RuntimeError, OSError):
            return None

    def _wait(self, key: str, seconds: float, leaver: int | None = None) -> str | None:
        """Return the text of a key, or None if it does not appear in time, or process ``leaver`` has ended."""
        assert self.store is not None
        end, pause = time.monotonic() + seconds, POLL[0]
        while True:
            text = self._call(self.store.get, key)
            if text is not None:
                return str(text)
            if time.monotonic() >= end or (leaver is not None and pause == POLL[1] and self.reason(leaver)):
                return None
            time.sleep(pause)
            pause = min(2 * pause, POLL[1])

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (RuntimeError, OSError) as error:
            if isinstance(error, MithrilError):
                raise
            raise BackendError(
                "process 0, through which the processes exchange messages, is not reachable",
                facts=[str(error).splitlines()[0], f"this is process {self.rank} of {self.size}"],
                hint="read the output of process 0 and of the launcher",
            ) from error


def named(ranks: Sequence[int]) -> str:
    """Return the name of some processes: ``process 1``, ``processes 1, 2``."""
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def grouped(values: Sequence[Any]) -> str:
    """Describe values by rank, equal ones together."""
    ranks: dict[str, list[int]] = {}
    for k, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(k)
    return "; ".join(f"{named(group)}: {text}" for text, group in ranks.items())


# -- the processes of this program ---------------------------------------------------------------------------------
_worlds: dict[int, World] = {}  # by the id of the engine's store


def current_world(timeout: float = TIMEOUT) -> World:
    """Return the processes of ``torch.distributed`` or ``jax.distributed``; without either this one alone.

    All processes must call it: the first call selects the keys of this attempt of the job.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        distributed = torch.distributed
        return _known(TorchKeyValues(), distributed.get_rank(), distributed.get_world_size(), timeout)
    if jax is not None and jax.distributed.is_initialized():
        return _known(JaxKeyValues(), jax.process_index(), jax.process_count(), timeout)
    return World()


def _known(store: TorchKeyValues | JaxKeyValues, rank: int, size: int, timeout: float) -> World:
    """Return one object per group of processes, since it counts the exchanges."""
    if size == 1:
        return World()
    world = _worlds.get(id(store.store))
    if world is None:
        task = launched_task()
        world = World(rank, size, store, local_rank=rank if task is None else task.local_rank)
        attempt = world._call(shared_attempt, rank, size, store.set, store.get, timeout)
        store.prefix = f"{PREFIX}/{attempt}"  # the store may have keys of an attempt before a restart
        _worlds[id(store.store)] = world
    world.timeout = timeout
    return world
