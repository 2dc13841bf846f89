"""Windows reduced separably: lines of the image first, then neighbors within the reduced line.

The line is stored in a buffer with its padding, so that no element needs a bounds check. For strided windows the line
is split into one run per phase, so that vectors run along the last axis as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from mithril.graph import Node, Op, TensorType, Value, dtype as as_dtype, float32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, conjunction, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.rows import reductions

Emit = Callable[[Index, t.Expr], None]


@dataclass(frozen=True)
class Line:
    """Sizes of the windows' last axis and of the line buffers."""

    kernel: int
    stride: int
    dilation: int
    before: int  # leading padding
    after: int  # trailing padding
    image: int
    result: int
    lanes: int

    @staticmethod
    def of(node: Node, machine: Machine) -> Line:
        a, bits = node.attributes, max(operand(node).dtype.bits, 32)
        dilation = a["dilation"][-1] if "dilation" in a else 1
        image, result = shape_of(operand(node))[-1], shape_of(node.result)[-1]
        before, after = map(int, a["padding"][-1])
        return Line(a["kernel"][-1], a["stride"][-1], dilation, before, after, image, result, machine.lanes(bits))

    @property
    def length(self) -> int:
        """Elements that windows cover, rounded up to whole vectors of every phase."""
        granularity = self.stride * self.lanes
        if not isinstance(self.image, int):  # windows do not extend past the padding
            return (self.before + self.image + self.after + granularity - 1) // granularity * granularity
        extent = (self.result - 1) * self.stride + (self.kernel - 1) * self.dilation + 1
        return -(-max(extent, self.before + self.image) // granularity) * granularity

    @property
    def size(self) -> int:
        """Elements of a thread's buffer: the line, and the line split into phases."""
        return self.length if self.stride == 1 else 2 * self.length

    def offset(self, k: Any) -> Any:
        """Return the offset of element ``k`` of the first window; elements ``k`` of all windows are contiguous."""
        k = k * self.dilation
        if self.stride == 1:
            return k
        part = self.length + k % self.stride * (self.length // self.stride)
        return part + k // self.stride


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return one line buffer per thread."""
    node = kernel.anchor
    dtype = as_dtype(reductions.accumulator(operand(node).dtype))
    return [Value("line", TensorType(dtype, (machine.threads * Line.of(node, machine).size,)))]


def fold_windows(frame: KernelBuilder, op: Op, window: Callable[..., Any], emit: Emit) -> None:
    """Reduce every window; ``window`` returns the position of a window's line and the conditions that it is inside."""
    Lines(frame, op, window).write(emit)


class Lines:
    """Loops over the lines of the result."""

    def __init__(self, frame: KernelBuilder, op: Op, window: Callable[..., Any]) -> None:
        self.frame, self.op, self.window = frame, op, window
        self.code, self.reader, self.node = frame.code, frame.reader, frame.kernel.anchor
        self.x = operand(self.node)
        self.dtype = self.x.dtype
        self.line = Line.of(self.node, frame.machine)
        self.buffer = frame.outputs[frame.kernel.scratch[0]]

    def write(self, emit: Emit) -> None:
        result = shape_of(self.node.result)
        with self.frame.share("line", math.prod(result[:-1]), math.prod(result)) as (worker, item):
            index = self.reader.split(item, result[:-1])
            start = worker * self.line.size
            self.fold_lines(index, start)
            self.deinterleave(start)
            self.fold_along(index, start, emit)

    def vectors(self, size: int) -> Iterator[tuple[Any, int]]:
        """Loop over the vectors of a line, halving the vector for the rest; yield first element and vector length."""
        begin, lanes = 0, self.line.lanes
        if not isinstance(size, int):
            with self.reader.loop("i", t.index(size) // lanes) as i:
                yield i * lanes, lanes
            while lanes > 1:
                lanes //= 2
                with self.code.when(t.index(size) % (2 * lanes) >= lanes), self.reader.loop("rest", 1):
                    yield self.reader.position(t.index(size) // (2 * lanes) * (2 * lanes)), lanes
            return
        while begin < size:
            num_vectors = (size - begin) // lanes
            if num_vectors:
                with self.reader.loop("i", num_vectors) as i:
                    yield i * lanes + begin, lanes
            begin, lanes = begin + num_vectors * lanes, lanes // 2

    def fold_in(self, buffer: t.Buffer, offset: Any, x: t.Expr) -> None:
        """Reduce one more element into each lane."""
        current = reductions.load_element(buffer, offset, self.dtype)
        self.code.store(
            buffer, offset, reductions.to_stored(reductions.fold(self.code, self.op, current, x, self.dtype))
        )

    def fold_lines(self, index: Index, start: Any) -> None:
        first = reductions.to_stored(reductions.identity(self.op, self.dtype))
        for begin, lanes in self.vectors(self.line.length):
            with self.reader.loop("j", lanes, t.VECTORIZED) as j:
                self.code.store(self.buffer, start + (begin + j), first)
        with self.reader.several("abcde", self.node.attributes["kernel"][:-1]) as offsets:
            for offset in offsets:
                position, conditions = self.window(index[2:], offset)
                guard = self.code.when(conjunction(conditions)) if conditions else nullcontext()
                with guard, self.reader.loop("line", 1):
                    for begin, lanes in self.vectors(self.line.image):
                        with self.reader.loop("j", lanes, t.VECTORIZED) as j:
                            w = begin + j
                            target = start + (w + self.line.before)
                            self.fold_in(self.buffer, target, self.reader.at(self.x, (*index[:2], *position, w)))

    def deinterleave(self, start: Any) -> None:
        """Split the line into one contiguous run per phase of the stride."""
        s, length, lanes = self.line.stride, self.line.length, self.line.lanes
        if s == 1:
            return
        if s == 2 and self.dtype is float32 and lanes > 1:
            with self.reader.loop("v", length // (2 * lanes)) as v:
                begin = start + v * (2 * lanes)
                a, b = (t.load(self.buffer, t.vector(begin + k, lanes)) for k in (0, lanes))
                for part in (0, 1):
                    target = start + v * lanes + (length + part * (length // 2))
                    self.code.store(self.buffer, t.vector(target, lanes), t.shuffle(a, b, range(part, 2 * lanes, 2)))
            return
        with self.reader.loop("k", length // s) as k, self.reader.loop("part", s) as part:
            target = start + k + (part * (length // s) + length)
            self.code.store(self.buffer, target, t.load(self.buffer, start + (k * s + part)))

    def fold_along(self, index: Index, start: Any, emit: Emit) -> None:
        code, reader, accumulator = self.code, self.reader, reductions.accumulator(self.dtype)
        for begin, lanes in self.vectors(self.line.result):
            total = code.alloc("total", lanes, accumulator)
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                code.store(total, j, reductions.to_stored(reductions.identity(self.op, self.dtype)))
            with reader.several("k", [self.line.kernel]) as positions:
                for (k,) in positions:
                    first = start + (begin + self.line.offset(k))
                    with reader.loop("j", lanes, t.VECTORIZED) as j:
                        self.fold_in(total, j, reductions.load_element(self.buffer, first + j, self.dtype))
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                emit((*index, begin + j), reductions.load_element(total, j, self.dtype))
