"""Shapes: views wherever strides can say it, moves where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril.graph import Node
from mithril_ggml.lowering.table import Array, row
from mithril_ggml.program.program_builder import ProgramBuilder, static
from mithril_ggml.program.strided_tensor import Tensor, row_strides


@row("reshape")
def _reshape(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    return draft.shaped(x, static(node.result))


@row("transpose")
def _transpose(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    perm = node.attributes["perm"]
    return x.transposed(tuple(reversed(range(x.rank))) if perm is None else tuple(perm))


@row("broadcast_to")
def _broadcast(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    expanded = x.expanded(static(node.result))
    expanded.scalar = x.scalar
    return expanded


@row("barrier")
def _barrier(draft: ProgramBuilder, node: Node, *xs: Tensor) -> tuple[Tensor, ...]:
    return xs


@row("slice")
def _slice(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    a = node.attributes
    index = [slice(None)] * x.rank
    for start, stop, step, axis in zip(a["starts"], a["stops"], a["steps"], a["axes"], strict=True):
        index[axis] = slice(start, stop, step)
    return _part(x, tuple(index))


@row("flip")
def _flip(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    axes = node.attributes["axis"]
    return _part(x, tuple(slice(None, None, -1) if k in axes else slice(None) for k in range(x.rank)))


def _part(x: Tensor, index: tuple[slice, ...]) -> Tensor:
    """Convert slices to shape, offset and strides."""
    shape, strides, offset = [], [], 0
    for n, stride, part in zip(x.shape, x.strides, index):
        start, stop, step = part.indices(n)
        count = len(range(start, stop, step))
        offset += start * stride if count else 0
        shape.append(count)
        strides.append(stride * step)
    if 0 in shape:
        return x.view(tuple(shape), row_strides(tuple(shape), x.dtype))
    return x.view(tuple(shape), tuple(strides), offset)


@row("concat")
def _concat(draft: ProgramBuilder, node: Node, *xs: Tensor) -> Tensor:
    out = draft.like(node.result)
    axis = node.attributes["axis"]
    offset = 0
    for x in xs:
        index = tuple(slice(offset, offset + x.shape[k]) if k == axis else slice(None) for k in range(x.rank))
        if x.size:
            draft.copy(x, _part(out, index))
        offset += x.shape[axis]
    return out


def fixed(draft: ProgramBuilder, node: Node, array: Any) -> Tensor:
    """Lower a constant."""
    kind = node.result.dtype
    return draft.constant_tensor(np.asarray(array, dtype=kind.numpy), kind, node.result.name)


@row("constant", "size_value")
def _constant(draft: ProgramBuilder, node: Node) -> Tensor:
    return fixed(draft, node, node.attributes["value"])


@row("full")
def _full(draft: ProgramBuilder, node: Node) -> Tensor:
    one = fixed(draft, node, node.attributes["value"])
    expanded = one.expanded(static(node.result))
    expanded.scalar = one.scalar
    return expanded


@row("iota")
def _iota(draft: ProgramBuilder, node: Node) -> Tensor:
    shape, axis = static(node.result), node.attributes["axis"]
    line = fixed(draft, node, np.arange(shape[axis]))
    return line.view((*[1] * axis, shape[axis], *[1] * (len(shape) - axis - 1)), _along(axis, shape, line)).expanded(
        shape
    )


def _along(axis: int, shape: Sequence[int], line: Tensor) -> tuple[int, ...]:
    return tuple(line.strides[0] if k == axis else 0 for k in range(len(shape)))


@row("pad", when=lambda node: node.attributes["mode"] == "constant")
def _pad(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    out, value = draft.like(node.result), node.attributes["value"]
    interior = tuple(slice(b, b + n) for n, (b, _) in zip(x.shape, node.attributes["widths"], strict=True))

    def pad(x: Array, out: Array) -> None:
        out[...] = value
        out[interior] = x

    draft.numpy("pad", pad, [x], [out])
    return out
