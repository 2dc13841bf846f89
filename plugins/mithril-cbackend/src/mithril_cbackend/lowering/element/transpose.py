"""Transposes that move the last axis: square blocks of the vector length, transposed in registers.

The producers of the operand are evaluated in its memory order into a block, which is then transposed.
"""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril.graph import Node, float32, is_static
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder
from mithril_cbackend.lowering.element.vectorization import vectorizable


def final_transpose(kernel: Kernel, lanes: int) -> Node | None:
    """Return the kernel's final transpose if both of its moved axes are known and at least a vector long, or None."""
    node = kernel.producers.get(kernel.outputs[0])
    if len(kernel.outputs) != 1 or node is None or node.op is not ops.transpose or lanes < 2:
        return None
    perm, shape = node.attributes["perm"], shape_of(node.result)
    if not perm or node.result.dtype is not float32 or perm[-1] == len(perm) - 1 or not vectorizable(kernel.nodes):
        return None
    sizes = shape[-1], shape[perm.index(len(perm) - 1)]
    return node if is_static(shape) and min(sizes) >= lanes else None


def transpose_squares(frame: KernelBuilder, node: Node) -> None:
    """Generate the full result: square blocks first, then the remainder at both edges."""
    reader, code, lanes = frame.reader, frame.code, frame.machine.lanes()
    perm, shape = node.attributes["perm"], shape_of(node.result)
    rank, last_axis = len(shape), perm.index(len(shape) - 1)
    source, target = operand(node), frame.outputs[node.result]
    stored = reader.buffers.get(source)
    target_strides = [math.prod(shape[k + 1 :]) for k in range(rank)]
    source_strides = [math.prod(shape_of(source)[perm[k] + 1 :]) for k in range(rank)]
    outer_axes = [k for k in range(rank) if k not in (last_axis, rank - 1)]
    down, across = shape[last_axis] // lanes, shape[-1] // lanes

    def at(lead: Any, i: Any, j: Any) -> list[Any]:
        index: list[Any] = [0] * rank
        for k, p in zip(outer_axes, lead, strict=True):
            index[k] = p
        index[last_axis], index[-1] = i, j
        return index

    def offset(index: list[Any], strides: list[int]) -> Any:
        total: Any = 0
        for p, step in zip(index, strides, strict=True):
            total = total + p * step
        return total

    def square(index: list[Any]) -> None:
        target_start = offset(index, target_strides)
        if stored is not None:
            code.transpose(
                lanes,
                stored,
                offset(index, source_strides),
                source_strides[-1],
                target,
                target_start,
                target_strides[last_axis],
            )
            return
        block = code.alloc("square", lanes * lanes, "float32")
        with reader.loop("row", lanes) as row, reader.loop("lane", lanes, t.VECTORIZED) as lane:
            outer_index = [*index]
            outer_index[last_axis], outer_index[-1] = index[last_axis] + lane, index[-1] + row
            element = reader.at(source, tuple(outer_index[perm.index(k)] for k in range(rank)))
            code.store(block, row * lanes + lane, element)
        code.transpose(lanes, block, 0, lanes, target, target_start, target_strides[last_axis])

    def one(index: list[Any]) -> None:
        frame.write(node.result, tuple(index), reader.at(node.result, tuple(index)))

    lead = [shape[k] for k in outer_axes]
    with frame.share("block", math.prod(lead) * down, math.prod(shape)) as (_, item):
        *outer, i = reader.split(item, (*lead, down))
        with reader.loop("j", across) as j:
            square(at(outer, i * lanes, j * lanes))
    for (first, height), (left, width) in (
        ((down * lanes, shape[last_axis] % lanes), (0, shape[-1])),
        ((0, down * lanes), (across * lanes, shape[-1] % lanes)),
    ):
        if height and width:
            with reader.nest("", lead) as outer_index, reader.loop("i", height) as i, reader.loop("j", width) as j:
                one(at(outer_index, i + first, j + left))
