"""Prefetching workers: threads, or spawned processes that pass arrays through shared memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import shared_memory
from typing import Any

import numpy as np

from mithril.graph import MithrilError

POLL = 0.5  # seconds between checks that the workers are alive
PATIENCE = 5.0  # seconds for a worker to finish its current batch


class WorkerError(MithrilError):
    """A worker failed; the message contains its traceback."""


def ahead(tasks: Iterator[Any], make: Callable[[Any], Any], workers: int, depth: int) -> Iterator[Any]:
    """Yield ``make(task)`` for every task, in order, computed by threads up to ``depth`` batches ahead."""
    todo: queue.Queue[Any] = queue.Queue()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            slot = todo.get()
            if slot is None:
                return
            task, done = slot
            try:
                done.append(("value", make(task)))
            except BaseException as error:
                # Exits, too: the reader would wait for the batch of a thread that has ended.
                done.append(("error", (error, traceback.format_exc())))
            done[0].set()

    threads = [threading.Thread(target=work, daemon=True, name=f"loader-{k}") for k in range(workers)]
    for thread in threads:
        thread.start()
    pending: list[list[Any]] = []
    try:
        exhausted = False
        while pending or not exhausted:
            while not exhausted and len(pending) < depth:
                try:
                    task = next(tasks)
                except StopIteration:
                    exhausted = True
                    break
                done: list[Any] = [threading.Event()]
                pending.append(done)
                todo.put((task, done))
            if not pending:
                break
            done = pending.pop(0)
            while not done[0].wait(POLL):
                if not any(t.is_alive() for t in threads):
                    raise WorkerError("all loader threads have died")
            kind, value = done[1]
            if kind == "error":
                error, text = value
                raise WorkerError("a loader worker failed", facts=text.splitlines()) from error
            yield value
    finally:
        stop.set()
        for _ in threads:
            todo.put(None)


class ProcessPool:
    """A pool of spawned workers. They end with the pool, with the parent process, and at Ctrl-C."""

    def __init__(self, fetch: Callable[[Any], Any], workers: int) -> None:
        # Not fork: threads and locks of frameworks do not survive it.
        context = multiprocessing.get_context("spawn")
        self.stop = context.Event()
        self.links: list[Any] = []
        self.processes: list[Any] = []
        for k in range(workers):
            parent_end, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, fetch, os.getpid(), self.stop), daemon=True, name=f"loader-{k}"
            )
            try:
                process.start()
            # pickle raises AttributeError for local functions, TypeError for locks and files.
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                self.close()
                raise WorkerError(
                    f"the data set cannot be sent to worker processes: {error}",
                    hint="define its class and functions at the top of a module, or use worker='thread'",
                ) from None
            # The worker's end must be open in the worker only, or the parent would never read the end of
            # a dead one.
            theirs.close()
            self.links.append(parent_end)
            self.processes.append(process)

    def ahead(self, tasks: Iterator[Any], depth: int) -> Iterator[Any]:
        """Yield batches in order; task k runs in worker k modulo the number of workers."""
        num_sent = received = 0
        exhausted = False
        count = len(self.links)
        while True:
            while not exhausted and num_sent - received < depth:
                try:
                    task = next(tasks)
                except StopIteration:
                    exhausted = True
                    break
                self._send(num_sent % count, task)
                num_sent += 1
            if received == num_sent:
                return
            yield self._receive(received % count)
            received += 1

    def _send(self, k: int, task: Any) -> None:
        try:
            self.links[k].send(task)
        except (BrokenPipeError, OSError):
            raise self._dead(k) from None

    def _receive(self, k: int) -> Any:
        link, process = self.links[k], self.processes[k]
        while not link.poll(POLL):
            # Asked again after its death: the worker may have written its last batch before.
            if not process.is_alive() and not link.poll(0):
                raise self._dead(k)
        try:
            kind, value = link.recv()
        except (EOFError, OSError):
            raise self._dead(k) from None
        if kind == "error":
            raise WorkerError("a loader worker failed", facts=value.splitlines())
        return unpack(value)

    def _dead(self, k: int) -> WorkerError:
        self.processes[k].join(1)
        code = self.processes[k].exitcode
        how = f"killed by signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        return WorkerError(
            f"loader worker {k} has died ({how})",
            hint="a script that starts worker processes needs 'if __name__ == \"__main__\":' around its main part",
        )

    def close(self) -> None:
        """Stop all workers and free their finished batches."""
        self.stop.set()
        for link in self.links:
            with suppress(OSError):
                link.send(None)  # wakes waiting workers
        end = time.monotonic() + PATIENCE
        for link, process in zip(self.links, self.processes, strict=True):
            while process.is_alive() and time.monotonic() < end:
                _drain(link)  # a full pipe would keep the worker from exiting
                process.join(0.01)
            if process.is_alive():
                process.terminate()
                process.join(PATIENCE)
            _drain(link)
            link.close()


def _drain(link: Any) -> None:
    """Free batches that will not be consumed."""
    with suppress(EOFError, OSError):
        while link.poll(0):
            kind, value = link.recv()
            if kind == "value":
                unpack(value)


def _serve(link: Any, fetch: Callable[[Any], Any], parent: int, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends the workers
    while True:
        while not link.poll(POLL):
            if os.getppid() != parent:
                return
        try:
            task = link.recv()
        except (EOFError, OSError):
            return
        if task is None or stop.is_set():
            return
        try:
            reply = "value", pack(fetch(task))
        except BaseException:
            reply = "error", traceback.format_exc()
        try:
            link.send(reply)
        except OSError:
            return  # the parent process has exited


SHARED = 1 << 14  # bytes; smaller arrays are sent through the pipe


def pack(batch: Any) -> Any:
    """Move the large arrays of the batch to shared memory."""
    if isinstance(batch, dict):
        return {k: pack(v) for k, v in batch.items()}
    if isinstance(batch, tuple):
        return tuple(pack(v) for v in batch)
    if isinstance(batch, np.ndarray) and batch.nbytes >= SHARED and batch.dtype != object:
        block = shared_memory.SharedMemory(create=True, size=batch.nbytes)
        np.ndarray(batch.shape, batch.dtype, block.buf)[...] = batch
        handle = _Handle(block.name, batch.shape, batch.dtype)
        block.close()
        return handle
    return batch


def unpack(packed: Any) -> Any:
    """Restore the batch as arrays of this process and free the shared blocks."""
    if isinstance(packed, dict):
        return {k: unpack(v) for k, v in packed.items()}
    if isinstance(packed, tuple):
        return tuple(unpack(v) for v in packed)
    if isinstance(packed, _Handle):
        block = shared_memory.SharedMemory(packed.name)
        try:
            # A copy, because the block is unlinked at once: a process that is killed later leaves nothing
            # in /dev/shm.
            return np.ndarray(packed.shape, packed.dtype, block.buf).copy()
        finally:
            block.close()
            block.unlink()
    return packed


class _Handle:
    """Location of an array in shared memory."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
