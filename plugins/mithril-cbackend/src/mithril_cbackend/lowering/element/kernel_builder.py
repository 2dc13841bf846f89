"""Prologue and epilogue of every template: parameters, the element reader, parallel loops, the finished function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mithril.graph import Node, Value, is_expensive
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, Reader, typical
from mithril_cbackend.lowering.element.kernel import Kernel, Template
from mithril_cbackend.lowering.element.storage_dtypes import load, store, stored

# Threads take only work that pays for waking them (commit b7e9fc74); the figure was not recorded
# with a measurement.
PARALLEL_WORK = 1 << 18  # element operations; starting threads does not pay off for less work
PRODUCTS = 8  # multiply-adds of register tiles that take as long as one element operation


@dataclass(frozen=True)
class Machine:
    """The machine that code is generated for, and its options.

    A kernel asks it for the levels of its loops: which of them are parallel, and how many lanes a vector has. This
    class answers for a CPU, whose parallel loops are shared by a few threads; a device that launches kernels has a
    subclass (``devices/model.py``), where each iteration is a thread.
    """

    launches: ClassVar[bool] = False  # whether each iteration of a parallel loop is a thread of the device
    templates: ClassVar[Mapping[Template, Template]] = {}  # template of a CPU -> the template in its place

    cpu: str
    threads: int
    vector_bytes: int = 64
    schedules: Mapping[str, str] = field(
        default_factory=dict
    )  # measured schedules: operation with its sizes -> schedule
    cache: int = 1 << 19  # bytes of the L2 cache, which is private to each core
    scratchpad: int | None = None  # bytes that a kernel may keep for each thread; None: no limit
    instructions: Mapping[str, float] = field(default_factory=dict)  # operations per element, by a hardware target
    fuse: bool = True  # whether a kernel may compute several operations
    plan: str | Callable[..., Any] = "smallest"  # strategy of the memory plan
    compact: bool = False  # whether to prefer small scratch buffers to fast kernels
    scheduler: str = "auto"  # of kernels: "own" templates, "tvm", or "auto", per family
    features: tuple[str, ...] = ()  # instructions of the CPU that kernels may select, in LLVM's names

    @property
    def buffers(self) -> int | None:
        """The number of arrays that a kernel may read and write; None if there is no limit."""
        return None

    def lanes(self, dtype_bits: int = 32) -> int:
        return max(1, self.vector_bytes * 8 // dtype_bits)

    def is_expensive(self, node: Node) -> bool:
        """Whether an element of the node costs more than to store and load it."""
        return is_expensive(node, costs=self.instructions)

    def parallel(self, work: int) -> Any:
        """Return the kind of an outermost loop: parallel if there is enough work."""
        return t.PARALLEL if self.threads > 1 and typical(work) >= PARALLEL_WORK else t.SERIAL

    def kinds(self, extents: Sequence[int], work: int) -> dict[int, Any]:
        """Return the loop kinds of a nest: the outermost loop with an iteration for every thread is parallel."""
        # An outer axis that is shorter than the number of threads would leave threads idle although an
        # inner one is long.
        enough = [k for k, n in enumerate(extents) if typical(n) >= self.threads]
        longer = [k for k, n in enumerate(extents) if typical(n) > 1]
        axis = next(iter(enough + longer), None)
        return {} if axis is None else {axis: self.parallel(work)}


class KernelBuilder:
    """Builder of one kernel's function."""

    def __init__(self, kernel: Kernel, name: str, machine: Machine) -> None:
        self.kernel = kernel
        self.name = name
        self.machine = machine
        self.code = t.Code(own_functions=not machine.launches)
        self.parameters = []
        buffers: dict[Value, t.Buffer] = {}
        self.outputs: dict[Value, t.Buffer] = {}
        for k, v in enumerate(kernel.parameters):
            pair = t.pointer(self.code.name(v.name), stored(v.dtype))
            self.parameters.append(pair)
            (buffers if k < len(kernel.inputs) else self.outputs)[v] = pair[1]
        self.code.read_only.update(b.name for b in buffers.values())
        self.reader = Reader(self.code, kernel.producers, buffers, kernel.in_bounds)
        self.sizes = [t.size(name) for name in kernel.sizes]

    def parallel(self, work: int) -> Any:
        return self.machine.parallel(work)

    def kinds(self, extents: Sequence[int], work: int) -> dict[int, Any]:
        return self.machine.kinds(extents, work)

    def workers(self, work: int, items: Any) -> int:
        """Return the number of threads for this amount of work; the number of items may be an expression."""
        threads = self.machine.threads
        limit = threads if isinstance(items, t.Expr) else min(threads, typical(items))
        return limit if typical(work) >= PARALLEL_WORK else 1

    @contextmanager
    def share(self, name: str, items: Any, work: int) -> Iterator[tuple[Any, Any]]:
        """Open a loop over items, distributed to the threads; yield the thread, for private buffers, and the item."""
        # Private buffers would be needed for each item: items that have some run in order.
        if self.machine.launches:
            with self.reader.loop(name, items, t.SERIAL if self.kernel.scratch else t.PARALLEL) as i:
                yield 0, i
            return
        workers = self.workers(work, items)
        # Threads are the outer loop, not items, so that private buffers are indexed by thread: one per
        # thread is enough.
        with self.reader.loop("worker", workers, t.PARALLEL) as worker:
            extent: Any = items // workers
            if workers > 1 and items % workers != 0:
                extent = (t.index(items) + (workers - 1) - worker) // workers
            with self.reader.loop(name, extent) as i:
                yield worker, i * workers + worker

    @contextmanager
    def part(self, stem: str) -> Iterator[None]:
        """Write statements as a function of their own, which all kernels with equal statements share."""
        with self.reader.block() as body:
            yield
        self.code.call_part(stem, body, self.parameters, len(self.kernel.inputs))

    def write(self, value: Value, index: Index, element: t.Expr) -> None:
        """Store an element of a result."""
        shape = self.reader.shape(value)
        store(self.code, self.outputs[value], self.reader.flat(index, shape), element, value.dtype)

    def read(self, value: Value, index: Index) -> t.Expr:
        """Load an element of a stored result."""
        return load(self.outputs[value], self.reader.flat(index, self.reader.shape(value)), value.dtype)

    def emit(self, index: Index, element: t.Expr) -> None:
        """Apply the epilogue to an element of the anchor's result, and store the results."""
        result = self.kernel.anchor.result
        if self.kernel.outputs == [result]:
            self.write(result, index, element)
            return
        # The epilogue broadcasts axes of size 1: it reads position 0 there, which may be an expression here.
        index = tuple(0 if n == 1 else i for i, n in zip(index, self.reader.shape(result), strict=True))
        self.reader.define(result, index, self.code.let(element, result.name))
        for v in self.kernel.outputs:
            self.write(v, index, self.reader.at(v, index))

    def write_flat(self, value: Value, flat: Any, element: t.Expr) -> None:
        """Store an element at a row-major offset."""
        store(self.code, self.outputs[value], flat, element, value.dtype)

    def read_flat(self, value: Value, flat: Any) -> t.Expr:
        return load(self.outputs[value], flat, value.dtype)

    def finish(self) -> t.Function:
        """Return the function of the code that was written."""
        pieces = self.code.pieces
        primfunc = t.function(self.name, self.parameters, t.importing(pieces.values(), self.code.finish()), self.sizes)
        return t.Function(primfunc, frozenset(self.code.names), len(self.kernel.inputs), self.code.helpers, pieces)
