"""A limit of processor time, so that every run of the kit ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Fail a block that computes for longer, in all threads; without a limit where the system has no such timer."""
    if not hasattr(signal, "SIGPROF") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        pytest.fail(
            f"the case took more than {seconds:g} seconds of the processor: find what the engine computes or compiles "
            "for so long, or set case_seconds of the class"
        )

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
