"""Schedules of softmax, normalizations and other kernels with several passes over each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mithril.graph import Node
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed
from mithril_cbackend.lowering.rows import reductions
from mithril_cbackend.lowering.rows.fused_rows import Passes, Rows, lanes_of, passes_of
from mithril_cbackend.lowering.scheduled.blocks import Blocks, Fold, whole

STACK = 16 << 10  # bytes of the saved elements of a row in a thread's own memory


def declines(kernel: Kernel, machine: Machine) -> str | None:
    """Return why a kernel has no schedule."""
    passes, lanes, shape = passes_of(kernel), lanes_of(kernel, machine), shape_of(kernel.outputs[0])
    if lanes == 1 or 0 in shape:
        return "no vectors"
    if shape[-1] < lanes:
        return "rows shorter than a vector"
    if any(len(folds) > 1 and saved for folds, saved in zip(passes.folds, passes.saved, strict=True)):
        return "several reductions of saved elements"
    if sum(max(v.dtype.bits, 32) for v in passes.all_saved) // 8 * shape[-1] > STACK:
        return f"a row saves more than {STACK} bytes"
    return None


def rows(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Write a kernel of rows."""
    return Scheduled(KernelBuilder(kernel, name, machine), passes_of(kernel)).finish()


class Scheduled(Rows):
    """Passes as stages: partial results, then a stage of the values per row, which the next pass follows."""

    def __init__(self, frame: KernelBuilder, passes: Passes) -> None:
        super().__init__(frame, passes, {})
        self.index: Index = ()  # of the row
        self.blocks = Blocks(frame, self.lanes)

    def enter_row(self, row: Any) -> None:
        self.index = self.reader.split(row, self.shape[:-1])
        self.buffers = {v: self.code.alloc("row", self.width, computed(v.dtype)) for v in self.passes.all_saved}
        self.begin(0, self.index)

    def partial_results(self, k: int, node: Node, name: str, before: Any) -> Any:
        """Return the stage of partial results of a reduction, which follows the values per row before its pass."""
        width, dtype = self.unroll(k) * self.lanes, operand(node).dtype

        def element(index: Index, read: Sequence[t.Expr]) -> t.Expr:
            position = self.reader.position(index[2] * width + index[1])
            self.read(k, (*self.index, position), position)
            return self.reader.at(operand(node), (*self.index, position))

        def source(*i: Any) -> Any:
            return self.blocks.call(reductions.accumulator(dtype), i, element, before(i[0]))

        extents = (math.prod(self.shape[:-1]), width)
        return self.blocks.fold(name, extents, [whole(self.width, width) // width], Fold(node.op, dtype), source)

    def values_per_row(self, k: int, totals: Sequence[Any]) -> Any:
        """Return the stage of statements between two passes."""
        width = self.unroll(k) * self.lanes

        def write(index: Index, read: Sequence[t.Expr]) -> None:
            self.end(k, self.index, [(reductions.array_of(x), width) for x in read[::2]])
            self.begin(k + 1, self.index)

        def reads(row: Any) -> list[Any]:
            return [total(row, lane) for total in totals for lane in (0, width - 1)]

        return self.blocks.statements(f"row{k}", (math.prod(self.shape[:-1]),), write, reads)

    def finish(self) -> t.Function:
        """Schedule the passes, and return the function."""
        blocks, last = self.blocks, len(self.passes.folds) - 1
        stages: list[Any] = []
        totals: list[tuple[int, str]] = []

        def before(row: Any) -> list[Any]:
            return [stages[-1](row)] if stages else []

        for k in range(last):
            names = [(n, f"total{k}_{m}") for m, n in enumerate(self.passes.folds[k])]
            totals += [(k, name) for _, name in names]
            stages.append(self.values_per_row(k, [self.partial_results(k, n, name, before) for n, name in names]))

        def write(index: Index, read: Sequence[t.Expr]) -> None:
            position = (*self.index, index[1])
            self.read(last, position, index[1])
            for v in self.frame.kernel.outputs:
                self.frame.write(v, position, self.reader.at(v, position))

        blocks.result(
            "results", (math.prod(self.shape[:-1]), whole(self.width, self.lanes)), write, lambda row, _: before(row)
        )
        s = blocks.schedule()
        row, elements = s.get_loops(s.get_sblock("results"))
        blocks.at_entry(s, row, self.enter_row)
        if self.frame.machine.parallel(math.prod(self.shape) * len(self.frame.kernel.nodes)) == t.PARALLEL:
            s.parallel(row)
        blocks.vectorize(s, elements, self.width, overlaps=True)
        for k in reversed(range(last)):
            blocks.within(s, f"row{k}", row)
            for name in (name for number, name in totals if number == k):
                blocks.partial_results(s, name, row, self.unroll(k) * self.lanes, self.width)
        return blocks.finish(s)
