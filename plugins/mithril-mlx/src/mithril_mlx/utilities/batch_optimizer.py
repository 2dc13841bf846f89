"""``MlxBatchOptimizer``: find the best batch size, and process long data in batches of that size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np

import mithril as ml
from mithril.backend import CheckedType, format_bytes, parse_bytes
from mithril.graph import InputError, MemoryLimitError
from mithril_mlx.mlx_loader import mx
from mithril_mlx.utilities.tensor_cache import seconds
from mithril_tools.batching import BatchChoice, fastest_batch, free_memory


class MlxBatchOptimizer(metaclass=CheckedType):
    """Search for the batch size with the highest throughput that needs at most ``memory_threshold`` bytes.

    The threshold is a number of bytes, or text such as "512MiB"; the default is half of the free memory.
    """

    def __init__(self, memory_threshold: int | str | None = None) -> None:
        if isinstance(memory_threshold, str):
            memory_threshold = parse_bytes(memory_threshold)
        self.memory_threshold: int | None = memory_threshold
        self.choices: dict[str, BatchChoice] = {}

    # -- finding -----------------------------------------------------------------------------------------------------
    def find_optimal_batch_size(
        self,
        name: str,
        max_batch: int,
        benchmark: Callable[[int], float | timedelta],
        *,
        memory: Callable[[int], int] | None = None,
    ) -> int:
        """Find the batch size for which ``benchmark(batch)``, in seconds, gives the highest number of items per second.

        ``memory(batch)`` returns the bytes of a batch, which must grow with the batch size; batches over the threshold
        are never run. Without it, the bytes that MLX allocates during ``benchmark`` are measured, and a batch is not
        run if its extrapolated need exceeds the threshold.
        """
        if max_batch < 1:
            raise InputError(f"'{name}': a batch size cannot be {max_batch}")
        fits = self._fits(name, max_batch, memory) if memory is not None else max_batch
        used: dict[int, int] = {}

        def rate(size: int) -> float:
            if memory is None and used and self._limit() * max(used) < used[max(used)] * size:
                return 0.0
            took, used[size] = _measured(lambda: seconds(benchmark(size)))
            if memory is None and used[size] > self._limit():
                if size == 1:
                    raise self._too_large(name, used[1])
                return 0.0
            return size / max(float(took or 0.0), 1e-12)

        best, rates = fastest_batch(rate, fits)
        largest = max((n for n in rates if rates[n]), default=1)
        needs = {n: memory(n) if memory else used.get(n, 0) for n in rates}
        self.choices[name] = BatchChoice(best, fits if memory else largest, rates, needs)
        return best

    def _limit(self) -> int:
        free: int = free_memory() // 2
        return free if self.memory_threshold is None else self.memory_threshold

    def _too_large(self, name: str, needed: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"'{name}': a batch of one needs {format_bytes(needed)}, "
            f"and only {format_bytes(self._limit())} may be taken",
            hint="MlxBatchOptimizer(memory_threshold=...) sets the limit",
        )

    def find_model_batch_size(
        self,
        compiled: Any,
        inputs: Mapping[str, Any],
        *,
        most: int = 1024,  # english: ok, documented
    ) -> int:
        """Find the batch size of a compiled model from its memory plan and measured calls."""
        limit = None if self.memory_threshold is None else f"{self.memory_threshold}B"
        choice: BatchChoice = ml.find_batch_size(compiled, inputs, memory=limit, most=most)
        self.choices[compiled.name] = choice
        return choice.best

    def _fits(self, name: str, max_batch: int, memory: Callable[[int], int]) -> int:
        limit = self._limit()
        if memory(1) > limit:
            raise self._too_large(name, memory(1))
        low, high = 1, max_batch + 1  # the first fits; the second is out of bounds
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if memory(middle) <= limit else (low, middle)
        return low

    # -- processing --------------------------------------------------------------------------------------------------
    def process_in_batches(
        self, name: str, data: Any, process: Callable[[Any], Any], *, batch_size: int | None = None
    ) -> Any:
        """Return all results in order: a list for a list, an array for an array.

        The batch size is the one found for ``name``, unless it is passed.
        """
        if _is_array(data) and not len(data):
            raise InputError(f"'{name}': there is nothing to process")
        pieces = list(self.stream(name, data, process, batch_size=batch_size))
        if _is_array(data):
            return (mx if isinstance(pieces[0], mx.array) else np).concatenate(pieces)
        return [result for piece in pieces for result in piece]

    def stream(
        self, name: str, data: Any, process: Callable[[Any], Any], *, batch_size: int | None = None
    ) -> Iterator[Any]:
        """Yield the results batch by batch; ``data`` may be infinite.

        MLX computes a batch while the next one is prepared. The last batch of an array is padded with its last row, so
        that all batches have one shape, and its results are trimmed.
        """
        size = batch_size if batch_size is not None else self._known(name)
        if size < 1:
            raise InputError(f"'{name}': a batch size cannot be {size}")
        waiting: tuple[Any, int] | None = None
        for piece, count in _rows(data, size) if _is_array(data) else _lists(data, size):
            outputs = process(piece)
            if isinstance(outputs, mx.array):
                mx.async_eval(outputs)
            if waiting is not None:
                yield _trim(name, *waiting)
            waiting = outputs, count
        if waiting is not None:
            yield _trim(name, *waiting)

    def _known(self, name: str) -> int:
        if name not in self.choices:
            raise InputError(
                f"no batch size is known for '{name}'",
                facts=[f"known: {', '.join(self.choices) or 'none'}"],
                hint=f"find_optimal_batch_size('{name}', ...) first, or give batch_size=",
            )
        return self.choices[name].best


def _measured(run: Callable[[], Any]) -> tuple[Any, int]:
    """Return a result, and the bytes that MLX took beyond those in use before."""
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    result = run()
    mx.synchronize()
    return result, max(mx.get_peak_memory() - before, 0)


def _is_array(data: Any) -> bool:
    return isinstance(data, (mx.array, np.ndarray))


def _rows(data: Any, size: int) -> Iterator[tuple[Any, int]]:
    """Pieces of an array that all have one shape, and how many of their rows count."""
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        count = len(piece)
        if count < size and start:
            last = [piece[-1:]] * (size - count)
            piece = (mx if isinstance(data, mx.array) else np).concatenate([piece, *last])
        yield piece, count


def _lists(data: Iterable[Any], size: int) -> Iterator[tuple[list[Any], int]]:
    items = iter(data)
    while piece := list(islice(items, size)):
        yield piece, len(piece)


def _trim(name: str, output: Any, count: int) -> Any:
    if len(output) < count:
        raise InputError(f"'{name}': a batch of {count} items gave {len(output)} results; every item must have one")
    output = output[:count]
    if isinstance(output, mx.array):
        mx.eval(output)
    return output
