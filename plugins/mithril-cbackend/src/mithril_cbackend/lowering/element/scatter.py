"""Scatter: updates are applied in order, so that the last one wins and sums are reproducible."""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril.graph import TensorType, Value, float32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import scalar_ops
from mithril_cbackend.lowering.element.element_reader import operand, position_in, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine


def sums(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return the float32 accumulator for additions to 16-bit floats."""
    node = kernel.anchor
    if node.op is ops.scatter_nd_add and node.result.dtype.is_float and node.result.dtype.bits == 16:
        return [Value("wide", TensorType(float32, node.result.shape))]
    return []


@lowers(ops.scatter_nd, ops.scatter_nd_add, scratch=sums)
def scatter(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Generate a copy, then the updates; 16-bit floats are accumulated in a float32 scratch buffer."""
    frame = KernelBuilder(kernel, name, machine)
    node, code, reader = kernel.anchor, frame.code, frame.reader
    x, indices, updates = (operand(node, k) for k in range(3))
    shape, lead, depth = shape_of(x), shape_of(indices)[:-1], shape_of(indices)[-1]
    rows, row = math.prod(shape[:depth]), math.prod(shape[depth:])
    if 0 in shape:
        return frame.finish()
    accumulator = kernel.scratch[0] if kernel.scratch else None

    def put(flat: Any, element: t.Expr) -> None:
        if accumulator is not None:
            code.store(frame.outputs[accumulator], flat, element)
        else:
            frame.write_flat(node.result, flat, element)

    reader.shapes[x] = (rows * row,)
    with reader.loop("i", rows * row) as i:
        put(i, reader.at(x, (i,)))
    reader.shapes[updates] = (math.prod(lead), row)
    reader.shapes[indices] = (math.prod(lead), depth)
    if math.prod(lead) and row:
        with reader.loop("u", math.prod(lead)) as u:
            start: Any = 0
            for k in range(depth):
                start = start * shape[k] + position_in(reader, indices, (u, k), shape[k])
            start = code.let(t.index(start * row), "place")
            with reader.loop("e", row) as e:
                flat, element = start + e, reader.at(updates, (u, e))
                if node.op is ops.scatter_nd_add:
                    current = (
                        t.load(frame.outputs[accumulator], flat)
                        if accumulator is not None
                        else frame.read_flat(node.result, flat)
                    )
                    element = scalar_ops.add(code, current, element, x.dtype)
                put(flat, element)
    if accumulator is not None:
        with reader.loop("i", rows * row) as i:
            frame.write_flat(node.result, i, t.load(frame.outputs[accumulator], i))
    return frame.finish()
