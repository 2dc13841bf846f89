"""Seconds without those in which the system let others run: what a call costs, not how busy the machine is."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

THREADS = "/proc/self/task"


class Lap(NamedTuple):
    """Seconds by the clock; how many of these some thread was ready to run but had no processor; and on processors."""

    seconds: float
    waited: float
    worked: float

    @property
    def own(self) -> float:
        """Without the waiting, which is counted a little longer than the lap; but never less than was worked.

        What several threads work at once is no reason to tell more than the clock does.
        """
        return min(self.seconds, max(self.seconds - self.waited, self.worked))


class Stopwatch:
    """``lap()`` is the time since the stopwatch was made, or since the last lap."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._waited = waited()
        self._worked = time.process_time()
        self._start = time.perf_counter()

    def lap(self, seconds: float | None = None) -> Lap:
        """``seconds`` is given where somebody else has just looked at the clock."""
        seconds = time.perf_counter() - self._start if seconds is None else seconds
        worked = time.process_time() - self._worked
        made = Lap(seconds, waited() - self._waited, worked)
        self._restart()
        return made


def typical(laps: Sequence[Lap]) -> float:
    """The lower quartile: what else goes on in a machine makes calls slower, never faster."""
    return float(np.quantile([lap.own for lap in laps], 0.25))


def waited() -> float:
    """Seconds that all threads of this process have been ready to run, but did not; zero where nobody counts them."""
    total = 0
    try:
        for thread in os.listdir(THREADS):
            try:
                with open(f"{THREADS}/{thread}/schedstat", "rb") as file:
                    total += int(file.read().split()[1])
            except OSError:  # it has ended meanwhile
                continue
    except (OSError, ValueError, IndexError):
        return 0.0
    return total * 1e-9
