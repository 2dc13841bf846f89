"""A clock for tests of measurements: it shows the time that the test says has passed, on any machine and load."""

from __future__ import annotations

from typing import Any

from mithril.system import cpu_stopwatch, interleaved_timing

TICK = 20e-6  # seconds between two readings, so that limits of time are reached


class FakeClock:
    """Replaces ``time`` in mithril's stopwatches; only ``sleep`` and the reading itself let time pass."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now = 0.0
        for module in (cpu_stopwatch, interleaved_timing):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(cpu_stopwatch, "run_queue_seconds", lambda: 0.0)

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
