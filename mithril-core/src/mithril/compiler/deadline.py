"""The option ``timeout=`` of ``ml.compile``."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

from mithril.compiler.plugin_watch import PluginWatch
from mithril.graph import CompileTimeoutError

AGAIN = 0.05  # seconds until an alarm that could not stop the compilation rings again


class Deadline:
    """A time limit, checked between steps and passes and, where supported, by an alarm signal."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.depth = 0
        self.end = 0.0
        self.watch: PluginWatch | None = None

    def __enter__(self) -> Deadline:
        self.depth += 1
        if self.depth == 1:
            if self.seconds is not None:
                self.end = time.monotonic() + self.seconds
                self._alarm(self.seconds)
            if self.watch is not None:
                self.watch.start()
        return self

    def watch_plugins(self, patience: float | None, timeout: float | None) -> None:
        """Name plugins that run for more than ``patience`` seconds, now that they are imported."""
        self.watch = PluginWatch(patience, timeout)
        self.watch.start()

    def _running(self, frame: FrameType | None = None) -> list[str]:
        return [] if self.watch is None else self.watch.describe(frame)

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self.depth -= 1
        if self.depth == 0:
            if isinstance(error, KeyboardInterrupt) and trace is not None:
                *_, (frame, _) = traceback.walk_tb(trace)
                for fact in self._running(frame):
                    error.add_note(fact)
            if self.seconds is not None:
                self._alarm(0)
            if self.watch is not None:
                self.watch.stop()

    def check(self, where: str) -> None:
        if self.seconds is not None and self.depth and time.monotonic() > self.end:
            raise self._error(f"in {where}", *self._running())

    def _error(self, *facts: str) -> CompileTimeoutError:
        return CompileTimeoutError(
            f"Compilation timed out after {self.seconds:g} seconds",
            facts=facts,
            hint="raise timeout=, lower optimization_level=, or compile a smaller part",
        )

    def _alarm(self, seconds: float) -> None:
        import signal
        import threading

        # Windows has no such timer, and Python sets and runs handlers in the main thread only;
        # ``check`` remains.
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            return

        def ring(number: int, frame: FrameType | None) -> None:
            if not self.depth:  # it rang while the alarm was switched off
                return
            # Before the error is raised: where it is dropped, as by a finalizer, the next ring raises it
            # (8874ed69).
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
            if not _cannot_raise(frame) and not isinstance(sys.exception(), CompileTimeoutError):
                raise self._error(*self._running(frame))

        if seconds:
            self._before = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, seconds)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)


def time_limit(arguments: Mapping[str, Any]) -> float | None:
    """Return ``timeout=`` before ``resolve_options`` imports plugins; None for values that it refuses."""
    value = arguments.get("timeout")
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def _cannot_raise(frame: FrameType | None) -> bool:
    """Return whether ``frame`` runs in a finalizer, where Python drops exceptions, or while an alarm is set."""
    modules = ("weakref", "_weakrefset", __name__)
    callbacks = [getattr(function, "__code__", None) for function in gc.callbacks]
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code in callbacks or frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False
