"""Pool of local processes that run one program, started from any script, with or without a main guard."""

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
    """Return the pool of ``count`` processes, which all programs share."""
    existing = _pools.get((count, device))
    if existing is None or existing.closed:
        existing = _pools[count, device] = Pool(count, device)
    return existing


class Pool:
    """``count`` worker processes. If one fails, all are killed, and its traceback is raised as a BackendError."""

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

    def request(self, *message: Any) -> None:
        """Send a message to all workers and wait until all have handled it."""
        if self.closed:
            raise BackendError("the worker processes of this program have exited", hint="compile the model again")
        try:
            for connection in self.connections:
                connection.send(message)
        except OSError:
            pass  # the reply, or its absence, is more informative
        self._gather(message[0], None)

    def _gather(self, activity: str, seconds: float | None) -> None:
        waiting = dict(enumerate(self.connections))
        end = None if seconds is None else time.monotonic() + seconds
        while waiting:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = wait(list(waiting.values()), left)
            if not ready:
                self.close()
                raise BackendError(f"the worker processes did not reply within {seconds:.0f} seconds while {activity}")
            for rank in [k for k, c in waiting.items() if c in ready]:
                try:
                    word, text = waiting.pop(rank).recv()
                except (EOFError, OSError):
                    word, text = "failed", "it exited without a message: killed, possibly out of memory"
                if word == "failed":
                    self.close()
                    raise BackendError(f"process {rank} of {self.count} failed", facts=text.strip().splitlines()[-25:])

    def close(self) -> None:
        """Stop all workers, even in the middle of a call."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self.close)
        self.control.close()  # the fork server detects this and kills the workers
        for connection in self.connections:
            connection.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


Version = tuple[weakref.ref[torch.Tensor], int]  # a tensor and its version counter


def _version(x: torch.Tensor) -> Version:
    return weakref.ref(x), x._version


def _is_unchanged(version: Version | None, x: torch.Tensor) -> bool:
    """Whether ``x`` is the recorded tensor and has not been modified since."""
    return version is not None and version[1] == x._version and version[0]() is x


class PoolProgram:
    """A program that a pool runs. Arguments and results are full tensors."""

    def __init__(self, spec: Spec, pool: Pool) -> None:
        self.spec = spec
        self.pool = pool
        self.number = pool.programs
        pool.programs += 1
        self.block, path = Block.create(spec)
        try:
            pool.request("load", self.number, spec, str(path))
        finally:
            path.unlink()
        self.versions: dict[str, Version] = {}  # arguments that the workers hold
        self.last_results: dict[str, Version] = {}  # results that the workers hold
        weakref.finalize(self, _forget, pool, self.number)

    def __call__(
        self, params: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        arguments = {n: x for n, x in (*params.items(), *inputs.items()) if n in self.spec.splits}
        new = {n: x for n, x in arguments.items() if not _is_unchanged(self.versions.get(n), x)}
        reused = [n for n, x in new.items() if _is_unchanged(self.last_results.get(n), x)]
        shared = [n for n in new if n not in reused]
        for name in shared:
            self.block.arrays[name].copy_(new[name].detach())
        self.pool.request("run", self.number, shared, reused)
        self.versions.update({name: _version(x) for name, x in new.items()})
        device = next((x.device for x in arguments.values()), torch.device(self.pool.device))
        results = {name: self.block.arrays[f"result {name}"].to(device, copy=True) for name in self.spec.outputs}
        self.last_results = {name: _version(x) for name, x in results.items() if self.spec.carries(name)}
        return results

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters unchanged: the workers hold their shards, and receive a tensor when it changes."""
        return dict(params)


def _forget(pool: Pool, number: int) -> None:
    if not pool.closed:
        pool.request("forget", number)
