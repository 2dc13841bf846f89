"""Stopwatch that excludes run-queue wait, so that timings do not depend on the load of the host."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

THREADS = "/proc/self/task"


class Lap(NamedTuple):
    """A measured interval: wall time, run-queue wait and CPU time of all threads, in seconds."""

    seconds: float
    run_queue_seconds: float
    process_seconds: float

    @property
    def cpu_seconds(self) -> float:
        """Wall time without run-queue wait.

        The wait is measured over a slightly longer interval, so the CPU time is a lower bound; the CPU time of parallel
        threads may exceed the wall time, which is the upper bound.
        """
        return min(self.seconds, max(self.seconds - self.run_queue_seconds, self.process_seconds))


class Stopwatch:
    """A stopwatch whose ``lap()`` returns the time since its creation or the last lap."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._run_queue_seconds = run_queue_seconds()
        self._process_seconds = time.process_time()
        self._start = time.perf_counter()

    def lap(self, seconds: float | None = None) -> Lap:
        """Return the interval since the last lap; ``seconds`` is its wall time if already measured."""
        seconds = time.perf_counter() - self._start if seconds is None else seconds
        process_seconds = time.process_time() - self._process_seconds
        lap = Lap(seconds, run_queue_seconds() - self._run_queue_seconds, process_seconds)
        self._restart()
        return lap


def lower_quartile(laps: Sequence[Lap]) -> float:
    """Return the lower quartile in seconds, since noise on the host only makes calls slower."""
    return float(np.quantile([lap.cpu_seconds for lap in laps], 0.25))


def run_queue_seconds() -> float:
    """Return the time that threads of this process were runnable but not running; 0 if the system does not count it."""
    total = 0
    try:
        for thread in os.listdir(THREADS):
            try:
                with open(f"{THREADS}/{thread}/schedstat", "rb") as file:
                    total += int(file.read().split()[1])
            except OSError:  # the thread has ended
                continue
    except (OSError, ValueError, IndexError):
        return 0.0
    return total * 1e-9
