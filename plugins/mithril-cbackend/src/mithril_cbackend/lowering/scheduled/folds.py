"""Schedules of reductions: vectors of partial results along the last axis, or of results if it is not reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mithril.graph import Node
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.rows import reductions
from mithril_cbackend.lowering.rows.reductions import UNROLL, Reduction
from mithril_cbackend.lowering.scheduled.blocks import Blocks, Fold, whole


def declines(kernel: Kernel, machine: Machine) -> str | None:
    """Return why a kernel has no schedule."""
    shape = shape_of(operand(kernel.anchor))
    lanes = machine.lanes(max(operand(kernel.anchor).dtype.bits, 32))
    if not shape or 0 in shape or lanes == 1 or not vectorizable([n for n in kernel.nodes if n is not kernel.anchor]):
        return "no vectors"
    return "rows shorter than a vector" if shape[-1] < lanes else None


def signature(node: Node) -> str:
    """Return the key of a reduction's schedules."""
    return f"{node.op.name} of axes {node.attributes['axis']} of {operand(node).type}"


def schedules(node: Node, machine: Machine) -> list[str]:
    """Return the numbers of vectors that an iteration may have."""
    shape = shape_of(operand(node))
    lanes = machine.lanes(max(operand(node).dtype.bits, 32))
    if machine.scheduler == "own" or lanes == 1 or not shape or not operand(node).type.is_static:
        return []
    return [str(vectors) for vectors in (1, 2, 4, 8) if shape[-1] >= vectors * lanes]


class Folds:
    """Writer of one reduction."""

    def __init__(self, r: Reduction) -> None:
        self.r, self.reader = r, r.frame.reader
        self.fold = Fold(r.node.op, r.x.dtype)
        self.inner = r.shape[-1]
        self.lead = r.kept if r.is_along else r.kept[:-1]
        self.outer = r.reduced[:-1] if r.is_along else r.reduced
        self.position: dict[int, Any] = {}  # axis of the operand -> position, for those that loops around vectors have
        many = self.inner >= 2 * UNROLL * r.lanes
        measured = r.frame.machine.schedules.get(signature(r.node))
        usual = (UNROLL if many else 1) if r.is_along else UNROLL
        self.width = r.lanes * min(int(measured or usual), self.inner // r.lanes)
        self.blocks = Blocks(r.frame, r.lanes)

    def enter_row(self, row: Any) -> None:
        self.position |= zip(self.lead, self.reader.split(row, [self.r.shape[k] for k in self.lead]), strict=True)

    def enter_outer(self, k: Any) -> None:
        self.position |= zip(self.outer, self.reader.split(k, [self.r.shape[a] for a in self.outer]), strict=True)

    def element(self, last: Any) -> t.Expr:
        """Return an element of the operand."""
        full = {**self.position, len(self.r.shape) - 1: last}
        return self.reader.at(self.r.x, tuple(full[k] for k in range(len(self.r.shape))))

    def total(self, extents: Sequence[int], over: Sequence[int], element: Any) -> Any:
        dtype = reductions.accumulator(self.r.x.dtype)
        return self.blocks.fold("total", extents, over, self.fold, lambda *i: self.blocks.call(dtype, i, element))

    @property
    def rows(self) -> int:
        return math.prod(self.r.shape[k] for k in self.lead)

    @property
    def outer_size(self) -> int:
        return math.prod(self.r.shape[k] for k in self.outer)

    def parallel(self, s: Any, loop: Any) -> None:
        work = math.prod(self.r.shape) * len(self.r.frame.kernel.nodes)
        if self.r.frame.machine.parallel(work) == t.PARALLEL:
            s.parallel(loop)

    def along(self) -> Any:
        """Reduce the last axis, and others."""
        r, blocks, width = self.r, self.blocks, self.width

        def element(index: Index, read: Sequence[t.Expr]) -> t.Expr:
            return self.element(self.reader.position(index[3] * width + index[1]))

        def write(index: Index, read: Sequence[t.Expr]) -> None:
            array = reductions.array_of(read[0])
            result = reductions.reduce_lanes(r.frame, r.node.op, array, width, r.x.dtype, r.count)
            r.emit(self.position, result)

        total = self.total((self.rows, width), (self.outer_size, whole(self.inner, width) // width), element)
        blocks.result("results", (self.rows,), write, lambda row: (total(row, 0), total(row, width - 1)))
        s = blocks.schedule()
        (row,) = s.get_loops(s.get_sblock("results"))
        blocks.at_entry(s, row, self.enter_row)
        self.parallel(s, row)
        outer, _ = blocks.partial_results(s, "total", row, width, self.inner, axes=2)
        blocks.at_entry(s, outer, self.enter_outer)
        return blocks.finish(s)

    def across(self) -> Any:
        """Reduce other axes than the last one."""
        r, blocks = self.r, self.blocks

        def element(index: Index, read: Sequence[t.Expr]) -> t.Expr:
            return self.element(index[1])

        def write(index: Index, read: Sequence[t.Expr]) -> None:
            code, last = r.frame.code, len(r.shape) - 1
            result = reductions.finalize(code, r.node.op, code.let(read[0]), r.x.dtype, r.count)
            r.emit({**self.position, last: index[1]}, result)

        extents = (self.rows, whole(self.inner, self.width))
        total = self.total(extents, (self.outer_size,), element)
        blocks.result("results", extents, write, lambda *i: (total(*i),))
        s = blocks.schedule()
        row, last = s.get_loops(s.get_sblock("results"))
        blocks.at_entry(s, row, self.enter_row)
        groups = blocks.vectorize(s, last, self.inner, self.width)
        self.parallel(s, row if self.rows > 1 else groups)
        _, (outer,) = blocks.accumulate(s, "total", groups, lanes=self.width)
        blocks.at_entry(s, outer, self.enter_outer)
        return blocks.finish(s)


def folds(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Write a reduction."""
    writer = Folds(Reduction.of(kernel, name, machine))
    return writer.along() if writer.r.is_along else writer.across()
