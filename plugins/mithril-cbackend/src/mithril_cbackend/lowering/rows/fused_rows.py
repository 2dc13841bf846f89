"""Kernels with several passes over each row: softmax, normalizations and other mixes of row reductions.

A row stays in the L1 cache between passes. Values per row (sums, their roots) are computed once, and divisions by them
become multiplications by the reciprocal, with an error of at most one ulp more. Elements that are expensive and used
by several passes are saved in a row buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.graph import Node, TensorType, Value, dtype as as_dtype, float32, is_expensive
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import vector_math
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed
from mithril_cbackend.lowering.element.vectorization import is_plain, pieces, vectorizable
from mithril_cbackend.lowering.rows import reductions

UNROLL = 4  # independent accumulators in passes that do little more than reduce
EXPENSIVE = 12.0  # operations per element from which a value is saved for the later passes


@dataclass
class Passes:
    """Schedule of the passes over a row; the last pass writes the results."""

    folds: list[list[Node]]
    saved: list[list[Value]]  # elements that a pass stores for the later ones
    per_row: list[list[Value]]  # values per row that depend on the reductions of a pass
    shortcuts: list[list[Node]]  # divisions by a value per row, exponentials of x - max(x)

    @property
    def all_saved(self) -> list[Value]:
        return [v for values in self.saved for v in values]


def passes_of(kernel: Kernel) -> Passes:
    """Schedule each reduction in the first pass in which its inputs are available."""
    shape = shape_of(kernel.outputs[0])
    stages: dict[Value, int] = {}
    for node in kernel.nodes:
        stage = max((stages.get(v, 0) for v in node.operands if v is not None), default=0)
        stages[node.result] = stage + (node.op in reductions.FOLDS)
    count = max(stages.values()) + 1
    folds: list[list[Node]] = [[] for _ in range(count)]
    per_row: list[list[Value]] = [[] for _ in range(count)]
    needed: dict[Value, set[int]] = {v: {count - 1} for v in kernel.outputs}
    for node in kernel.nodes:
        if node.op in reductions.FOLDS:
            folds[stages[node.result] - 1].append(node)
            needed.setdefault(operand(node), set()).add(stages[node.result] - 1)
        elif is_per_row(node.result, shape):
            per_row[stages[node.result] - 1].append(node.result)
    saved: list[list[Value]] = [[] for _ in range(count)]
    shortcuts: list[list[Node]] = [[] for _ in range(count)]
    for node in reversed(kernel.nodes):
        passes = needed.get(node.result)
        if passes is None or node.op in reductions.FOLDS or is_per_row(node.result, shape):
            continue
        # A load from the L1 cache costs less than an exponential, but not less than an addition.
        if is_expensive(node, EXPENSIVE) and len(passes) > 1:
            saved[min(passes)].append(node.result)
            passes = {min(passes)}
        if is_division_per_row(node, shape) or is_of_negative(kernel, node):
            for k in passes:
                shortcuts[k].insert(0, node)
        for v in node.operands:
            if v is not None:
                needed.setdefault(v, set()).update(passes)
    return Passes(folds, saved, per_row, shortcuts)


def is_of_rows(node: Node) -> bool:
    """Whether a row kernel supports the node: a reduction or an elementwise op."""
    return node.op in reductions.FOLDS or is_plain(node)


def is_division_per_row(node: Node, shape: Sequence[int]) -> bool:
    """Whether the node divides elements by a value per row."""
    return node.op is ops.div and node.result.dtype is float32 and is_per_row(operand(node, 1), shape)


def is_of_negative(kernel: Kernel, node: Node) -> bool:
    """Whether a node is ``exp(x - max(x))``."""
    sub = kernel.producers.get(operand(node)) if node.op is ops.exp and node.result.dtype is float32 else None
    if sub is None or sub.op is not ops.sub:
        return False
    row_max = kernel.producers.get(operand(sub, 1))
    return row_max is not None and row_max.op is ops.max and operand(row_max) is operand(sub)


def is_per_row(value: Value, shape: Sequence[int]) -> bool:
    """Whether the value has one element per row of ``shape``; values before a reshape have rows of another rank."""
    sizes = shape_of(value)
    return len(sizes) == len(shape) and sizes[-1] == 1 and shape[-1] != 1


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return a row buffer per thread for each saved value."""
    width = shape_of(kernel.outputs[0])[-1]
    values = passes_of(kernel).all_saved
    return [Value("row", TensorType(as_dtype(computed(v.dtype)), (machine.threads * width,))) for v in values]


def lanes_of(kernel: Kernel, machine: Machine) -> int:
    """Return the length of a kernel's vectors."""
    vectors = vectorizable([n for n in kernel.nodes if n.op not in reductions.FOLDS])
    bits = max(v.dtype.bits for n in kernel.nodes for v in n.results)
    return machine.lanes(max(bits, 32)) if vectors else 1


def rows(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Emit the kernel, parallelized over rows."""
    frame, passes = KernelBuilder(kernel, name, machine), passes_of(kernel)
    buffers = dict(zip(passes.all_saved, (frame.outputs[v] for v in kernel.scratch), strict=True))
    Rows(frame, passes, buffers).write()
    return frame.finish()


class Rows:
    """Loops over rows and passes."""

    def __init__(self, frame: KernelBuilder, passes: Passes, buffers: dict[Value, t.Buffer]) -> None:
        self.buffers = buffers  # of the elements that passes save
        self.factors: dict[Node, t.Expr] = {}  # of divisions by values per row
        self.frame, self.passes, self.reader, self.code = frame, passes, frame.reader, frame.code
        kernel = frame.kernel
        self.shape = shape_of(kernel.outputs[0])
        self.width = self.shape[-1]
        self.lanes = lanes_of(kernel, frame.machine)

    def write(self) -> None:
        if 0 in self.shape:
            return
        lead = self.shape[:-1]
        work = math.prod(self.shape) * len(self.frame.kernel.nodes)
        with self.frame.share("row", math.prod(lead), work) as (worker, row):
            index = self.reader.split(row, lead)
            start = worker * self.width
            for k in range(len(self.passes.folds)):
                self.along(k, index, start)

    def reciprocal(self, value: Value, index: Index) -> t.Expr:
        return self.code.let(t.const(1.0, "float32") / self.reader.broadcast(value, (*index, 0)), "factor")

    def is_compute_bound(self, k: int) -> bool:
        """Whether a pass is compute-bound, so that the latency of its accumulators is hidden."""
        return bool(self.passes.saved[k]) or k + 1 == len(self.passes.folds)

    def begin(self, k: int, index: Index) -> None:
        """Emit the factors of a row that pass ``k`` reads."""
        divisions = (n for n in self.passes.shortcuts[k] if n.op is ops.div)
        self.factors = {n: self.reciprocal(operand(n, 1), index) for n in divisions}

    def read(self, k: int, element_index: Index, position: Any) -> None:
        """Define the values of an element that pass ``k`` loads or computes faster, and save those for later passes."""
        code, reader = self.code, self.reader
        for v in (v for values in self.passes.saved[:k] for v in values):
            reader.define(v, element_index, code.let(t.load(self.buffers[v], position), "kept"))
        for node in self.passes.shortcuts[k]:
            x = reader.broadcast(operand(node), element_index)
            result = x * self.factors[node] if node in self.factors else vector_math.exp_of_negative(code, x)
            reader.define(node.result, element_index, code.let(result, node.result.name))
        for v in self.passes.saved[k]:
            code.store(self.buffers[v], position, reader.at(v, element_index))

    def end(self, k: int, index: Index, totals: Sequence[tuple[t.Buffer, int]]) -> None:
        """Emit the values per row that pass ``k`` yields from the lanes of its partial results."""
        for node, (total, lanes) in zip(self.passes.folds[k], totals, strict=True):
            result = reductions.reduce_lanes(self.frame, node.op, total, lanes, operand(node).dtype, self.width)
            self.reader.define(node.result, (*index, 0), self.code.let(result, node.result.name))
        for v in self.passes.per_row[k]:
            self.reader.at(v, (*index, 0))

    def unroll(self, k: int) -> int:
        """Return the number of vectors of partial results of a pass."""
        is_long = not isinstance(self.width, int) or self.width // max(self.lanes, 1) >= 2 * UNROLL
        return UNROLL if self.lanes > 1 and is_long and self.passes.folds[k] and not self.is_compute_bound(k) else 1

    def along(self, k: int, index: Index, start: Any) -> None:
        """Emit pass ``k`` over a row."""
        code, reader, folds = self.code, self.reader, self.passes.folds[k]
        self.begin(k, index)
        width, unroll = reductions.last_size(self.shape), self.unroll(k)
        num_vectors = width // self.lanes if self.lanes > 1 else 0
        totals = [code.alloc("total", unroll * self.lanes, reductions.accumulator(operand(n).dtype)) for n in folds]
        for node, total in zip(folds, totals, strict=True):
            for slot in range(unroll):
                with reader.loop("l", self.lanes, t.VECTORIZED) as lane:
                    first = reductions.identity(node.op, operand(node).dtype)
                    code.store(total, lane + slot * self.lanes, first)

        def element(i: Any, lane: Any) -> None:
            element_index = (*index, i)
            self.read(k, element_index, start + i)
            for node, total in zip(folds, totals, strict=True):
                x, dtype = reader.at(operand(node), element_index), operand(node).dtype
                code.store(total, lane, reductions.fold(code, node.op, t.load(total, lane), x, dtype))
            if k + 1 == len(self.passes.folds):
                for v in self.frame.kernel.outputs:
                    self.frame.write(v, element_index, reader.at(v, element_index))

        for offset, num_groups, group in (
            (0, num_vectors // unroll, unroll),
            (num_vectors - num_vectors % unroll, num_vectors % unroll, 1),
        ):
            if num_groups:
                with reader.loop("i", num_groups) as i:
                    for slot in range(group):
                        with reader.loop("j", self.lanes, t.VECTORIZED) as j:
                            vector = i * group + (offset + slot)
                            element(vector * self.lanes + j, j + slot * self.lanes)
        rest = width - num_vectors * self.lanes
        # A rest of scalars took longer than the vectors: log-softmax of rows of 73 took 1.7 times the time.
        parts = pieces(rest, self.lanes) if self.lanes > 1 and isinstance(rest, int) else []
        for offset_in_rest, size in parts:
            with reader.loop("j", size, t.VECTORIZED if size > 1 else t.SERIAL) as j:
                element(j + (num_vectors * self.lanes + offset_in_rest), j)
        if rest and not parts:
            with reader.loop("r", rest) as r:
                element(r + num_vectors * self.lanes, 0)
        self.end(k, index, [(total, unroll * self.lanes) for total in totals])
