"""Timing several ways to do the same in turns, so that a busy machine disturbs all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mithril.base.cpu_stopwatch import Stopwatch

K = TypeVar("K")
LONG = 1e-3  # seconds: what takes longer is likely to be interrupted; for less, looking for that would itself disturb


def in_turns(
    ways: Mapping[K, Callable[[], Any]],
    *,
    seconds: float = 1.0,
    rounds: int = 5,
    hopeless: float = 1.5,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[K, float]:
    """Seconds per call of each way, the median of all rounds or what ``of`` makes of them.

    Of long calls, what they waited for a processor is left out. A way that is ``hopeless`` times slower after three
    rounds is given up.
    """
    times: dict[K, list[float]] = {name: [] for name in ways}
    racing = dict(ways)
    for call in racing.values():
        call()  # what happens at a first call happens now
    begin = time.perf_counter()
    clock = _plain
    while len(max(times.values(), key=len)) < rounds or time.perf_counter() - begin < seconds:
        for name, call in racing.items():
            times[name].append(clock(call))
        best = min(statistics.median(t) for t in times.values())
        for name in list(racing):
            if len(times[name]) >= 3 and statistics.median(times[name]) > hopeless * best:
                del racing[name]
        clock = _undisturbed if max(min(t) for t in times.values()) > LONG else _plain
        if time.perf_counter() - begin > 10 * seconds:
            break
    return {name: of(t) for name, t in times.items()}


def _plain(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _undisturbed(call: Callable[[], Any]) -> float:
    watch = Stopwatch()
    call()
    return watch.lap().own
