"""Elements repeated along a new last axis, as nearest upsampling does: loaded as vectors, and spread in registers."""

from __future__ import annotations

import math

from mithril import ops
from mithril.graph import Node, float32, is_static
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder

# Vectors that are written for each one read; each has a register of indices. Not tuned: the shapes of
# benchmarks/bench_sweep.py have 2 to 4.
MAX_REPEATS = 8


def repetition(kernel: Kernel, lanes: int) -> Node | None:
    """Return the only node of a kernel if it repeats at least a vector of stored elements, or None."""
    node = kernel.anchor
    if kernel.nodes != [node] or node.op is not ops.broadcast_to or node.result.dtype is not float32:
        return None
    source, shape = shape_of(operand(node)), shape_of(node.result)
    if not is_static(shape) or len(shape) < 2 or source != (*shape[:-1], 1):
        return None
    return node if 1 < shape[-1] <= min(lanes, MAX_REPEATS) and math.prod(source) >= lanes else None


def repeat_elements(frame: KernelBuilder, node: Node) -> None:
    """Generate the loop over the elements; the last vector of them may overlap the one before."""
    reader, code, lanes = frame.reader, frame.code, frame.machine.lanes()
    source, target = reader.buffers[operand(node)], frame.outputs[node.result]
    size, times = math.prod(shape_of(operand(node))), shape_of(node.result)[-1]

    def repeat(first: t.Expr | int) -> None:
        elements = t.load(source, t.vector(first, lanes))
        for k in range(0, times * lanes, lanes):
            spread = t.shuffle(elements, elements, [(k + lane) // times for lane in range(lanes)])
            code.store(target, t.vector(first * times + k, lanes), spread)

    with reader.loop("i", size // lanes, frame.parallel(size * times)) as i:
        repeat(i * lanes)
    if size % lanes:
        repeat(size - lanes)
