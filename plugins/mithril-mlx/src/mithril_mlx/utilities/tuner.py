"""``MlxAutoTuner``: which of several ways is fastest, measured in turns, checked for equal results, and remembered."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mithril.base.disk_cache import Store
from mithril.base.errors import BackendError, InputError
from mithril.base.fingerprint import fingerprint
from mithril.base.interleaved_timing import in_turns
from mithril_mlx.mlx_loader import BLAS, mx
from mithril_mlx.utilities.tensor_cache import seconds
from mithril_tools.diff import relative_error

CHANGED = 0.5  # of the stored best: a configuration faster than that starts a new search
MARGIN = 0.03  # of the time: smaller gains are noise, and the first configuration stays


@dataclass
class Benchmark:
    """What was found for one operation: seconds of what ran, and why the rest ``failed``."""

    operation: str
    best: str
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    from_store: bool = False

    @property
    def speedup(self) -> float:
        """Of the best over the first configuration, where both ran."""
        first = next(iter(self.seconds))
        return self.seconds[first] / self.seconds[self.best]


class MlxAutoTuner:
    """Finds the fastest configuration of an operation, and finds it again in the next process.

    Results lie in ``store`` (a folder; True is the user's cache folder, False keeps them in memory), by operation,
    arrays' shapes and dtypes, device and versions: where one of these changes, it is measured anew. An answer from
    another process is looked at again at its first use: where it no longer holds, all is measured anew.
    """

    def __init__(self, store: Store | str | Path | bool = True) -> None:
        self._store = store if isinstance(store, Store) else None
        if not isinstance(store, (Store, bool)):
            self._store = Store(store)
        elif store is True:
            self._store = Store()
        self.results: dict[tuple[str, Hashable], Benchmark] = {}
        self._checked: set[tuple[str, Hashable]] = set()  # answers measured, or looked at again, in this process

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
        """The configuration for which ``benchmark(config)``, asked in turns, tells the smallest time in seconds.

        ``arrays`` are those that the operation works on: each set of shapes and dtypes is a question of its own.
        ``anew`` measures although the answer is known.
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

        return self._known_or(name, configs, arrays, search, lambda: search(1), anew).best

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
        """Time ``way(*arrays)`` of each way, the default first. Only ways with the first one's results can win.

        ``tolerance`` bounds the relative error; None lets every result pass. Slow ways are given up early.
        """

        def search(seconds: float = seconds) -> Benchmark:
            failed: dict[str, str] = {}
            racing: dict[str, Callable[[], Any]] = {}
            reference = None
            mx.eval(arrays)
            for config, way in ways.items():
                try:
                    made = _leaves(way(*arrays))
                    if reference is None:
                        reference = made
                    elif tolerance is not None and (error := _apart(reference, made)) > tolerance:
                        failed[config] = f"its results differ by {error:.2g}"
                        continue
                    racing[config] = _waited(way, arrays)
                except Exception as error:
                    failed[config] = f"{type(error).__name__}: {error}"
            return self._decided(name, in_turns(racing, seconds=seconds, of=_quartile) if racing else {}, failed)

        return self._known_or(name, list(ways), arrays, search, lambda: search(seconds / 10), anew)

    def get_optimal_config(self, name: str, arrays: Sequence[Any] = ()) -> str | None:
        """What was found for these arrays, in this process or an earlier one; None where nothing is known."""
        kinds = _kinds(arrays)
        if (name, kinds) not in self.results:
            kept = self._read(name, kinds)
            if kept is None:
                return None
            self.results[name, kinds] = kept
        return self.results[name, kinds].best

    # -- keeping -----------------------------------------------------------------------------------------------------
    def _known_or(
        self,
        name: str,
        configs: Sequence[str],
        arrays: Sequence[Any],
        search: Callable[[], Benchmark],
        look: Callable[[], Benchmark],
        anew: bool,
    ) -> Benchmark:
        """Return the known answer, or search. An answer of another process is checked once, by a short ``look``."""
        if not configs:
            raise InputError(f"there is no configuration of '{name}' to choose from")
        kinds = _kinds(arrays)
        known = None if anew else self._read(name, kinds)
        is_answer = known is not None and set(configs) == {*known.seconds, *known.failed}
        if known is not None and is_answer and ((name, kinds) in self._checked or self._still_holds(known, look)):
            self._checked.add((name, kinds))
            self.results[name, kinds] = known
            return known
        found = self.results[name, kinds] = search()
        self._checked.add((name, kinds))
        if self._store is not None:
            data = {"best": found.best, "seconds": found.seconds, "failed": found.failed}
            self._store.put(_key(name, kinds), {"tuned": json.dumps(data).encode()})
        return found

    def _read(self, name: str, kinds: Hashable) -> Benchmark | None:
        parts = self._store.get(_key(name, kinds)) if self._store is not None else None
        if parts is None:
            return None
        try:
            data = json.loads(parts["tuned"])
            times = {str(c): float(s) for c, s in data["seconds"].items()}
            known = Benchmark(name, str(data["best"]), times, dict(data["failed"]), True)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return known if known.best in known.seconds else None

    @staticmethod
    def _still_holds(known: Benchmark, look: Callable[[], Benchmark]) -> bool:
        """Whether a stored answer runs, and a short look finds nothing twice as fast."""
        now = look().seconds
        return known.best in now and min(now.values()) >= CHANGED * now[known.best]

    @staticmethod
    def _decided(name: str, times: Mapping[str, float], failed: dict[str, str]) -> Benchmark:
        if not times:
            raise BackendError(
                f"no configuration of '{name}' could be run", facts=[f"{c}: {why}" for c, why in failed.items()]
            )
        best = min(times, key=lambda c: times[c])
        first = next(iter(times))
        if times[best] >= (1 - MARGIN) * times[first]:
            best = first
        return Benchmark(name, best, dict(times), failed)


def _key(name: str, kinds: Hashable) -> str:
    """Everything that the answer depends on."""
    device = {k: v for k, v in mx.device_info().items() if k != "memory_size"}
    versions = [version("mlx"), version("mithril-mlx")]
    return fingerprint("mlx-tuner", name, kinds, str(mx.default_device()), device, str(BLAS), versions)


def _kinds(arrays: Sequence[Any]) -> Hashable:
    return tuple((tuple(np.shape(a)), str(getattr(a, "dtype", type(a).__name__))) for a in arrays)


def _quartile(times: Sequence[float]) -> float:
    return float(np.quantile(times, 0.25))


def _waited(way: Callable[..., Any], arrays: Sequence[Any]) -> Callable[[], Any]:
    def call() -> None:
        mx.eval(way(*arrays))

    return call


def _leaves(made: Any) -> list[np.ndarray[Any, Any]]:
    parts = made if isinstance(made, (list, tuple)) else [made]
    return [np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x) for x in parts]


def _apart(expected: list[np.ndarray[Any, Any]], made: list[np.ndarray[Any, Any]]) -> float:
    if len(expected) != len(made) or any(a.shape != b.shape for a, b in zip(expected, made, strict=True)):
        return float("inf")
    return max(
        (
            float(relative_error(a.astype(np.float32), b.astype(np.float32)))
            for a, b in zip(expected, made, strict=True)
        ),
        default=0.0,
    )
