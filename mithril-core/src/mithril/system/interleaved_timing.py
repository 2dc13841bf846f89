"""Interleaved timing of alternatives, so that noise on the host affects all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mithril.system.cpu_stopwatch import Stopwatch

K = TypeVar("K")
# Seconds. Longer calls are likely to be preempted; for shorter ones, reading the run-queue wait costs too much.
LONG = 1e-3


def time_interleaved(
    calls: Mapping[K, Callable[[], Any]],
    *,
    seconds: float = 1.0,
    rounds: int = 5,
    hopeless: float = 1.5,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[K, float]:
    """Return the seconds per call of each alternative, by default the median of all rounds.

    Long calls are timed without run-queue wait. An alternative that is ``hopeless`` times slower than the best after
    three rounds is dropped. ``of`` reduces the times of all rounds.
    """
    times: dict[K, list[float]] = {name: [] for name in calls}
    racing = dict(calls)
    for call in racing.values():
        call()  # warm up
    begin = time.perf_counter()
    clock = _wall_seconds
    while len(max(times.values(), key=len)) < rounds or time.perf_counter() - begin < seconds:
        for name, call in racing.items():
            times[name].append(clock(call))
        best = min(statistics.median(t) for t in times.values())
        for name in list(racing):
            if len(times[name]) >= 3 and statistics.median(times[name]) > hopeless * best:
                del racing[name]
        clock = _cpu_seconds if max(min(t) for t in times.values()) > LONG else _wall_seconds
        if time.perf_counter() - begin > 10 * seconds:
            break
    return {name: of(t) for name, t in times.items()}


def _wall_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cpu_seconds(call: Callable[[], Any]) -> float:
    watch = Stopwatch()
    call()
    return watch.lap().cpu_seconds
