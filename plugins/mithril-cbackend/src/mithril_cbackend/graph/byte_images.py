"""Images with their channels last, between convolutions of bytes or of bfloat16.

A convolution of unsigned bytes with constant signed ones, or of bfloat16, becomes ``c.conv_int8x4``, which reads and
writes channels last. The transpose of its result moves behind the element-wise operations and pools that follow, until
the next convolution cancels it: between convolutions nothing is transposed, and only narrow elements are stored.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Builder, Editor, Graph, Node, Value, bfloat16, float32, int32, uint8
from mithril_cbackend.graph.byte_pools import CHANNELS_FIRST, CHANNELS_LAST, shuffle, shuffled
from mithril_cbackend.instructions import BYTES, PAIRS, PORTABLE
from mithril_cbackend.lowering.element.element_reader import is_uniform, operand, shape_of, typical
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.element.vectorization import is_plain
from mithril_cbackend.lowering.int8x4.byte_operations import (
    conv_int8x4,
    int8x4_of_pixels,
    max_pool_last,
    sum_pool_bytes,
)
from mithril_cbackend.lowering.int8x4.llvm_tiles import Instructions
from mithril_cbackend.lowering.matmul import int8x4_products
from mithril_cbackend.lowering.rows import reductions

# Multiplications of a convolution from which its image is packed. No measurement of the limit is recorded.
MIN_PRODUCTS = 1 << 13
KINDS = {uint8: BYTES, bfloat16: PAIRS}  # of the int8x4 groups of an image
WIDER = {uint8: int32, bfloat16: float32}  # dtypes of the sums


def rewritten(graph: Graph, machine: Machine) -> Graph:
    """Return the graph with images whose channels are neighbors where convolutions multiply int8x4 groups."""
    uses = kinds(machine)
    return ByteImages(graph, uses).run() if uses else graph


def kinds(machine: Machine) -> dict[str, Instructions]:
    """Return the instructions of the int8x4 groups that convolutions multiply, by kind."""
    uses = [int8x4_products.instructions(kind, machine) for kind in (BYTES, PAIRS)]
    # Pairs without instructions are slower than float32, bytes are not.
    return {use.kind: use for use in uses if use is not None and (use.kind == BYTES or use.level != PORTABLE)}


def shares_packed_blocks(weights: tuple[int, ...], groups: int, use: Instructions) -> bool:
    """Whether a packed block has results of several groups, or an int8x4 group has channels of several.

    Products of the channels of one group with the zeros of another one are nan if a channel is not finite.
    """
    return groups > 1 and (weights[0] // groups % int8x4_products.columns_of(use) != 0 or weights[1] % use.per != 0)


class ByteImages:
    """Rewriter of one graph; regions are unchanged."""

    def __init__(self, graph: Graph, kinds: dict[str, Instructions]) -> None:
        self.editor: Editor = graph.edit()
        self.kinds = kinds

    def run(self) -> Graph:
        for node in self.editor.nodes():
            if node.op is ops.conv:
                self.convolution(node)
            elif node.op is ops.max_pool:
                self.pool(node)
            elif node.op is sum_pool_bytes:
                self.cancel(node)
            elif node.op in (ops.concat, ops.slice, ops.reshape):
                self.move(node)
            elif node.op in reductions.FOLDS:
                self.fold(node)
            elif is_plain(node) and len(node.results) == 1 and len(node.result.shape) == 4:
                self.plain(node)
        return self.editor.freeze()

    # -- values with channels last --------------------------------------------------------------------------------
    def last(self, value: Value | None) -> Value | None:
        """Return the value that has the elements of an image with channels last, if there is one."""
        producer = None if value is None else self.editor.producer(value)
        if value is None or producer is None or len(value.shape) != 4:
            return None
        if producer.op is ops.transpose and producer.attributes["perm"] == CHANNELS_FIRST:
            return operand(producer)
        source = producer.operands[0] if producer.op is ops.reshape else None
        is_pixel = source is not None and source.shape == (value.shape[0], 1, 1, value.shape[1])
        return source if is_pixel and value.shape[2:] == (1, 1) else None

    def moved(self, b: Builder, value: Value | None, rank: int = 4) -> Value | None:
        """Return an operand of any rank with channels last."""
        last = self.last(value)
        if value is None or last is not None or not value.shape or is_uniform(self.editor.producer(value)):
            return last if last is not None else value
        shape = (1,) * (rank - len(value.shape)) + shape_of(value)
        target = tuple(shape[k] for k in CHANNELS_LAST)
        elements = self.editor.data_of(value)
        if [n for n in shape if n != 1] == [n for n in target if n != 1]:
            return ops.reshape(value, shape=target)
        if elements is not None:
            image = np.asarray(np.asarray(elements).reshape(shape).transpose(CHANNELS_LAST), order="C")
            return b.constant(image, name=value.name)
        aligned = value if len(value.shape) == rank else ops.reshape(value, shape=shape)
        return ops.transpose(aligned, perm=CHANNELS_LAST)

    def replace(self, node: Node, result: Value) -> None:
        """Replace a node by the transpose of a value with channels last."""
        with self.editor.before(node):
            n, height, width, channels = shape_of(result)
            is_pixel = height == width == 1
            shape = (n, channels, 1, 1)
            first = ops.reshape(result, shape=shape) if is_pixel else ops.transpose(result, perm=CHANNELS_FIRST)
        self.editor.replace_value(node.result, first)
        self.editor.erase_dead(node)

    # -- operations -----------------------------------------------------------------------------------------------
    def convolution(self, node: Node) -> None:
        """Rewrite a convolution of unsigned bytes with constant signed bytes, or of bfloat16."""
        image = self.narrow(operand(node))
        kind = None if image is None else KINDS.get(image.dtype)
        if image is None or kind not in self.kinds or node.result.dtype is not WIDER[image.dtype]:
            return
        weights = self.constant_weights(operand(node, 1), np.dtype(np.int8) if kind == BYTES else image.dtype.numpy)
        if weights is None or weights.ndim != 4:
            return
        use, result = self.kinds[kind], shape_of(node.result)
        products = weights.size * typical(result[0] * math.prod(result[2:]))
        # Little work does not pay for packing the image; the simple loops take such convolutions.
        if products < MIN_PRODUCTS or (
            kind == PAIRS and shares_packed_blocks(weights.shape, node.attributes["groups"], use)
        ):
            return
        a, zero, per = dict(node.attributes), 0, use.per
        pad = self.editor.producer(image)
        if pad is not None and pad.op is ops.pad and pad.attributes["mode"] == "constant":
            widths, value = pad.attributes["widths"], pad.attributes["value"]
            # Bytes are padded with any zero point, since it is subtracted with the sums; a bfloat16 pad
            # other than 0 would be copied as a bit pattern.
            # A zero point, or the number that int8x4 groups are padded with.
            is_zero = kind == BYTES or value == 0
            if is_zero and not any(n for pair in (*widths[:2], *a["padding"]) for n in pair):
                image, a["padding"] = operand(pad), tuple(tuple(map(int, pair)) for pair in widths[2:])
                zero = int(value)
        reach = [(k - 1) * d + 1 for k, d in zip(weights.shape[2:], a["dilation"], strict=True)]
        if any(before > n for (before, _), n in zip(a["padding"], reach, strict=True)):
            return  # the copy of the image may begin after the pixels that windows read
        with self.editor.before(node) as b:
            last = self.last(image)
            # Channels that do not fill int8x4 groups need a copy with zeros, or a group would have
            # channels of the next pixel.
            pixels = last if last is not None and shape_of(image)[1] % per == 0 else int8x4_of_pixels(image, per=per)
            packed_block = b.constant(np.asarray(weights.transpose(2, 3, 1, 0), order="C"), name="weights")
            names = ("stride", "padding", "dilation", "groups")
            sums = conv_int8x4(pixels, packed_block, zero=zero, **{name: a[name] for name in names})
        self.replace(node, sums)

    def constant_weights(self, value: Value, dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
        """Return the constant weights of a convolution in a narrow dtype if it has all their digits."""
        narrow = self.narrow(value)
        source = self.editor.data_of(value if narrow is None else narrow)
        if source is None:
            return None
        weights = np.asarray(source)
        small = weights.astype(dtype)
        return small if (small == weights).all() else None

    def narrow(self, value: Value) -> Value | None:
        """Return the elements that were cast to wider ones."""
        producer = self.editor.producer(value)
        if producer is None or producer.op is not ops.cast:
            return None
        return operand(producer)

    def plain(self, node: Node) -> None:
        """Compute element-wise with channels last if an image is."""
        lasts = [self.last(v) for v in node.operands]
        if not any(v is not None and v.shape == tuple(node.result.shape[k] for k in CHANNELS_LAST) for v in lasts):
            return
        if any(v is not None and len(v.shape) > 4 for v in node.operands) or self.only_widens(node):
            return
        with self.editor.before(node) as b:
            attributes = dict(node.attributes)
            if node.op is ops.broadcast_to:
                attributes["shape"] = tuple(node.result.shape[k] for k in CHANNELS_LAST)
            result = node.op(*[self.moved(b, v) for v in node.operands], **attributes)
        self.replace(node, result)

    def only_widens(self, node: Node) -> bool:
        """Whether a node widens elements for convolutions, which read the narrow ones."""
        is_cast = node.op is ops.cast and WIDER.get(operand(node).dtype) is node.result.dtype
        return is_cast and all(user.op is ops.conv for user in self.editor.users(node.result))

    def pool(self, node: Node) -> None:
        """Rewrite the maximum of windows."""
        last, a = self.last(operand(node)), node.attributes
        # The kernel folds neighbors of a line; windows with gaps would fold pixels that are not theirs.
        if last is None or set(a["dilation"]) != {1}:
            return
        with self.editor.before(node):
            result = max_pool_last(last, kernel=a["kernel"], stride=a["stride"], padding=a["padding"])
        self.replace(node, result)

    def move(self, node: Node) -> None:
        """Join, select or shuffle channels where they are."""
        source = shuffled(self.editor, node) if node.op is ops.reshape else None
        lasts = [self.last(v) for v in ([source] if node.op is ops.reshape else node.operands)]
        if any(v is None for v in lasts) or len(node.result.shape) != 4:
            return
        with self.editor.before(node):
            a = dict(node.attributes)
            if node.op is ops.reshape:
                assert lasts[0] is not None
                result = shuffle(lasts[0], node, 3)
            elif node.op is ops.concat:
                # Stored parts are narrow: without the barrier the kernel of the join would read sums of convolutions.
                parts = [v if self.is_slice(v) else ops.barrier(v)[0] for v in lasts]
                result = ops.concat(*parts, axis=CHANNELS_LAST.index(a["axis"]))
            else:
                result = ops.slice(*lasts, **{**a, "axes": tuple(CHANNELS_LAST.index(k) for k in a["axes"])})
        self.replace(node, result)

    def is_slice(self, value: Value | None) -> bool:
        producer = None if value is None else self.editor.producer(value)
        return producer is not None and producer.op is ops.slice

    def cancel(self, node: Node) -> None:
        """Read an image with channels last where it is transposed back."""
        source = self.editor.producer(operand(node))
        last = self.last(operand(source)) if source is not None and source.op is ops.transpose else None
        if last is not None and source is not None and source.attributes["perm"] == CHANNELS_LAST:
            self.editor.replace_node(node, node.replaced(operands=(last,)))
            self.editor.erase_dead(source)

    def fold(self, node: Node) -> None:
        """Fold height and width where they are."""
        last, axes = self.last(operand(node)), node.attributes["axis"]
        if last is None or tuple(axes) != (2, 3):
            return
        with self.editor.before(node):
            result = node.op(last, **{**node.attributes, "axis": (1, 2)})
            if node.attributes.get("keepdims"):
                result = ops.reshape(result, shape=node.result.shape)
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)
