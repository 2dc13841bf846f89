"""Interleaved timing of several variants, so that a noisy host disturbs all of them the same way."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(
    ways: Mapping[str, Callable[[], Any]],
    seconds: float = 1.0,
    min_rounds: int = 15,
    clock: Callable[[], float] = time.perf_counter,
    rest: float = 0.0,
) -> dict[str, float]:
    """Best seconds per call of each way; each round calls every way once, or often enough to be measurable.

    With ``clock=time.process_time`` CPU time counts, which other programs disturb less. ``rest``
    is waited, and one call made, before each way's turn: threads of others keep spinning for a while.
    """
    repeats = {}
    for name, call in ways.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, int(2e-4 / max(clock() - start, 1e-9)))
    best = dict.fromkeys(ways, float("inf"))
    gc.collect()
    gc.disable()
    try:
        begin, rounds = time.perf_counter(), 0
        while rounds < min_rounds or time.perf_counter() - begin < seconds:
            for name, call in ways.items():
                n = repeats[name]
                if rest:
                    time.sleep(rest)
                    call()
                start = clock()
                for _ in range(n):
                    call()
                best[name] = min(best[name], (clock() - start) / n)
            rounds += 1
    finally:
        gc.enable()
    return best


def table(title: str, rows: Mapping[str, Mapping[str, float]], base: str) -> None:
    """Microseconds of each way, and its ratio to ``base``."""
    names = list(next(iter(rows.values())))
    width = max(len(title), *(len(r) for r in rows))
    print(f"{title:<{width}}" + "".join(f"{n:>22}" for n in names))
    for row, seconds in rows.items():
        cells = "".join(f"{seconds[n] * 1e6:>12.1f} ({seconds[n] / seconds[base]:>6.2f}x)" for n in names)
        print(f"{row:<{width}}{cells}")
