"""Processes of this machine that run a program together, started from any script, with or without a main guard."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from mithril.base import BackendError
from mithril_torch.parallel.shared_memory import Block
from mithril_torch.parallel.worker import Spec

START_SECONDS = 300.0  # importing PyTorch on a busy machine
_pools: dict[tuple[int, str], Pool] = {}


def pool(count: int, device: str) -> Pool:
    """The pool of so many processes, which all programs share."""
    found = _pools.get((count, device))
    if found is None or found.closed:
        found = _pools[count, device] = Pool(count, device)
    return found


class Pool:
    """``count`` processes. When one fails, all are ended, and the failure is an error here with its traceback."""

    def __init__(self, count: int, device: str) -> None:
        self.count = count
        self.device = device
        self.closed = False
        self.programs = 0
        self.folder = tempfile.mkdtemp(prefix="mithril-pool-")
        pairs = [socket.socketpair() for _ in range(count + 1)]
        theirs = [b.fileno() for _, b in pairs]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mithril_torch.parallel.fork_server", str(theirs[0]), self.folder, device]
            + [str(n) for n in theirs[1:]],
            pass_fds=theirs,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        for _, b in pairs:
            b.close()
        self.control = pairs[0][0]
        self.connections = [Connection(a.detach()) for a, _ in pairs[1:]]
        atexit.register(self.close)
        self._gather("starting", START_SECONDS)

    def ask(self, *message: Any) -> None:
        """Tell all processes something and wait until all have done it."""
        if self.closed:
            raise BackendError("the processes of this program have ended", hint="compile the model again")
        try:
            for connection in self.connections:
                connection.send(message)
        except OSError:
            pass  # the answer, or its absence, says more
        self._gather(message[0], None)

    def _gather(self, doing: str, seconds: float | None) -> None:
        waiting = dict(enumerate(self.connections))
        end = None if seconds is None else time.monotonic() + seconds
        while waiting:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = wait(list(waiting.values()), left)
            if not ready:
                self.close()
                raise BackendError(f"the processes did not answer within {seconds:.0f} seconds while {doing}")
            for rank in [k for k, c in waiting.items() if c in ready]:
                try:
                    word, text = waiting.pop(rank).recv()
                except (EOFError, OSError):
                    word, text = "failed", "it ended without a word: killed, perhaps for want of memory"
                if word == "failed":
                    self.close()
                    raise BackendError(f"process {rank} of {self.count} failed", facts=text.strip().splitlines()[-25:])

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self.close)
        self.control.close()  # their parent sees it, and kills them
        for connection in self.connections:
            connection.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


Seen = tuple[weakref.ref[torch.Tensor], int]  # a tensor, and how often it had been written into


def _seen(x: torch.Tensor) -> Seen:
    return weakref.ref(x), x._version


def _same(seen: Seen | None, x: torch.Tensor) -> bool:
    """Whether it is that tensor, and nobody has written into it since."""
    return seen is not None and seen[1] == x._version and seen[0]() is x


class PoolProgram:
    """A program that a pool runs. Arguments are whole tensors here, and so are results."""

    def __init__(self, spec: Spec, pool: Pool) -> None:
        self.spec = spec
        self.pool = pool
        self.number = pool.programs
        pool.programs += 1
        self.block, path = Block.create(spec)
        try:
            pool.ask("load", self.number, spec, str(path))
        finally:
            path.unlink()
        self.known: dict[str, Seen] = {}  # arguments that the processes have
        self.made: dict[str, Seen] = {}  # results that they have, of which a next call may make arguments
        weakref.finalize(self, _forget, pool, self.number)

    def __call__(
        self, params: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        given = {n: x for n, x in (*params.items(), *inputs.items()) if n in self.spec.splits}
        new = {n: x for n, x in given.items() if not _same(self.known.get(n), x)}
        kept = [n for n, x in new.items() if _same(self.made.get(n), x)]
        sent = [n for n in new if n not in kept]
        for name in sent:
            self.block.arrays[name].copy_(new[name].detach())
        self.pool.ask("run", self.number, sent, kept)
        self.known.update({name: _seen(x) for name, x in new.items()})
        device = next((x.device for x in given.values()), torch.device(self.pool.device))
        results = {name: self.block.arrays[f"result {name}"].to(device, copy=True) for name in self.spec.outputs}
        self.made = {name: _seen(x) for name, x in results.items() if self.spec.carries(name)}
        return results

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters as they are: the processes keep their parts, and are told when a tensor changes."""
        return dict(params)


def _forget(pool: Pool, number: int) -> None:
    if not pool.closed:
        pool.ask("forget", number)
