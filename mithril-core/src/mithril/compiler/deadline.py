"""The option ``timeout=`` of ``ml.compile``."""

from __future__ import annotations

import time
from typing import Any

from mithril.base import CompileTimeoutError


class Deadline:
    """A time limit, checked between steps and passes and, where supported, by an alarm signal."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.depth = 0
        self.end = 0.0

    def __enter__(self) -> None:
        self.depth += 1
        if self.seconds is not None and self.depth == 1:
            self.end = time.monotonic() + self.seconds
            self._alarm(self.seconds)

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1
        if self.seconds is not None and self.depth == 0:
            self._alarm(0)

    def check(self, where: str) -> None:
        if self.seconds is not None and self.depth and time.monotonic() > self.end:
            raise self._error(where)

    def _error(self, where: str) -> CompileTimeoutError:
        return CompileTimeoutError(
            f"Compilation timed out after {self.seconds:g} seconds",
            facts=[f"in {where}"] if where else [],
            hint="raise timeout=, lower optimization_level=, or compile a smaller part",
        )

    def _alarm(self, seconds: float) -> None:
        import signal
        import threading

        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            return

        def ring(number: int, frame: Any) -> None:
            raise self._error("")

        if seconds:
            self._before = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, seconds)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)
