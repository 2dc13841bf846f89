"""Transposes that move the last axis: squares as long as a vector, turned in registers.

What comes before the transpose is computed in the order in which it lies in memory, into a square that is then turned.
"""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril.base import float32
from mithril.ir import Node
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import Frame
from mithril_cbackend.lowering.element.vectorization import vectorizable


def turns(kernel: Kernel, lanes: int) -> Node | None:
    """The transpose that a kernel ends with, where squares of both its moved axes fit."""
    node = kernel.producers.get(kernel.outputs[0])
    if len(kernel.outputs) != 1 or node is None or node.op is not ops.transpose or lanes < 2:
        return None
    perm, shape = node.attributes["perm"], shape_of(node.result)
    if not perm or node.result.dtype is not float32 or perm[-1] == len(perm) - 1 or not vectorizable(kernel.nodes):
        return None
    return node if shape[-1] >= lanes and shape[perm.index(len(perm) - 1)] >= lanes else None


def turned(frame: Frame, node: Node) -> None:
    """The whole result, squares first, then what is left at both edges."""
    reader, code, lanes = frame.reader, frame.code, frame.machine.lanes()
    perm, shape = node.attributes["perm"], shape_of(node.result)
    rank, moved = len(shape), perm.index(len(shape) - 1)
    source, target = operand(node), frame.outputs[node.result]
    stored = reader.buffers.get(source)
    steps = [math.prod(shape[k + 1 :]) for k in range(rank)]
    before = [math.prod(shape_of(source)[perm[k] + 1 :]) for k in range(rank)]
    others = [k for k in range(rank) if k not in (moved, rank - 1)]
    down, across = shape[moved] // lanes, shape[-1] // lanes

    def at(lead: Any, i: Any, j: Any) -> list[Any]:
        where: list[Any] = [0] * rank
        for k, p in zip(others, lead, strict=True):
            where[k] = p
        where[moved], where[-1] = i, j
        return where

    def place(where: list[Any], strides: list[int]) -> Any:
        total: Any = 0
        for p, step in zip(where, strides, strict=True):
            total = total + p * step
        return total

    def square(where: list[Any]) -> None:
        to = place(where, steps)
        if stored is not None:
            code.transpose(lanes, stored, place(where, before), before[-1], target, to, steps[moved])
            return
        held = code.alloc("square", lanes * lanes, "float32")
        with reader.loop("row", lanes) as row, reader.loop("lane", lanes, t.VECTORIZED) as lane:
            there = [*where]
            there[moved], there[-1] = where[moved] + lane, where[-1] + row
            element = reader.at(source, tuple(there[perm.index(k)] for k in range(rank)))
            code.store(held, row * lanes + lane, element)
        code.transpose(lanes, held, 0, lanes, target, to, steps[moved])

    def one(where: list[Any]) -> None:
        frame.write(node.result, tuple(where), reader.at(node.result, tuple(where)))

    lead = [shape[k] for k in others]
    with frame.share("block", math.prod(lead) * down, math.prod(shape)) as (_, item):
        *outer, i = reader.split(item, (*lead, down))
        with reader.loop("j", across) as j:
            square(at(outer, i * lanes, j * lanes))
    for (first, high), (begin, wide) in (
        ((down * lanes, shape[moved] % lanes), (0, shape[-1])),
        ((0, down * lanes), (across * lanes, shape[-1] % lanes)),
    ):
        if high and wide:
            with reader.nest("", lead) as there, reader.loop("i", high) as i, reader.loop("j", wide) as j:
                one(at(there, i + first, j + begin))
