"""``MlxMemoryOptimizer``: reusable input buffers, and memory budgets that are checked before a run.

MLX arrays are immutable and its allocator caches freed memory, so pooling the results of operations gains nothing. A
staged tensor keeps its buffer across uses, so that the memory of inputs is known and bounded. MLX is lazy and may read
an array much later; ``array`` is therefore a copy, created before the buffer is overwritten.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.backend import CheckedType, format_bytes, parse_bytes
from mithril.graph import InputError, MemoryLimitError, OptionError, dtype as as_dtype
from mithril_mlx.mlx_loader import mx

AHEAD = 28  # buffers that MLX allocates ahead of the operations that release them; measured on chains


class StagedTensor:
    """A tensor leased from a pool, with an ``array`` for computations; using it after its return is an error.

    Results and views of ``array`` stay valid after the tensor is refilled or returned, evaluated or not.
    """

    def __init__(self, memory: mx.array) -> None:
        self._memory: mx.array | None = memory
        self._contents: mx.array | None = None  # copy of the memory, lazy until a result or the next write needs it

    @property
    def array(self) -> mx.array:
        """The current contents, as an immutable array."""
        memory = self._leased()
        if self._contents is None:
            self._contents = _copied(memory)
        return self._contents

    def _leased(self) -> mx.array:
        if self._memory is None:
            raise InputError(
                "this tensor was returned to its pool and may be in use again",
                hint="use it before return_to_pool, or call get_or_create_tensor again",
            )
        return self._memory

    def _finish_reads(self) -> mx.array:
        """Evaluate the pending copy, if any, so that the buffer may be written."""
        memory = self._leased()
        if self._contents is not None:
            mx.eval(self._contents)
            self._contents = None
        return memory

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.array, dtype=dtype)

    def __mlx_array__(self) -> mx.array:
        return self.array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._leased().shape)

    @property
    def dtype(self) -> Any:
        return self._leased().dtype

    @property
    def nbytes(self) -> int:
        return int(self._leased().nbytes)

    def fill(self, data: Any) -> mx.array:
        """Write ``data`` (an array of this shape, or a scalar) into the tensor's memory; return ``array``."""
        array = self._finish_reads()
        half = array.dtype == mx.bfloat16
        memory = np.asarray(array.view(mx.uint16) if half else array)
        source = np.asarray(data)
        if source.ndim and source.shape != memory.shape:
            raise InputError(f"a tensor of shape {list(self.shape)} cannot be filled with {list(source.shape)}")
        if half:
            source = source.astype(as_dtype("bfloat16").numpy).view(np.uint16)
        memory[...] = source
        return self.array


def _operate(name: str) -> None:
    """Let tensors be operands of an operator of Python; on the right of ``@`` MLX takes its arrays only."""
    function = getattr(operator, name)

    def left(self: StagedTensor, other: Any) -> Any:
        return function(self.array, other.array if isinstance(other, StagedTensor) else other)

    def right(self: StagedTensor, other: Any) -> Any:
        return function(other, self.array)

    setattr(StagedTensor, f"__{name}__", left)
    setattr(StagedTensor, f"__r{name}__", right)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _operate(_name)


def _copied(array: mx.array) -> mx.array:
    """Copy an array bit for bit, lazily; MLX's own copies share memory."""
    bits = array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size])
    return mx.bitwise_or(bits, mx.array(0, bits.dtype)).view(array.dtype)


@dataclass(frozen=True)
class MemoryStats:
    """Statistics of a pool: hits, misses, and the bytes of its tensors, leased or free."""

    total_allocations: int
    total_deallocations: int
    pool_hits: int
    pool_misses: int
    peak_memory_usage: int
    current_memory_usage: int

    @property
    def hit_rate(self) -> float:
        requests = self.pool_hits + self.pool_misses
        return self.pool_hits / requests if requests else 0.0


@dataclass(frozen=True)
class AllocatorStats:
    """MLX's own counters for the process, in bytes."""

    active: int
    peak: int
    cached: int


@dataclass(frozen=True)
class Batch:
    """Tensors of one shape and dtype, contiguous in memory; ``places`` holds their positions in the argument."""

    array: mx.array
    places: tuple[int, ...]


class MlxMemoryOptimizer(metaclass=CheckedType):
    """A pool of at most ``max_pool`` free tensors, and a budget (bytes, or "2GB") for compiled models."""

    def __init__(self, max_pool: int = 100, budget: int | str | None = None) -> None:
        if max_pool < 0:
            raise OptionError(f"a pool cannot hold {max_pool} tensors")
        self.max_pool = max_pool
        self.budget = parse_bytes(budget) if isinstance(budget, str) else budget
        self._free_lists: dict[tuple[Any, ...], list[mx.array]] = {}
        self._leased: dict[int, int] = {}  # lease -> bytes
        self._allocations = self._deallocations = self._hits = self._misses = self._current = self._peak = 0

    # -- the pool ----------------------------------------------------------------------------------------------------
    def get_or_create_tensor(self, shape: Sequence[int], dtype: Any = None, device: str | None = None) -> StagedTensor:
        """Return a tensor from the pool, with its previous contents, or a new one filled with zeros.

        ``dtype`` is an MLX dtype or a name. ``device`` (cpu, gpu) is where the tensor will be used: both share memory.
        """
        key = _key(shape, dtype, device)
        waiting = self._free_lists.get(key)
        if waiting:
            array = waiting.pop()
            self._hits += 1
        else:
            with mx.stream(mx.cpu):
                array = mx.zeros(*key)
                mx.eval(array)
            self._misses += 1
            self._allocations += 1
            self._current += array.nbytes
            self._peak = max(self._peak, self._current)
        lease = StagedTensor(array)
        number, size = id(lease), array.nbytes
        self._leased[number] = size
        weakref.finalize(lease, self._on_garbage_collected, number)
        return lease

    def return_to_pool(self, tensor: StagedTensor, device: str | None = None) -> None:
        """End a lease; the tensor becomes free for the next one, or is released if the pool is full."""
        if not isinstance(tensor, StagedTensor):
            raise InputError(
                f"expected a tensor of a pool, got an object of type {type(tensor).__name__}",
                hint="pass the tensor of get_or_create_tensor, not its .array",
            )
        tensor._leased()  # raises an error if it was already returned
        if id(tensor) not in self._leased:
            raise InputError(
                "this tensor was not leased from this pool: it belongs to another pool, or is a copy of a leased tensor"
            )
        array = tensor._finish_reads()
        size = self._leased.pop(id(tensor))
        tensor._memory = None
        if sum(map(len, self._free_lists.values())) < self.max_pool:
            self._free_lists.setdefault(_key(array.shape, array.dtype, device), []).append(array)
        else:
            self._release(size)

    @contextmanager
    def staged(self, shape: Sequence[int], dtype: Any = None) -> Iterator[StagedTensor]:
        """Lease a tensor for a ``with`` block."""
        tensor = self.get_or_create_tensor(shape, dtype)
        try:
            yield tensor
        finally:
            self.return_to_pool(tensor)

    def clear(self) -> None:
        """Release all free tensors, and return MLX's cached memory to the system."""
        for waiting in self._free_lists.values():
            for array in waiting:
                self._release(array.nbytes)
        self._free_lists.clear()
        mx.clear_cache()

    def get_stats(self) -> MemoryStats:
        return MemoryStats(self._allocations, self._deallocations, self._hits, self._misses, self._peak, self._current)

    def _release(self, size: int) -> None:
        self._deallocations += 1
        self._current -= size

    def _on_garbage_collected(self, number: int) -> None:
        """Handle a tensor that was garbage collected before it was returned."""
        size = self._leased.pop(number, None)
        if size is not None:
            self._release(size)

    # -- budgets -----------------------------------------------------------------------------------------------------
    @staticmethod
    def allocator() -> AllocatorStats:
        return AllocatorStats(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())

    def check(self, compiled: Any, inputs: Mapping[str, Any] | None = None) -> int:
        """Return the planned bytes of a call of a compiled model; raise MemoryLimitError if they exceed the budget.

        Nothing is run: MLX terminates the process when memory is exhausted.
        """
        needed = planned_bytes(compiled, inputs)
        if self.budget is not None and needed > self.budget:
            report = compiled.memory_report(inputs)
            raise MemoryLimitError(
                f"a call of '{compiled.name}' may take {format_bytes(needed)}, "
                f"and the budget is {format_bytes(self.budget)}",
                facts=["largest: " + ", ".join(f"'{name}' {format_bytes(size)}" for name, size in report.largest)],
                hint="use smaller batches (MlxBatchOptimizer finds their size), or a smaller dtype",
            )
        return needed

    @contextmanager
    def limits(self, *, memory: int | str | None = None, cache: int | str | None = None) -> Iterator[None]:
        """Set MLX's own limits inside a ``with`` block: of memory in use, and of its buffer cache."""
        undo = []
        try:
            for limit, setter in ((memory, mx.set_memory_limit), (cache, mx.set_cache_limit)):
                if limit is not None:
                    undo.append((setter, setter(parse_bytes(limit) if isinstance(limit, str) else limit)))
            yield
        finally:
            for setter, before in undo:
                setter(before)

    # -- batches -----------------------------------------------------------------------------------------------------
    @staticmethod
    def optimize_batch_layout(arrays: Sequence[mx.array]) -> list[Batch]:
        """Group tensors by shape and dtype, each group as one contiguous batch, in the order of first appearance."""
        groups: dict[Any, list[int]] = {}
        for place, array in enumerate(arrays):
            groups.setdefault((tuple(array.shape), array.dtype), []).append(place)
        batches = [Batch(mx.stack([arrays[k] for k in places]), tuple(places)) for places in groups.values()]
        mx.eval([b.array for b in batches])
        return batches


def planned_bytes(compiled: Any, inputs: Mapping[str, Any] | None = None) -> int:
    """Return an upper bound of the bytes of a call.

    The plan gives the live set of sequential execution. MLX allocates ahead, so ``AHEAD`` buffers of the largest value
    are added, up to the sum of all values.
    """
    report = compiled.memory_report(inputs)
    largest = max((size for _, size in report.largest), default=0)
    values = min(report.values, report.workspace + AHEAD * largest)
    return int(report.inputs + report.parameters + report.state + values)


def _key(shape: Sequence[int], dtype: Any, device: str | None) -> tuple[tuple[int, ...], Any]:
    if device is not None and str(device) not in ("cpu", "gpu"):
        raise OptionError(f"'{device}' is not a device of MLX", facts=["there are: cpu, gpu"])
    if not isinstance(dtype, mx.Dtype):
        kind = as_dtype(dtype if dtype is not None else "float32")
        dtype = getattr(mx, "bool_" if kind.is_bool else kind.name)
    return tuple(map(int, shape)), dtype
