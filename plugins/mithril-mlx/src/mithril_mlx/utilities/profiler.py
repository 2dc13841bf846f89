"""``MlxProfiler``: timing of operations despite MLX's lazy evaluation."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mithril as ml
from mithril.backend import CheckedType
from mithril.graph import InputError
from mithril_mlx.mlx_loader import mx
from mithril_tools.profile import Breakdown, ProfileStats
from mithril_tools.trace_events import Recorder

PERCENTILES = (50, 90, 99)


class OperationStats(NamedTuple):
    """``average, (fastest, slowest), runs``, in seconds."""

    average: float
    range: tuple[float, float]
    runs: int


@dataclass(slots=True)
class _Running:
    name: str
    start: float
    memory: int
    flops: int
    bytes: int
    results: Any = None

    def waits(self, result: Any) -> Any:
        """Include a result in the timed operation: it is evaluated before the clock stops."""
        self.results = result if self.results is None else [self.results, result]
        return result


class MlxProfiler(metaclass=CheckedType):
    """Timer of operations between ``start_operation`` and ``end_operation(result)``, which evaluates the result first.

    Without a result, ``end_operation()`` evaluates the arrays among the caller's variables: otherwise MLX would only
    have recorded the operation, and the measured time would be that of recording.

    Operations can be nested. Pass ``flops`` and ``bytes`` to obtain rates; ``execution_breakdown`` lists them, and
    ``write`` writes a trace for Perfetto.
    """

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._running: list[_Running] = []

    # -- measuring ---------------------------------------------------------------------------------------------------
    def start_operation(self, name: str, *, flops: int = 0, bytes: int = 0) -> None:
        """Start the clock after evaluating the arrays among the caller's variables and all pending results."""
        mx.eval(_arrays_in_scope())
        mx.synchronize()
        self._start(name, flops, bytes)

    def _start(self, name: str, flops: int, bytes: int) -> _Running:
        memory = mx.get_active_memory()
        self._running.append(_Running(name, time.perf_counter(), memory, flops, bytes))
        return self._running[-1]

    def end_operation(self, *results: Any) -> float:
        """Evaluate ``results`` and return the seconds since the operation began.

        Without results, the arrays among the caller's variables are evaluated. If there are none, the time is that of
        the operations that were evaluated in this period, with a warning.
        """
        if not self._running:
            raise InputError("no operation is running", hint="profiler.start_operation(name) comes before")
        running = self._running.pop()
        computed: Any = (results, running.results)
        if not results and running.results is None:
            computed = _arrays_in_scope()
            if not computed:
                warnings.warn(
                    f"'{running.name}': end_operation() found no array to compute; operations that MLX has only "
                    "noted are not timed. Pass the result: end_operation(result)",
                    stacklevel=2,
                )
        mx.eval(computed)
        mx.synchronize()
        seconds = time.perf_counter() - running.start
        info: dict[str, Any] = {"memory": mx.get_active_memory() - running.memory}
        if running.flops:
            info["flops"] = running.flops
        if running.bytes:
            info["bytes"] = running.bytes
        self.recorder.add("run", running.name, running.start, seconds, "", "operation", **info)
        return seconds

    @contextmanager
    def operation(self, name: str, *, flops: int = 0, bytes: int = 0) -> Iterator[_Running]:
        """Time a block: ``with profiler.operation("matmul") as op: y = op.waits(a @ b)``; exceptions discard it."""
        mx.eval(_arrays_in_scope())
        mx.synchronize()
        running = self._start(name, flops, bytes)
        try:
            yield running
        except BaseException:
            self._running.remove(running)
            raise
        self.end_operation()

    def run(self, name: str, function: Callable[..., Any], *arrays: Any, flops: int = 0) -> Any:
        """Return ``function(*arrays)``, evaluated and timed; the arrays are evaluated and counted first."""
        mx.eval(arrays)
        with self.operation(name, flops=flops) as running:
            result = running.waits(function(*arrays))
            mx.eval(result)
            running.bytes = _bytes(arrays) + _bytes(result)
        return result

    def profile(self, compiled: Any, params: Mapping[str, Any], inputs: Mapping[str, Any], runs: int = 1) -> Any:
        """Run a compiled model, time each of its operations by layer, and return the outputs.

        Whole calls are timed as well. Running operation by operation takes longer than a whole call, because each is
        synchronized.
        """
        result = None
        with ml.profile() as recording:
            for _ in range(runs):
                result = compiled.evaluate(params, inputs)
        self.recorder.events += recording.recorder.events
        return result

    # -- what was measured -------------------------------------------------------------------------------------------
    def get_average_time(self, name: str) -> float | None:
        """Return the mean seconds of an operation, or None if it never ran."""
        times = self._times().get(name)
        return float(np.mean(times)) if times else None

    def get_all_stats(self) -> dict[str, OperationStats]:
        """Return ``(average, (fastest, slowest), runs)`` by name, ``layer: operation`` for models."""
        return {
            name: OperationStats(float(np.mean(times)), (min(times), max(times)), len(times))
            for name, times in self._times().items()
        }

    def percentiles(self, name: str, which: tuple[float, ...] = PERCENTILES) -> dict[float, float]:
        """Return percentiles of the seconds of an operation."""
        times = self._times().get(name)
        if not times:
            raise InputError(f"no operation '{name}' was measured", facts=[f"measured: {', '.join(self._times())}"])
        return dict(zip(which, map(float, np.percentile(times, which)), strict=True))

    @property
    def execution_breakdown(self) -> Breakdown:
        """Calls, times, FLOP/s and bytes/s of each operation; prints as a table."""
        return ProfileStats(self.recorder).execution_breakdown

    @property
    def call_seconds(self) -> float:
        """Median of whole calls of compiled models."""
        return ProfileStats(self.recorder).call_seconds

    def write(self, path: str | Path) -> None:
        """Write a Chrome trace with nested operations."""
        self.recorder.write(path)

    def reset(self) -> None:
        """Discard all measurements."""
        self.recorder = Recorder()

    def _times(self) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {}
        for event in self.recorder.of("run", "operation"):
            name = f"{event.layer}: {event.name}" if event.layer else event.name
            seconds.setdefault(name, []).append(event.seconds)
        return seconds

    def __str__(self) -> str:
        return str(self.execution_breakdown)


def _arrays_in_scope() -> list[mx.array]:
    """Return the arrays among the variables of the first caller outside of this file, containers included."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, contextlib.__file__):
        frame = frame.f_back
    return list(_arrays(frame.f_locals))


def _arrays(x: Any) -> Iterator[mx.array]:
    if isinstance(x, mx.array):
        yield x
    elif type(x) in (dict, list, tuple):
        for part in list(x.values()) if isinstance(x, dict) else x:
            yield from _arrays(part)


def _bytes(arrays: Any) -> int:
    if isinstance(arrays, mx.array):
        return int(arrays.nbytes)
    parts = arrays.values() if isinstance(arrays, Mapping) else arrays if isinstance(arrays, (list, tuple)) else ()
    return sum(map(_bytes, parts))
