"""Simple loops for products of any shape and dtype, used where the tiled templates do not apply."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mithril.graph import Node, Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import scalar_ops
from mithril_cbackend.lowering.element.element_reader import Index, conjunction, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed, rounded
from mithril_cbackend.lowering.pool.pooling import element_in_window, windows_containing

Terms = Callable[[Index, Index], tuple[t.Expr, t.Expr, list[t.Expr]]]


def accumulate(frame: KernelBuilder, result: Value, inner: Sequence[int], terms: Terms) -> Any:
    """Sum a * b over the axes ``inner``; ``terms`` returns a, b and the conditions under which a term counts."""
    code, reader, dtype = frame.code, frame.reader, result.dtype
    shape, zero = shape_of(result), t.const(0, computed(dtype))
    with reader.nest("", shape, frame.kinds(shape, math.prod(shape) * math.prod(inner))) as index:
        total = code.alloc("total", 1, computed(dtype))
        code.store(total, 0, zero)
        if 0 not in inner:
            with reader.nest("abcdefgh", inner) as inner_index:
                a, b, conditions = terms(index, inner_index)
                product = scalar_ops.mul(code, a, b, dtype)
                if conditions:
                    product = t.select(conjunction(conditions), product, zero)
                code.store(total, 0, scalar_ops.add(code, t.load(total, 0), product, dtype))
        frame.emit(index, rounded(code, t.load(total, 0), dtype))
    return frame.finish()


def matmul(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``matmul`` by simple loops."""
    frame = KernelBuilder(kernel, name, machine)
    node = kernel.anchor
    a, b = operand(node), operand(node, 1)
    left, right = shape_of(a), shape_of(b)

    def terms(index: Index, inner_index: Index) -> Any:
        rows = 0 if len(left) == 1 else 1
        columns = 0 if len(right) == 1 else 1
        batch = index[: len(index) - rows - columns]
        row = index[len(batch) : len(batch) + rows]
        column = index[len(index) - columns :] if columns else ()
        return (
            frame.reader.at(a, (*batch_position(batch, left[:-2]), *row, inner_index[0])),
            frame.reader.at(b, (*batch_position(batch, right[:-2]), inner_index[0], *column)),
            [],
        )

    return accumulate(frame, node.result, [left[-1]], terms)


def batch_position(index: Index, shape: Sequence[int]) -> Index:
    """Return the batch index of an operand that is broadcast to the result."""
    lead = len(index) - len(shape)
    return tuple(0 if n == 1 else index[lead + k] for k, n in enumerate(shape))


def dot(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``dot``; the result has the batch axes, then a's free axes, then b's."""
    frame = KernelBuilder(kernel, name, machine)
    node = kernel.anchor
    a, b, w = operand(node), operand(node, 1), node.attributes
    sizes = [shape_of(a)[k] for k in w["contract_a"]]
    free_a = [k for k in range(len(a.shape)) if k not in (*w["contract_a"], *w["batch_a"])]
    free_b = [k for k in range(len(b.shape)) if k not in (*w["contract_b"], *w["batch_b"])]

    def terms(index: Index, inner_index: Index) -> Any:
        batch = index[: len(w["batch_a"])]
        left = index[len(batch) : len(batch) + len(free_a)]
        right = index[len(batch) + len(free_a) :]
        index_a = dict(zip((*w["batch_a"], *free_a, *w["contract_a"]), (*batch, *left, *inner_index), strict=True))
        index_b = dict(zip((*w["batch_b"], *free_b, *w["contract_b"]), (*batch, *right, *inner_index), strict=True))
        return (
            frame.reader.at(a, tuple(index_a[k] for k in range(len(a.shape)))),
            frame.reader.at(b, tuple(index_b[k] for k in range(len(b.shape)))),
            [],
        )

    return accumulate(frame, node.result, sizes, terms)


def _group(node: Node, channel: Any, channels: int) -> Any:
    """Return the group of a channel."""
    groups = node.attributes["groups"]
    return 0 if groups == 1 else channel // (channels // groups)


def conv(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``conv`` by simple loops."""
    frame = KernelBuilder(kernel, name, machine)
    node, a = kernel.anchor, kernel.anchor.attributes
    x, w = operand(node), operand(node, 1)
    image, weights = shape_of(x), shape_of(w)

    def terms(index: Index, inner_index: Index) -> Any:
        first = _group(node, index[1], weights[0]) * weights[1]
        position, conditions = element_in_window(
            frame, index[2:], inner_index[1:], image[2:], a["stride"], a["padding"], a["dilation"]
        )
        element = frame.reader.at(x, (index[0], first + inner_index[0], *position))
        return element, frame.reader.at(w, (index[1], *inner_index)), conditions

    return accumulate(frame, node.result, weights[1:], terms)


def conv_input_grad(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``conv_input_grad``: each pixel of the image sums over the windows that contain it."""
    frame = KernelBuilder(kernel, name, machine)
    node, a = kernel.anchor, kernel.anchor.attributes
    g, w = operand(node), operand(node, 1)
    image, weights, windows = shape_of(node.result), shape_of(w), shape_of(g)
    per_group = weights[0] // a["groups"]

    def terms(index: Index, inner_index: Index) -> Any:
        group = _group(node, index[1], image[1])
        channel = group * per_group + inner_index[0]
        inner = index[1] - group * weights[1]
        window, conditions = windows_containing(
            frame, index[2:], inner_index[1:], windows[2:], a["stride"], a["padding"], a["dilation"]
        )
        element = frame.reader.at(g, (index[0], channel, *window))
        return element, frame.reader.at(w, (channel, inner, *inner_index[1:])), conditions

    return accumulate(frame, node.result, (per_group, *weights[2:]), terms)


def conv_weight_grad(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``conv_weight_grad``: each element of the kernel sums over windows times cotangents."""
    frame = KernelBuilder(kernel, name, machine)
    node, a = kernel.anchor, kernel.anchor.attributes
    x, g = operand(node), operand(node, 1)
    image, weights, windows = shape_of(x), shape_of(node.result), shape_of(g)

    def terms(index: Index, inner_index: Index) -> Any:
        first = _group(node, index[0], weights[0]) * weights[1]
        position, conditions = element_in_window(
            frame, inner_index[1:], index[2:], image[2:], a["stride"], a["padding"], a["dilation"]
        )
        element = frame.reader.at(x, (inner_index[0], first + index[1], *position))
        return element, frame.reader.at(g, (inner_index[0], index[0], *inner_index[1:])), conditions

    return accumulate(frame, node.result, (windows[0], *windows[2:]), terms)
