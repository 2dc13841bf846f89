"""Kernels that go along each row several times: softmax, normalizations, all that mixes rows' sums and elements.

A row stays in the nearest cache from time to time. What a row has one of (sums, their roots) is computed once, and
instead of dividing all elements by it they are multiplied by its reciprocal, a last place off at most. Elements that
are dear to compute and needed again are kept in a buffer as long as a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.base import TensorType, dtype as as_dtype, float32
from mithril.ir import Node, Value, is_expensive
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import vector_math
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import Frame, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed
from mithril_cbackend.lowering.element.vectorization import is_plain, vectorizable
from mithril_cbackend.lowering.rows import reductions

WAYS = 4  # accumulators side by side where a pass does little else than folding
EXPENSIVE = 12.0  # operations per element from which a value is computed once for all passes of a row


@dataclass
class Passes:
    """What is done each time along a row; the last time gives the results."""

    folds: list[list[Node]]
    kept: list[list[Value]]  # elements that are stored on the way, to be read the next times
    narrow: list[list[Value]]  # what follows for the row as a whole from the folds of one time
    shortcuts: list[list[Node]]  # divisions by what a row has one of, exponentials of elements less the row's largest

    @property
    def all_kept(self) -> list[Value]:
        return [v for values in self.kept for v in values]


def passes_of(kernel: Kernel) -> Passes:
    """Each fold as early as what it needs is known."""
    width = shape_of(kernel.outputs[0])[-1]
    number: dict[Value, int] = {}
    for node in kernel.nodes:
        known = max((number.get(v, 0) for v in node.operands if v is not None), default=0)
        number[node.result] = known + (node.op in reductions.FOLDS)
    count = max(number.values()) + 1
    folds: list[list[Node]] = [[] for _ in range(count)]
    narrow: list[list[Value]] = [[] for _ in range(count)]
    needed: dict[Value, set[int]] = {v: {count - 1} for v in kernel.outputs}
    for node in kernel.nodes:
        if node.op in reductions.FOLDS:
            folds[number[node.result] - 1].append(node)
            needed.setdefault(operand(node), set()).add(number[node.result] - 1)
        elif is_narrow(node.result, width):
            narrow[number[node.result] - 1].append(node.result)
    kept: list[list[Value]] = [[] for _ in range(count)]
    shortcuts: list[list[Node]] = [[] for _ in range(count)]
    for node in reversed(kernel.nodes):
        times = needed.get(node.result)
        if times is None or node.op in reductions.FOLDS or is_narrow(node.result, width):
            continue
        if is_expensive(node, EXPENSIVE) and len(times) > 1:
            kept[min(times)].append(node.result)
            times = {min(times)}
        if is_by_narrow(node, width) or is_of_negative(kernel, node):
            for k in times:
                shortcuts[k].insert(0, node)
        for v in node.operands:
            if v is not None:
                needed.setdefault(v, set()).update(times)
    return Passes(folds, kept, narrow, shortcuts)


def is_of_rows(node: Node) -> bool:
    """Whether a kernel of rows can compute a node: a fold, or an element-wise operation."""
    return node.op in reductions.FOLDS or is_plain(node)


def is_by_narrow(node: Node, width: int) -> bool:
    """Whether a node divides elements by what a row has one of."""
    return node.op is ops.div and node.result.dtype is float32 and is_narrow(operand(node, 1), width)


def is_of_negative(kernel: Kernel, node: Node) -> bool:
    """Whether a node is ``exp(x - max(x))``."""
    sub = kernel.producers.get(operand(node)) if node.op is ops.exp and node.result.dtype is float32 else None
    if sub is None or sub.op is not ops.sub:
        return False
    largest = kernel.producers.get(operand(sub, 1))
    return largest is not None and largest.op is ops.max and operand(largest) is operand(sub)


def is_narrow(value: Value, width: int) -> bool:
    """Whether a row has one of these."""
    shape = shape_of(value)
    return bool(shape) and shape[-1] == 1 and width != 1


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """A row of each kept value for every thread."""
    width = shape_of(kernel.outputs[0])[-1]
    values = passes_of(kernel).all_kept
    return [Value("row", TensorType(as_dtype(computed(v.dtype)), (machine.threads * width,))) for v in values]


def rows(kernel: Kernel, name: str, machine: Machine) -> Any:
    """One row after the other, dealt out to the threads."""
    frame = Frame(kernel, name, machine)
    Rows(frame, passes_of(kernel)).write()
    return frame.finish()


class Rows:
    def __init__(self, frame: Frame, passes: Passes) -> None:
        self.frame, self.passes, self.reader, self.code = frame, passes, frame.reader, frame.code
        kernel = frame.kernel
        self.shape = shape_of(kernel.outputs[0])
        self.width = self.shape[-1]
        self.buffers = dict(zip(passes.all_kept, (frame.outputs[v] for v in kernel.scratch), strict=True))
        vectors = vectorizable([n for n in kernel.nodes if n.op not in reductions.FOLDS])
        bits = max(v.dtype.bits for n in kernel.nodes for v in n.results)
        self.lanes = frame.machine.lanes(max(bits, 32)) if vectors else 1

    def write(self) -> None:
        if 0 in self.shape:
            return
        lead = self.shape[:-1]
        work = math.prod(self.shape) * len(self.frame.kernel.nodes)
        with self.frame.share("row", math.prod(lead), work) as (worker, row):
            at = self.reader.split(row, lead)
            start = worker * self.width
            for k in range(len(self.passes.folds)):
                self.along(k, at, start)

    def reciprocal(self, value: Value, at: Index) -> t.Expr:
        return self.code.let(t.const(1.0, "float32") / self.reader.broadcast(value, (*at, 0)), "factor")

    def dear(self, k: int) -> bool:
        """Whether a pass computes much per element, so that it never waits for its sums."""
        return bool(self.passes.kept[k]) or k + 1 == len(self.passes.folds)

    def along(self, k: int, at: Index, start: Any) -> None:
        """Once along a row."""
        code, reader, folds = self.code, self.reader, self.passes.folds[k]
        shortcuts = self.passes.shortcuts[k]
        factors = {n: self.reciprocal(operand(n, 1), at) for n in shortcuts if n.op is ops.div}
        known = [v for values in self.passes.kept[:k] for v in values]
        whole = self.width // self.lanes if self.lanes > 1 else 0
        ways = WAYS if whole >= 2 * WAYS and folds and not self.dear(k) else 1
        totals = [code.alloc("total", ways * self.lanes, reductions.accumulator(operand(n).dtype)) for n in folds]
        for node, total in zip(folds, totals, strict=True):
            for way in range(ways):
                with reader.loop("l", self.lanes, t.VECTORIZED) as lane:
                    first = reductions.start(node.op, operand(node).dtype)
                    code.store(total, lane + way * self.lanes, first)

        def element(i: Any, lane: Any) -> None:
            there = (*at, i)
            for v in known:
                reader.give(v, there, code.let(t.load(self.buffers[v], start + i), "kept"))
            for node in shortcuts:
                x = reader.broadcast(operand(node), there)
                made = x * factors[node] if node in factors else vector_math.exp_of_negative(code, x)
                reader.give(node.result, there, code.let(made, node.result.name))
            for v in self.passes.kept[k]:
                code.store(self.buffers[v], start + i, reader.at(v, there))
            for node, total in zip(folds, totals, strict=True):
                x, dtype = reader.at(operand(node), there), operand(node).dtype
                code.store(total, lane, reductions.fold(code, node.op, t.load(total, lane), x, dtype))
            if k + 1 == len(self.passes.folds):
                for v in self.frame.kernel.outputs:
                    self.frame.write(v, there, reader.at(v, there))

        for offset, times, ways_here in ((0, whole // ways, ways), (whole - whole % ways, whole % ways, 1)):
            if times:
                with reader.loop("i", times) as i:
                    for way in range(ways_here):
                        with reader.loop("j", self.lanes, t.VECTORIZED) as j:
                            vector = i * ways_here + (offset + way)
                            element(vector * self.lanes + j, j + way * self.lanes)
        if self.width - whole * self.lanes:
            with reader.loop("r", self.width - whole * self.lanes) as r:
                element(r + whole * self.lanes, 0)
        for node, total in zip(folds, totals, strict=True):
            made = reductions.gathered(self.frame, node.op, total, ways * self.lanes, operand(node).dtype, self.width)
            reader.give(node.result, (*at, 0), code.let(made, node.result.name))
        for v in self.passes.narrow[k]:
            reader.at(v, (*at, 0))
