"""Calls into ggml that survive its assertions.

A failed assertion in ggml ends the process. The only way out is not to return from the callback that it makes first:
guarded calls run on a thread of their own, and where one fails, the thread is left standing in the callback for ever
while the caller continues with an error. Each failure leaks one thread and one incomplete graph.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from mithril.graph import BackendError
from mithril_ggml.library.library import ggml


class _Job:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()


class _Worker:
    """One thread that does jobs until one of them fails an assertion."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.current: _Job | None = None
        self.thread = threading.Thread(target=self._loop, name="mithril-ggml-guard", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        while True:
            job = self.jobs.get()
            self.current = job
            try:
                job.result = job.work()
            except BaseException as error:  # handed to the caller, whatever it is
                job.error = error
            self.current = None
            job.done.set()


class _Guard:
    """The worker in use; a new one after each failure."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.worker: _Worker | None = None


_guard = _Guard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard.__init__)  # type: ignore[misc]  # threads do not come along


def guarded(work: Callable[[], Any]) -> Any:
    """Return the result of ``work()``; a failed assertion of ggml raises BackendError."""
    # Guarded work may make guarded calls itself; waiting for its own thread would be a deadlock.
    if _guard.worker is not None and threading.current_thread() is _guard.worker.thread:
        return work()
    # One guarded call at a time: the callback has no argument that would tell which call has failed.
    with _guard.lock:
        if _guard.worker is None:
            _guard.worker = _Worker()
        job = _Job(work)
        _guard.worker.jobs.put(job)
        job.done.wait()
        if isinstance(job.error, _AssertionFailed):
            # Its thread stays in the callback for ever, so that the next call needs another one.
            _guard.worker = None
            raise BackendError(
                "ggml refused this graph",
                facts=[str(job.error)],
                hint="a check of mithril-ggml is missing: please report this graph",
            )
    if job.error is not None:
        raise job.error
    return job.result


class _AssertionFailed(Exception):
    pass


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)  # type: ignore[untyped-decorator]
def _on_abort(message: bytes) -> None:
    """Called by ggml before it ends the process, on the thread that failed: a guarded one or one of its helpers."""
    worker = _guard.worker
    job = worker.current if worker is not None else None
    if job is None:
        return  # no caller is waiting: let the process end with ggml's message
    job.error = _AssertionFailed(message.decode("utf-8", "replace").strip())
    job.done.set()
    threading.Event().wait()


ggml.ggml_set_abort_callback(_on_abort)
