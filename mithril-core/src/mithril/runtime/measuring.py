"""Timing several ways to do the same in turns, so that a busy machine disturbs all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

K = TypeVar("K")


def in_turns(
    ways: Mapping[K, Callable[[], Any]],
    *,
    seconds: float = 1.0,
    rounds: int = 5,
    hopeless: float = 1.5,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[K, float]:
    """Seconds per call of each way, the median of all rounds or what ``of`` makes of them.

    A way that is ``hopeless`` times slower after three rounds is given up.
    """
    times: dict[K, list[float]] = {name: [] for name in ways}
    racing = dict(ways)
    for call in racing.values():
        call()  # what happens at a first call happens now
    begin = time.perf_counter()
    while len(max(times.values(), key=len)) < rounds or time.perf_counter() - begin < seconds:
        for name, call in racing.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        best = min(statistics.median(t) for t in times.values())
        for name in list(racing):
            if len(times[name]) >= 3 and min(times[name]) > hopeless * best:
                del racing[name]
        if time.perf_counter() - begin > 10 * seconds:
            break
    return {name: of(t) for name, t in times.items()}
