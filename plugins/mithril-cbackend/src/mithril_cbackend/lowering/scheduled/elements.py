"""Schedules of element-wise kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, shape_of
from mithril_cbackend.lowering.element.elementwise import SMALL, aligned_values, merge, merged
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.repetition import repetition
from mithril_cbackend.lowering.element.segments import segments_of
from mithril_cbackend.lowering.element.transpose import final_transpose
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.scheduled.blocks import Blocks, whole


def declines(kernel: Kernel, machine: Machine) -> str | None:
    """Return why a kernel has no schedule."""
    if not kernel.outputs[0].shape:
        return "a scalar has no loops"
    if final_transpose(kernel, machine.lanes()) is not None:
        return "a transposition exchanges squares in registers"
    if repetition(kernel, machine.lanes()) is not None:
        return "repeated elements are spread in registers"
    if segments_of(kernel) is not None:
        return "joined or padded values have a loop for each segment"
    return None


def elements(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Write one loop nest over the results, whose innermost loop is vectorized if possible."""
    frame = KernelBuilder(kernel, name, machine)
    shape, values = shape_of(kernel.outputs[0]), aligned_values(kernel)
    extents = merge(frame, values, shape, merged(values, shape))
    # Elements of less than 32 bits are computed in 32.
    lanes = min(machine.lanes(max(v.dtype.bits, 32)) for v in kernel.outputs)
    blocks, inner = Blocks(frame, lanes), extents[-1]
    is_short = inner < lanes and (inner == 1 or len(kernel.nodes) > SMALL)
    vectors = lanes > 1 and not is_short and vectorizable(kernel.nodes)

    def write(index: Index, read: Sequence[t.Expr]) -> None:
        for v in kernel.outputs:
            frame.write(v, index, frame.reader.at(v, index))

    blocks.result("results", (*extents[:-1], whole(inner, lanes) if vectors else inner), write)
    s = blocks.schedule()
    *outer, last = s.get_loops(s.get_sblock("results"))
    if vectors:
        outer.append(blocks.vectorize(s, last, inner, overlaps=True))
    sizes = list(extents[:-1]) or [max(1, inner // lanes) if vectors else 1]
    for k, kind in machine.kinds(sizes, math.prod(extents) * len(kernel.nodes)).items():
        if kind == t.PARALLEL and k < len(outer):
            s.parallel(outer[k])
    return blocks.finish(s)
