"""Cumulative sums and products."""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import rounded
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.rows import reductions


@lowers(ops.cumsum, ops.cumprod, reads_once=True)
def cumulative(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``cumsum`` and ``cumprod``, vectorized over the last axis if the cumulative axis is another one."""
    frame = KernelBuilder(kernel, name, machine)
    node, code, reader = kernel.anchor, frame.code, frame.reader
    x, axis = operand(node), node.attributes["axis"]
    op, dtype, shape = ops.sum if node.op is ops.cumsum else ops.prod, x.dtype, shape_of(x)
    work = math.prod(shape) * len(kernel.nodes)

    def run(coordinates: dict[int, Any], begin: Any, width: int, vector: bool) -> None:
        """Accumulate along the axis for ``width`` neighbors of the last axis."""
        kind = t.VECTORIZED if vector else t.SERIAL
        total = code.alloc("total", width, reductions.accumulator(dtype))
        with reader.loop("j", width, kind) as j:
            code.store(total, j, reductions.identity(op, dtype))
        with reader.loop("r", shape[axis]) as r, reader.loop("j", width, kind) as j:
            position = shape[axis] - 1 - r if node.attributes["reverse"] else r
            full = {len(shape) - 1: reader.position(begin + j), **coordinates, axis: position}
            index = tuple(full[k] for k in range(len(shape)))
            previous = code.let(t.load(total, j), "before")
            current = code.let(reductions.fold(code, op, previous, reader.at(x, index), dtype), "after")
            frame.write(node.result, index, rounded(code, previous if node.attributes["exclusive"] else current, dtype))
            code.store(total, j, current)

    if axis == len(shape) - 1:
        with reader.nest("", shape[:-1], frame.kinds(shape[:-1], work)) as index:
            run(dict(enumerate(index)), 0, 1, False)
    else:
        vectors = vectorizable([n for n in kernel.nodes if n is not node])
        lanes = machine.lanes(max(dtype.bits, 32)) if vectors else 0
        reductions.over_blocks(frame, shape, (axis,), lanes, work, run)
    return frame.finish()
