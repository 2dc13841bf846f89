"""``MlxAutoTuner``: find the fastest of several functions by interleaved timing, verify and store the result."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mithril.backend import CheckedType
from mithril.graph import BackendError, InputError
from mithril.system import Store, fingerprint, read_measured, save_measured, time_interleaved
from mithril_mlx.mlx_loader import BLAS, mx
from mithril_mlx.utilities.tensor_cache import seconds
from mithril_tools.diff import relative_error

CHANGED = 0.5  # ratio to the stored best: a configuration faster than that starts a new search
MARGIN = 0.03  # fraction of the time: smaller gains are noise, and the first configuration stays


@dataclass
class Benchmark:
    """Result for one operation: seconds by configuration, and the reasons for those that ``failed``."""

    operation: str
    best: str
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    from_store: bool = False

    @property
    def speedup(self) -> float:
        """The speedup of the best over the first configuration, if both ran."""
        first = next(iter(self.seconds))
        return self.seconds[first] / self.seconds[self.best]


class MlxAutoTuner(metaclass=CheckedType):
    """Find the fastest configuration of an operation and store it across processes.

    Results are stored in ``store`` (a directory; True is the user's cache directory, False keeps them in memory) by
    operation, shapes and dtypes of the arrays, device and versions; if any of these changes, the operation is measured
    again. A result of another process is verified at its first use; if it is no longer valid, all configurations are
    measured again.
    """

    def __init__(self, store: Store | str | Path | bool = True) -> None:
        self._store = store if isinstance(store, Store) else None
        if not isinstance(store, (Store, bool)):
            self._store = Store(store)
        elif store is True:
            self._store = Store()
        self.results: dict[tuple[str, Hashable], Benchmark] = {}
        self._checked: set[tuple[str, Hashable]] = set()  # results measured or verified in this process

    def benchmark_operation(
        self,
        name: str,
        configs: Sequence[str],
        benchmark: Callable[[str], float | timedelta],
        *,
        arrays: Sequence[Any] = (),
        rounds: int = 3,
        anew: bool = False,
    ) -> str:
        """Return the configuration with the smallest ``benchmark(config)`` in seconds, measured interleaved.

        ``arrays`` are the operands of the operation: each combination of shapes and dtypes is tuned separately.
        ``anew`` measures again even if a result is stored.
        """

        def search(rounds: int = rounds) -> Benchmark:
            times: dict[str, list[float]] = {config: [] for config in configs}
            failed: dict[str, str] = {}
            for _ in range(rounds):
                for config in [c for c in times if c not in failed]:
                    try:
                        times[config].append(float(seconds(benchmark(config)) or 0.0))
                    except Exception as error:
                        failed[config] = f"{type(error).__name__}: {error}"
            medians = {c: statistics.median(t) for c, t in times.items() if c not in failed}
            return self._decided(name, medians, failed)

        return self._cached_or_search(name, configs, arrays, search, lambda: search(1), anew).best

    def tune(
        self,
        name: str,
        ways: Mapping[str, Callable[..., Any]],
        arrays: Sequence[Any] = (),
        *,
        seconds: float = 0.5,
        tolerance: float | None = 1e-4,
        anew: bool = False,
    ) -> Benchmark:
        """Time ``way(*arrays)`` for each candidate; only those with the results of the first can win.

        ``tolerance`` bounds the relative error; None accepts all results. Slow candidates are dropped early.
        """

        def search(seconds: float = seconds) -> Benchmark:
            failed: dict[str, str] = {}
            racing: dict[str, Callable[[], Any]] = {}
            reference = None
            mx.eval(arrays)
            for config, way in ways.items():
                try:
                    leaves = _leaves(way(*arrays))
                    if reference is None:
                        reference = leaves
                    elif tolerance is not None and (error := _max_relative_error(reference, leaves)) > tolerance:
                        failed[config] = f"its results differ by {error:.2g}"
                        continue
                    racing[config] = partial(way, *arrays)
                except Exception as error:
                    failed[config] = f"{type(error).__name__}: {error}"
            return self._decided(
                name, time_interleaved(racing, mx.eval, seconds=seconds, of=_quartile) if racing else {}, failed
            )

        return self._cached_or_search(name, list(ways), arrays, search, lambda: search(seconds / 10), anew)

    def get_optimal_config(self, name: str, arrays: Sequence[Any] = ()) -> str | None:
        """Return the stored result for these arrays, from this or an earlier process, or None."""
        kinds = _array_types(arrays)
        if (name, kinds) not in self.results:
            entry = self._read(name, kinds)
            if entry is None:
                return None
            self.results[name, kinds] = entry
        return self.results[name, kinds].best

    # -- keeping -----------------------------------------------------------------------------------------------------
    def _cached_or_search(
        self,
        name: str,
        configs: Sequence[str],
        arrays: Sequence[Any],
        search: Callable[[], Benchmark],
        look: Callable[[], Benchmark],
        anew: bool,
    ) -> Benchmark:
        """Return the stored result, or search. A result of another process is verified once, by a short ``look``."""
        if not configs:
            raise InputError(f"there is no configuration of '{name}' to choose from")
        kinds = _array_types(arrays)
        entry = None if anew else self._read(name, kinds)
        is_answer = entry is not None and set(configs) == {*entry.seconds, *entry.failed}
        if entry is not None and is_answer and ((name, kinds) in self._checked or self._still_holds(entry, look)):
            self._checked.add((name, kinds))
            self.results[name, kinds] = entry
            return entry
        result = self.results[name, kinds] = search()
        self._checked.add((name, kinds))
        if self._store is not None:
            data = {"best": result.best, "seconds": result.seconds, "failed": result.failed}
            save_measured(self._store, _key(name, kinds), data)
        return result

    def _read(self, name: str, kinds: Hashable) -> Benchmark | None:
        data: Any = read_measured(self._store, _key(name, kinds)) if self._store is not None else None
        try:
            times = {str(c): float(s) for c, s in data["seconds"].items()}
            benchmark = Benchmark(name, str(data["best"]), times, dict(data["failed"]), True)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return benchmark if benchmark.best in benchmark.seconds else None

    @staticmethod
    def _still_holds(benchmark: Benchmark, look: Callable[[], Benchmark]) -> bool:
        """Whether a stored result runs, and a short measurement finds no configuration that is twice as fast."""
        now = look().seconds
        return benchmark.best in now and min(now.values()) >= CHANGED * now[benchmark.best]

    @staticmethod
    def _decided(name: str, times: Mapping[str, float], failed: dict[str, str]) -> Benchmark:
        if not times:
            raise BackendError(
                f"no configuration of '{name}' could be run", facts=[f"{c}: {reason}" for c, reason in failed.items()]
            )
        best = min(times, key=lambda c: times[c])
        first = next(iter(times))
        if times[best] >= (1 - MARGIN) * times[first]:
            best = first
        return Benchmark(name, best, dict(times), failed)


def _key(name: str, kinds: Hashable) -> str:
    """Return a key of everything that the result depends on."""
    device = {k: v for k, v in mx.device_info().items() if k != "memory_size"}
    versions = [version("mlx"), version("mithril-mlx")]
    return fingerprint("mlx-tuner", name, kinds, str(mx.default_device()), device, str(BLAS), versions)


def _array_types(arrays: Sequence[Any]) -> Hashable:
    return tuple((tuple(np.shape(a)), str(getattr(a, "dtype", type(a).__name__))) for a in arrays)


def _quartile(times: Sequence[float]) -> float:
    return float(np.quantile(times, 0.25))


def _leaves(result: Any) -> list[np.ndarray[Any, Any]]:
    parts = result if isinstance(result, (list, tuple)) else [result]
    return [np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x) for x in parts]


def _max_relative_error(expected: list[np.ndarray[Any, Any]], actual: list[np.ndarray[Any, Any]]) -> float:
    if len(expected) != len(actual) or any(a.shape != b.shape for a, b in zip(expected, actual, strict=True)):
        return float("inf")
    return max(
        (
            float(relative_error(a.astype(np.float32), b.astype(np.float32)))
            for a, b in zip(expected, actual, strict=True)
        ),
        default=0.0,
    )
