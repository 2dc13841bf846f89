"""Signals as images of one row, where they are convolved as bytes or as bfloat16.

A signal [batch, channels, length] has the elements of an image [batch, channels, 1, length], so that a reshape leaves
convolutions, pools and averages of two axes, which kernels of int8x4 groups compute. It moves behind the operations
that follow, as the transposes of images do, and before the rounding of the operands of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Editor, Graph, Node, Value, bfloat16
from mithril_cbackend.graph import byte_images
from mithril_cbackend.instructions import BYTES, PAIRS
from mithril_cbackend.lowering.element.element_reader import is_uniform, operand, shape_of
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.element.vectorization import is_plain

LENGTH, WIDTH = 2, 3  # the axis of a signal, and where an image has it
ROUNDINGS = (ops.quantize, ops.dequantize)
Attributes = dict[str, Any]


def _axis(k: int) -> int:
    return WIDTH if k == LENGTH else k


def _window(a: Attributes) -> Attributes:
    pads = {"padding": ((0, 0), *a["padding"])}
    return a | {n: (1, *a[n]) for n in ("kernel", "stride", "dilation") if n in a} | pads


def _fold(a: Attributes) -> Attributes:
    return a | {"axis": tuple(k for axis in a["axis"] for k in ((2, 3) if axis == LENGTH else (axis,)))}


# operations of signals -> their attributes for images
OF_IMAGES: dict[Any, Callable[[Attributes], Attributes]] = {
    **dict.fromkeys((ops.conv, ops.max_pool, ops.avg_pool), _window),
    ops.mean: _fold,
    ops.pad: lambda a: a | {"widths": (*a["widths"][:2], (0, 0), a["widths"][2])},
    ops.concat: lambda a: a | {"axis": _axis(a["axis"])},
    ops.slice: lambda a: a | {"axes": tuple(map(_axis, a["axes"]))},
    **dict.fromkeys(ROUNDINGS, lambda a: a | {"axis": None if a["axis"] is None else _axis(a["axis"])}),
}


def as_images(graph: Graph, machine: Machine) -> Graph:
    """Return the graph with images instead of the signals that convolutions of int8x4 groups read and write."""
    kinds = byte_images.kinds(machine)
    is_signal = any(n.op is ops.conv and len(n.result.shape) == 3 for n in graph.nodes)
    return Signals(graph, kinds.keys()).run() if kinds and is_signal else graph


class Signals:
    """Rewriter of one graph; regions are unchanged."""

    def __init__(self, graph: Graph, kinds: Collection[str]) -> None:
        self.editor: Editor = graph.edit()
        self.kinds = kinds

    def run(self) -> Graph:
        for node in self.editor.nodes():
            if len(node.results) != 1 or not self.is_signal(node):
                continue
            follows = any(self.source(v) is not None for v in node.operands if v is not None)
            if self.is_of_int8x4(node) if node.op is ops.conv else follows:
                self.lift(node)
        return self.editor.freeze()

    def is_signal(self, node: Node) -> bool:
        """Whether a node is an operation of signals that images have, too."""
        source = node.operands[0] if node.op is ops.mean else node.result
        is_known = node.op in OF_IMAGES or (is_plain(node) and not is_uniform(node))
        return source is not None and len(source.shape) == 3 and is_known

    def is_of_int8x4(self, node: Node) -> bool:
        """Whether a convolution reads elements of 8 bits that were dequantized, or bfloat16, and constants."""
        left, right = (self.editor.producer(self.behind(operand(node, k))) for k in range(2))
        if left is None:
            return False
        if left.op is ops.dequantize and right is not None and right.op is ops.dequantize:
            return BYTES in self.kinds and self.is_constant(operand(right))
        is_pair = left.op is ops.cast and operand(left).dtype is bfloat16
        return PAIRS in self.kinds and is_pair and self.is_constant(operand(node, 1))

    def is_constant(self, value: Value) -> bool:
        return self.editor.data_of(value) is not None

    def source(self, value: Value) -> Value | None:
        """Return the image that a signal is a view of, if there is one."""
        producer = self.editor.producer(value)
        if producer is None or producer.op is not ops.reshape or len(value.shape) != 3:
            return None
        return operand(producer) if shape_of(operand(producer)) == image_shape(value) else None

    def behind(self, value: Value) -> Value:
        """Return the image that a signal is a view of, or else the signal."""
        source = self.source(value)
        return value if source is None else source

    def image(self, value: Value, reader: Value) -> Value:
        """Return the image with the elements of an operand; a vector of the last axis is one already."""
        producer = self.editor.producer(value)
        if len(value.shape) < 2 or self.source(value) is not None:
            return self.behind(value)
        if producer is not None and (producer.op in ROUNDINGS or producer.op is ops.cast) and self.is_signal(producer):
            return self.lift(producer)
        data = self.editor.data_of(value)
        with self.editor.before(self.editor.producer(reader)) as b:
            if data is not None:
                return b.constant(np.asarray(data).reshape(image_shape(value)), name=value.name)
            return ops.reshape(value, shape=image_shape(value))

    def lift(self, node: Node) -> Value:
        """Replace a node by a view of the result for images, and return that."""
        signal = node.result
        axes = node.operands[1:] if node.op in ROUNDINGS else ()  # scales and zero points
        images: dict[Value | None, Value | None] = {None: None, **{v: v for v in axes}}
        for v in node.operands:
            if v is not None and v not in images:
                images[v] = self.image(v, signal)
        attributes = dict(node.attributes)
        if node.op is ops.broadcast_to:
            attributes["shape"] = image_shape(signal)
        elif node.op in OF_IMAGES:
            attributes = OF_IMAGES[node.op](attributes)
        current = self.editor.producer(signal)  # its operands may have been replaced
        assert current is not None
        with self.editor.before(current):
            result = node.op(*[images[v] for v in node.operands], **attributes)
            view = result if result.shape == signal.shape else ops.reshape(result, shape=shape_of(signal))
        self.editor.replace_value(signal, view)
        self.editor.erase_dead(current)
        return result  # type: ignore[no-any-return]


def image_shape(value: Value) -> Any:
    """Return the shape of a signal, or of an operand broadcast to one, as an image of one row."""
    *outer, length = shape_of(value)
    return (*outer, 1, length)
