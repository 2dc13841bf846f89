"""``ml.find_batch_size`` and ``ml.process_in_batches``: the best batch size, and long data in batches of that size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.backend import checked, format_bytes, parse_bytes
from mithril.compiler import CompiledModel
from mithril.graph import InputError, MemoryLimitError
from mithril.system import time_interleaved
from mithril_tools.benchmark import batch_of, resized

GAIN = 0.05  # relative speedup below which a larger batch is not worth its latency


@dataclass
class BatchChoice:
    """The result of a search. ``rates`` are items per second by batch size; ``fits`` is the largest size that fits in
    memory.
    """

    best: int
    fits: int
    rates: dict[int, float] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)

    def __int__(self) -> int:
        return self.best

    def __str__(self) -> str:
        lines = [f"best batch {self.best}; memory allows {self.fits}"]
        lines += [f"  {n}: {rate:.4g} items/s, {format_bytes(self.memory[n])}" for n, rate in self.rates.items()]
        return "\n".join(lines)


@checked()
def find_batch_size(
    compiled: CompiledModel,
    inputs: Mapping[str, Any],
    *,
    memory: float | str | None = None,
    most: int = 1024,  # english: ok, documented
    params: Mapping[str, Any] | None = None,
    seconds: float = 0.3,
) -> BatchChoice:
    """Find the smallest batch size with (nearly) the highest throughput among those that fit in memory.

    ``inputs`` are samples of any batch size. ``memory`` (8, "8GB", "512MiB") limits the bytes of a call; the default is
    half of the free memory. The need of a batch is read from the memory plan: batches that would not fit are never run.
    """
    limit = parse_bytes(memory) if memory is not None else free_memory() // 2
    needs = _planner(compiled, inputs)
    fits = _largest(needs, limit, most)
    weights = params if params is not None else compiled.params
    if weights is None:
        weights = compiled.randomize_params(inputs=inputs)

    def rate(size: int) -> float:
        resized_inputs = resized(compiled, inputs, size)

        def call() -> Any:
            return compiled.evaluate(weights, resized_inputs)

        return size / time_interleaved({"": call}, compiled.backend.synchronize, seconds=seconds / 4, rounds=3)[""]

    best, rates = fastest_batch(rate, fits)
    return BatchChoice(best, fits, rates, {size: needs(size) for size in rates})


def fastest_batch(rate: Callable[[int], float], fits: int) -> tuple[int, dict[int, float]]:
    """Return the smallest batch whose rate (items per second) is close to the best, and all measured rates.

    Batch sizes double up to ``fits`` until two in sequence gain nothing; then steps of a quarter around the best are
    tried.
    """
    rates: dict[int, float] = {}
    best, size, poor = 1, 1, 0
    while size <= fits and poor < 2:
        rates[size] = rate(size)
        if rates[size] > (1 + GAIN) * rates[best]:
            best, poor = size, 0
        elif size > 1:
            poor += 1
        size = size * 2 if size * 2 <= fits or size == fits else fits
    around = (best * quarters // 4 for quarters in (3, 5, 6, 7))
    for size in dict.fromkeys(n for n in around if 1 <= n <= fits and n not in rates):
        rates[size] = rate(size)
        if rates[size] > (1 + GAIN) * rates[best]:
            best = size
    return best, rates


def _planner(compiled: CompiledModel, inputs: Mapping[str, Any]) -> Callable[[int], int]:
    """Return a function for the bytes of a call by batch size, from the memory plan."""
    if not compiled.programs:
        compiled.evaluate(compiled.randomize_params(inputs=inputs), dict(inputs))
    needs_by_size: dict[int, int] = {}

    def planned(size: int) -> int:
        if size not in needs_by_size:
            shapes = {n: np.shape(x) for n, x in resized(compiled, inputs, size).items()}
            needs_by_size[size] = compiled.memory_report(shapes).peak
        return needs_by_size[size]

    return planned


def _largest(needs: Callable[[int], int], limit: int, max_batch: int) -> int:
    """Return the largest batch within the limit: extrapolate linearly, then check against the plan."""
    if needs(1) > limit:
        raise MemoryLimitError(
            f"a batch of one needs {format_bytes(needs(1))}, and only {format_bytes(limit)} may be taken",
            hint="a smaller dtype or mixed_precision=True needs less",
        )
    if needs(max_batch) <= limit:
        return max_batch
    low, high = 1, max_batch  # the first fits, the second does not
    while high - low > 1:
        share = (limit - needs(low)) / (needs(high) - needs(low))
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (middle, high) if needs(middle) <= limit else (low, middle)
        if high - low > 1 and needs(low + 1) > limit:
            break
    return low


def free_memory() -> int:
    """Return the bytes that are free on this machine, or 4 GB if unknown."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4_000_000_000


@checked()
def process_in_batches(
    compiled: CompiledModel,
    inputs: Mapping[str, Any],
    batch_size: int,
    *,
    params: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Compute the outputs of long inputs chunk by chunk, in order, as NumPy arrays."""
    parts = list(stream(compiled, inputs, batch_size, params=params))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@checked()
def stream(
    compiled: CompiledModel,
    inputs: Mapping[str, Any],
    batch_size: int,
    *,
    params: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield the outputs chunk by chunk. Each chunk is submitted before the previous one is awaited.

    The last chunk is padded with copies of its last row, so that one program serves all, and trimmed afterwards.
    """
    if batch_size < 1:
        raise InputError(f"a batch size cannot be {batch_size}")
    total = batch_of(inputs)
    if total == 0:
        raise InputError("there is nothing to process: the inputs are empty")
    weights = params if params is not None else compiled.params
    if weights is None:
        raise InputError("no parameters are bound to this model", hint="give params=, or compiled.bind(params) before")
    rows = {n: np.asarray(x) for n, x in inputs.items()}
    waiting: tuple[Any, int] | None = None
    for start in range(0, total, batch_size):
        size = min(batch_size, total - start)
        piece = {n: _piece(x, start, batch_size, total) for n, x in rows.items()}
        running = compiled.evaluate(weights, {n: compiled.backend.array(x) for n, x in piece.items()})
        if waiting is not None:
            yield _trim(compiled, *waiting)
        waiting = running, size
    if waiting is not None:
        yield _trim(compiled, *waiting)


def _piece(x: np.ndarray[Any, Any], start: int, size: int, total: int) -> np.ndarray[Any, Any]:
    """Return the rows from ``start``; inputs without a batch axis are passed unchanged."""
    if not x.ndim or x.shape[0] != total:
        return x
    part = x[start : start + size]
    missing = size - len(part)
    return np.concatenate([part, np.repeat(part[-1:], missing, axis=0)]) if missing else part


def _trim(compiled: CompiledModel, results: Any, size: int) -> dict[str, np.ndarray[Any, Any]]:
    outputs = results[0] if isinstance(results, tuple) else results
    arrays = {n: compiled.backend.to_numpy(v) for n, v in outputs.items()}
    for name, array in arrays.items():
        if not array.ndim:
            raise InputError(f"output '{name}' has no rows, so it cannot be computed piece by piece")
    return {n: a[:size] for n, a in arrays.items()}
