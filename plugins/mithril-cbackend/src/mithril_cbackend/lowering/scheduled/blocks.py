"""A kernel as stages that TVM's primitives schedule, and the statements of the scheduled loops.

TVM sees loops, stages and the elements that a stage reads. The arithmetic of an element is one opaque call, which the
element reader writes out once the loops are lowered: TVM's passes take exponential time for arithmetic in blocks.

Extents of vectors are whole vectors for TVM, since proofs about a rest take it longer than all else. The loop over
vectors is annotated with the number of elements that exist, and the loops that it becomes end there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mithril.graph import DType, Op
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder
from mithril_cbackend.lowering.element.vectorization import pieces
from mithril_cbackend.lowering.rows import reductions
from mithril_cbackend.tir import scheduling
from mithril_cbackend.tir.scheduling import Loop, Schedule, Stage
from mithril_cbackend.tir.tvm_api import nodes, tirx

EXISTING = "mithril_existing"  # annotation of a loop over vectors: the elements that exist
SIZE = "mithril_size"  # annotation of the same loop: the elements of an iteration
FIRST = "mithril_first"  # annotation of the same loop: the iteration that it begins with
OVERLAPS = "mithril_overlaps"  # annotation of the same loop: its last vector may compute elements again
GROUP = "mithril_group"  # annotation of a loop over the vectors of an iteration of that loop
HOOK = "mithril_hook"  # annotation of a loop: the hook that writes the beginning of its iterations
FOLD = "fold"
Element = Callable[[Index, Sequence[t.Expr]], t.Expr | None]  # index, elements of stages
Hook = Callable[[Any], t.Expr | None]  # position of a loop -> the condition of this iteration, if there is one


def whole(size: int, lanes: int) -> int:
    """Return the elements of the vectors that hold this many."""
    return -(-size // lanes) * lanes


@dataclass(frozen=True)
class Fold:
    """How a stage reduces its elements."""

    op: Op
    dtype: DType


class Blocks:
    """Builder of stages, their schedule and the function of a kernel.

    ``lanes`` is the length of its vectors.
    """

    def __init__(self, frame: KernelBuilder, lanes: int) -> None:
        self.frame, self.lanes = frame, lanes
        self.elements: dict[str, tuple[int, Element]] = {}  # name of an opaque call -> numbers of its index, element
        self.folds: dict[str, Fold] = {}  # by the name of the stage
        self.partial: set[str] = set()  # stages whose elements are partial results of one sum: any may take an element
        self.halves: set[str] = set()  # stages of the even and the odd elements of another one
        self.results: list[Stage] = []
        self.writers: set[str] = set()  # stages whose elements are statements: those of results, and of rows
        self.hooks: list[Hook] = []

    # -- stages -------------------------------------------------------------------------------------------------------
    def call(self, dtype: str, index: Sequence[Any], element: Element, reads: Sequence[Any] = ()) -> Any:
        name = f"element_{len(self.elements)}"
        self.elements[name] = len(index), element
        return scheduling.opaque(dtype, name, *index, *reads)

    def fold(
        self, name: str, extents: Sequence[int], over: Sequence[int], fold: Fold, source: Callable[..., Any]
    ) -> Stage:
        """Return a stage that reduces ``source(*index, *reduced)``: an element of a stage, or of ``call``."""
        self.folds[name] = fold
        dtype = reductions.accumulator(fold.dtype)
        first = reductions.identity(fold.op, fold.dtype).node
        if fold.dtype.is_bool:
            first = t.const(first.value, dtype).node
        pair = lambda total, x: scheduling.opaque(dtype, FOLD, total, x)  # noqa: E731
        return scheduling.fold(name, extents, over, first, pair, source)

    def split_in_halves(self, name: str, source: Stage, extents: Sequence[int]) -> Stage:
        """Return a stage ``(*lead, 2, size)`` of the even and the odd elements of a stage of float32."""
        self.halves.add(name)
        self.folds[name] = self.folds[source.op.name]
        return scheduling.stage(name, extents, lambda *i: source(*i[:-2], i[-1] * 2 + i[-2]))

    def result(
        self, name: str, extents: Sequence[int], write: Element, reads: Callable[..., Sequence[Any]] = lambda *i: ()
    ) -> None:
        """Add the loops that write the results; ``write`` stores all of them at an index."""
        self.results.append(self.statements(name, extents, write, reads))

    def statements(
        self, name: str, extents: Sequence[int], write: Element, reads: Callable[..., Sequence[Any]]
    ) -> Stage:
        """Return a stage of statements, which stages that read it follow."""
        self.writers.add(name)
        return scheduling.stage(name, extents, lambda *i: self.call("int8", i, write, reads(*i)))

    def schedule(self) -> Schedule:
        return Schedule(self.results)

    # -- primitives ---------------------------------------------------------------------------------------------------
    def split(self, schedule: Schedule, loop: Loop, lanes: int) -> tuple[Loop, Loop]:
        """Split a loop over whole vectors into vectors and lanes."""
        size = int(schedule.get(loop).extent)
        assert size % lanes == 0, f"{size} elements are no whole vectors"
        return tuple(schedule.split(loop, [None, lanes], disable_predication=True))

    def vectorize(
        self, schedule: Schedule, loop: Loop, existing: int, lanes: int | None = None, overlaps: bool = False
    ) -> Loop:
        """Turn a loop over whole vectors into vectors, of whose elements the first ones exist; return their loop.

        The rest of the elements are shorter vectors, or, with ``overlaps``, one that begins before them: the elements
        must not depend on stages within the loop.
        """
        lanes = lanes or self.lanes
        vectors, lane = self.split(schedule, loop, lanes)
        schedule.vectorize(lane)
        self.limit(schedule, vectors, lanes, existing)
        schedule.annotate(vectors, OVERLAPS, overlaps)
        return vectors

    def within(self, schedule: Schedule, name: str, loop: Loop) -> Any:
        """Compute a stage within a loop, in a local array; return its block."""
        block = schedule.get_sblock(name)
        schedule.compute_at(block, loop, preserve_unit_loops=True)
        schedule.set_scope(block, 0, "local")
        return block

    def at_entry(self, schedule: Schedule, loop: Loop, hook: Hook) -> None:
        """Let a hook write the beginning of a loop's iterations."""
        schedule.annotate(loop, HOOK, len(self.hooks))
        self.hooks.append(hook)

    def accumulate(
        self, schedule: Schedule, name: str, loop: Loop, axes: int = 1, lanes: int | None = None
    ) -> tuple[Loop, list[Loop]]:
        """Compute a stage of ``fold`` over some axes within a loop, in vectors along the axis before them.

        Return the loop over vectors and those over the axes.
        """
        block = self.within(schedule, name, loop)
        loops = schedule.get_loops(block)
        elements, reduced = loops[-axes - 1], loops[-axes:]
        vectors, lane = self.split(schedule, elements, lanes or self.lanes)
        schedule.vectorize(lane)
        schedule.reorder(*reduced, vectors, lane)
        schedule.vectorize(schedule.get_loops(schedule.decompose_reduction(block, reduced[0]))[-1])
        return vectors, reduced

    def partial_results(
        self, schedule: Schedule, name: str, loop: Loop, size: int, existing: int, axes: int = 1
    ) -> list[Loop]:
        """Compute a stage of ``size`` partial results of as many elements at a time; return the loops over its axes."""
        vectors, reduced = self.accumulate(schedule, name, loop, axes)
        if size > self.lanes:  # so that they stay in registers
            schedule.unroll(vectors)
            schedule.annotate(vectors, GROUP, True)
        self.partial.add(name)
        self.limit(schedule, reduced[-1], size, existing)
        return reduced

    @staticmethod
    def limit(schedule: Schedule, loop: Loop, size: int, end: int, first: int = 0) -> None:
        """Let a loop, of whose iterations each has ``size`` elements, end after this many elements."""
        schedule.annotate(loop, SIZE, size)
        schedule.annotate(loop, FIRST, first)
        schedule.annotate(loop, EXISTING, end)

    def finish(self, schedule: Schedule) -> t.Function:
        """Return the function of the scheduled loops."""
        Expansion(self).statement(schedule.lowered())
        return self.frame.finish()


class Expansion:
    """Writer of lowered loops as statements of the kernel, with the arithmetic of their elements."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self.frame = blocks, blocks.frame
        self.code, self.reader = blocks.frame.code, blocks.frame.reader
        self.index: dict[int, Any] = {}  # hash of the variable of TVM's loop -> position: comparing variables is slow
        self.arrays: dict[str, t.Buffer] = {}  # name of TVM's array -> array of the kernel
        self.rest = 0  # elements of the last vector; 0 in whole ones
        self.overlaps = False  # whether the last vector begins before its elements
        self.merged: dict[int, Any] = {}  # the index of partial results that take the elements of this last vector
        self.unrolled = 0  # position of the innermost unrolled loop

    # -- statements ---------------------------------------------------------------------------------------------------
    def statement(self, s: Any) -> None:
        if isinstance(s, nodes.SeqStmt):
            for part in s.seq:
                self.statement(part)
        elif isinstance(s, nodes.For):
            self.loop(s)
        elif isinstance(s, nodes.AllocBuffer) and stage_of(s.buffer) not in self.blocks.writers:
            size = math.prod(int(n) for n in s.buffer.shape)
            self.arrays[s.buffer.name] = self.code.alloc(stage_of(s.buffer), size, str(s.buffer.dtype))
        elif isinstance(s, nodes.BufferStore):
            self.store(s)
        elif not isinstance(s, (nodes.AllocBuffer, nodes.DeclBuffer)):  # of statements and parameters
            raise TypeError(f"unsupported statement of a schedule: {type(s).__name__}")

    def loop(self, s: Any) -> None:
        existing = s.annotations.get(EXISTING)
        if existing is not None:
            first = int(s.annotations[FIRST])
            end, rest = divmod(int(existing), int(s.annotations[SIZE]))
            if end > first:
                self.iterate(s, end - first, s.kind, first)
            if rest:
                self.rest, self.overlaps = rest, end > first and bool(s.annotations.get(OVERLAPS))
                with self.reader.loop("", 1):
                    self.body(s, end)
                self.rest = 0
                self.merged.clear()
        elif GROUP in s.annotations and self.rest:
            vectors, part = divmod(self.rest, self.blocks.lanes)
            self.merged[hash(s.loop_var)] = 0
            for k, self.rest in [*((k, 0) for k in range(vectors)), *([(vectors, part)] if part else [])]:
                with self.reader.loop("", 1):
                    self.body(s, k)
            self.rest = vectors * self.blocks.lanes + part
        elif s.kind == t.UNROLLED and not (self.rest and self.reaches_out(innermost(s))):
            for k in range(int(s.extent)):
                with self.reader.loop("", 1):
                    self.unrolled = k
                    self.body(s, k)
        elif s.kind == t.VECTORIZED and stage_of(s.body.buffer) in self.blocks.halves:
            self.halve(s, self.unrolled)
        elif s.kind == t.VECTORIZED and self.rest and self.reaches_out(s.body):
            if self.overlaps:
                self.iterate(s, self.blocks.lanes, s.kind, self.rest - self.blocks.lanes)
                return
            for start, lanes in pieces(self.rest, self.blocks.lanes):
                self.iterate(s, lanes, s.kind, start)
        else:
            self.iterate(s, int(s.extent), t.SERIAL if s.kind == t.UNROLLED else s.kind)

    @staticmethod
    def reaches_out(s: Any) -> bool:
        """Whether a store writes a result or reads an input: stages have all elements of a vector, these may not."""
        name = scheduling.called(s.value)
        return (scheduling.called(s.value.args[2]) if name == FOLD else name) is not None

    def iterate(self, s: Any, extent: int, kind: Any, start: int = 0) -> None:
        with self.reader.loop("j" if kind == t.VECTORIZED else "i", extent, kind) as i:
            if self.rest:
                self.merged[hash(s.loop_var)] = i if kind == t.VECTORIZED else 0
            self.body(s, i + start if start else i)

    def body(self, s: Any, i: Any) -> None:
        """Write an iteration of a loop."""
        self.index[hash(s.loop_var)] = i
        hook = s.annotations.get(HOOK)
        condition = None if hook is None else self.blocks.hooks[int(hook)](i)
        if condition is None:
            self.statement(s.body)
            return
        with self.code.when(condition), self.reader.loop("", 1):
            self.statement(s.body)

    def halve(self, s: Any, part: int) -> None:
        """Write every second element of two vectors as one: a loop would load them one by one."""
        self.index[hash(s.loop_var)] = 0
        target, source, lanes = s.body.buffer, s.body.value, self.blocks.lanes
        begin = t.index(self.position(source.source, source.indices)) - part
        a, b = (t.load(self.arrays[source.source.name], t.vector(begin + k, lanes)) for k in (0, lanes))
        position = t.vector(self.position(target, s.body.indices), lanes)
        self.code.store(self.arrays[target.name], position, t.shuffle(a, b, range(part, 2 * lanes, 2)))

    def store(self, s: Any) -> None:
        name = stage_of(s.buffer)
        if name in self.blocks.writers:
            self.element(s.value)
            return
        index = self.index
        if name in self.blocks.partial:
            self.index = {**index, **self.merged}
        array, position = self.arrays[s.buffer.name], self.position(s.buffer, s.indices)
        self.index = index
        if scheduling.called(s.value) == FOLD:
            fold = self.blocks.folds[name]
            total = reductions.load_element(array, position, fold.dtype)
            x = reductions.fold(self.code, fold.op, total, self.expr(s.value.args[2]), fold.dtype)
        elif isinstance(s.value, (nodes.IntImm, nodes.FloatImm)):
            x = t.Expr(s.value)
        else:
            x = self.expr(s.value)
        self.code.store(array, position, reductions.to_stored(x))

    def position(self, buffer: Any, indices: Any) -> Any:
        """Return the position of an element in the kernel's array."""
        return self.reader.flat(tuple(map(self.expr, indices)), tuple(int(n) for n in buffer.shape))

    # -- expressions --------------------------------------------------------------------------------------------------
    def expr(self, x: Any) -> Any:
        """Return an expression of TVM's loops in terms of the kernel's; positions that are known are ints."""
        kind = type(x)
        if kind is nodes.IntImm:
            return int(x)
        if kind is nodes.Var:
            return self.index[hash(x)]
        operation = OPERATIONS.get(kind)
        if operation is not None:
            return operation(self.expr(x.a), self.expr(x.b))
        if isinstance(x, nodes.Load):
            if stage_of(x.source) in self.blocks.writers:
                return None
            fold = self.blocks.folds[stage_of(x.source)]
            return reductions.load_element(self.arrays[x.source.name], self.position(x.source, x.indices), fold.dtype)
        return self.element(x)

    def element(self, x: Any) -> t.Expr | None:
        """Write out an opaque call."""
        rank, element = self.blocks.elements[str(x.args[0].value)]
        operands = [self.expr(a) for a in list(x.args)[1:]]
        return element(tuple(map(self.reader.position, operands[:rank])), operands[rank:])


OPERATIONS: dict[Any, Callable[[Any, Any], Any]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,  # of positions, which are never negative
    tirx.FloorMod: lambda a, b: a % b,
}


def innermost(s: Any) -> Any:
    """Return the store of nested loops."""
    return innermost(s.body) if isinstance(s, nodes.For) else s


def stage_of(buffer: Any) -> str:
    """Return the name of the stage whose elements an array holds."""
    return str(buffer.name).removesuffix("_local")
