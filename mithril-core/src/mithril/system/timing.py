"""Interleaved timing of alternatives, so that noise on the host affects all of them equally."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

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


K = TypeVar("K")
# Seconds. Longer calls are likely to be preempted; for shorter ones, reading the run-queue wait costs too much.
LONG = 1e-3
AGREEING = 0.75  # of the rounds, in which an alternative must be faster to count as faster


class Times(dict[K, float]):
    """The seconds per call of each alternative, with the times of all rounds."""

    rounds: dict[K, list[float]]

    def is_faster(self, one: K, other: K, margin: float) -> bool:
        """Whether one alternative takes less time than another by this fraction, and nearly all rounds agree."""
        limit = 1 - margin
        pairs = list(zip(self.rounds[one], self.rounds[other], strict=False))  # of the rounds that both ran in
        agreeing = sum(a < b for a, b in pairs)
        return self[one] < limit * self[other] and agreeing >= AGREEING * len(pairs)


def time_interleaved(
    calls: Mapping[K, Callable[[], Any]],
    synchronize: Callable[[Any], Any],
    *,
    seconds: float = 1.0,
    rounds: int = 5,
    hopeless: float = 1.5,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> Times[K]:
    """Return the seconds per call of each alternative, by default the median of all rounds.

    ``synchronize`` waits for the result of a call, as lazy backends only record operations. Long calls are timed
    without run-queue wait. An alternative whose fastest of three rounds is ``hopeless`` times slower than the best one
    is dropped. ``of`` reduces the times of all rounds.
    """
    times: dict[K, list[float]] = {name: [] for name in calls}
    racing = {name: _synchronized(call, synchronize) for name, call in calls.items()}
    for call in racing.values():
        call()  # warm up
    begin = time.perf_counter()
    clock = _clock(())
    while len(max(times.values(), key=len)) < rounds or time.perf_counter() - begin < seconds:
        for name, call in racing.items():
            times[name].append(clock(call))
        best = min(map(min, times.values()))
        for name in list(racing):
            # The fastest of three rounds, because interruptions only make rounds slower.
            if len(times[name]) >= 3 and min(times[name]) > hopeless * best:
                del racing[name]
        clock = _clock([max(min(t) for t in times.values())])
        # Minimal rounds of slow alternatives may take longer than the time that the caller gave; this
        # ends them.
        if time.perf_counter() - begin > 10 * seconds:
            break
    result = Times({name: of(t) for name, t in times.items()})
    result.rounds = times
    return result


def time_calls(call: Callable[[], Any], synchronize: Callable[[Any], Any], rounds: int) -> list[float]:
    """Return the seconds of each of a number of calls, as ``time_interleaved`` times them."""
    synchronized = _synchronized(call, synchronize)
    times: list[float] = []
    for _ in range(rounds):
        times.append(_clock(times)(synchronized))
    return times


def _clock(times: Sequence[float]) -> Callable[[Callable[[], Any]], float]:
    """Return the clock for calls of which some have been timed."""
    return _cpu_seconds if times and min(times) > LONG else _wall_seconds


def _synchronized(call: Callable[[], Any], synchronize: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: synchronize(call())


def _wall_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cpu_seconds(call: Callable[[], Any]) -> float:
    watch = Stopwatch()
    call()
    return watch.lap().cpu_seconds
