"""A clock for tests of measurements: it shows the time that the test says has passed, on any machine and load."""

from __future__ import annotations

import sys
from typing import Any

from mithril.system import Stopwatch, time_interleaved

TICK = 20e-6  # seconds between two readings, so that limits of time are reached


class FakeClock:
    """Replaces ``time`` in mithril's stopwatches; only ``sleep`` and the reading itself let time pass."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now = 0.0
        for stopwatch in (Stopwatch, time_interleaved):
            monkeypatch.setattr(sys.modules[stopwatch.__module__], "time", self)
        monkeypatch.setattr(sys.modules[Stopwatch.__module__], "run_queue_seconds", lambda: 0.0)

    def perf_counter(self) -> float:
        """Return the seconds so far."""
        self.now += TICK
        return self.now

    def process_time(self) -> float:
        """Return the processor time so far: none, as all the time was slept."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Let time pass without waiting."""
        self.now += seconds
