"""The option ``timeout=`` of ``ml.compile``."""

from __future__ import annotations

import sys
import time
from types import FrameType

from mithril.base import CompileTimeoutError
from mithril.compiler.plugin_watch import PluginWatch

AGAIN = 0.05  # seconds until an alarm that could not stop the compilation rings again


class Deadline:
    """A time limit, checked between steps and passes and, where supported, by an alarm signal.

    Plugins that run for more than ``patience`` seconds are named while they run.
    """

    def __init__(self, seconds: float | None, patience: float | None = None) -> None:
        self.seconds = seconds
        self.depth = 0
        self.end = 0.0
        self.watch = PluginWatch(patience, seconds)

    def __enter__(self) -> Deadline:
        self.depth += 1
        if self.depth == 1:
            self.watch.start()
            if self.seconds is not None:
                self.end = time.monotonic() + self.seconds
                self._alarm(self.seconds)
        return self

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.watch.stop()
            if self.seconds is not None:
                self._alarm(0)

    def check(self, where: str) -> None:
        if self.seconds is not None and self.depth and time.monotonic() > self.end:
            raise self._error(f"in {where}", *self.watch.describe())

    def _error(self, *facts: str) -> CompileTimeoutError:
        return CompileTimeoutError(
            f"Compilation timed out after {self.seconds:g} seconds",
            facts=facts,
            hint="raise timeout=, lower optimization_level=, or compile a smaller part",
        )

    def _alarm(self, seconds: float) -> None:
        import signal
        import threading

        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            return

        def ring(number: int, frame: FrameType | None) -> None:
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
            if not _is_finalizer(frame) and not isinstance(sys.exception(), CompileTimeoutError):
                raise self._error(*self.watch.describe(frame))

        if seconds:
            self._before = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, seconds)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)


def _is_finalizer(frame: FrameType | None) -> bool:
    """Return whether ``frame`` runs in a finalizer, where Python prints and drops an exception."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") in ("weakref", "_weakrefset"):
            return True
        frame = frame.f_back
    return False
