"""Pools of dequantized bytes as pools of bytes.

Rounding commutes with the maximum of a window: ``quantize(max_pool(x))`` becomes ``max_pool(quantize(x))``, and
``max_pool(dequantize(q))`` becomes ``dequantize(max_pool(q))``, both exactly. Averages are sums of bytes, which are
exact, times one factor. Rounding also moves before concatenations, slices and shuffles of channels, which store bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Builder, Editor, Node, Shape, Value, float32, is_static, uint8
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.int8x4.byte_operations import sum_pool_bytes

CHANNELS_FIRST, CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


def shuffled(editor: Editor, node: Node) -> Value | None:
    """Return the image [n, g * c, h, w] whose channels a node shuffles to [n, c * g, h, w], or None."""
    swap = editor.producer(operand(node)) if node.op is ops.reshape and node.result.ndim == 4 else None
    split = editor.producer(operand(swap)) if swap is not None and swap.op is ops.transpose else None
    if swap is None or split is None or split.op is not ops.reshape or swap.attributes["perm"] != (0, 2, 1, 3, 4):
        return None
    return operand(split) if shape_of(operand(split)) == shape_of(node.result) else None


def shuffle(image: Value, node: Node, axis: int = 1) -> Value:
    """Return an image whose channels, which are an axis, are shuffled as those of a node are."""
    groups = shape_of(operand(node))[2]  # [n, c, g, h, w]
    n, channels = shape_of(image), shape_of(image)[axis]
    split = ops.reshape(image, shape=(*n[:axis], groups, channels // groups, *n[axis + 1 :]))
    order = [*range(5)]
    order[axis], order[axis + 1] = axis + 1, axis
    return ops.reshape(ops.transpose(split, perm=tuple(order)), shape=n)


def scaled(b: Builder, sums: Value, zero: int, scale: float, window: Any, image: Shape | None) -> Value:
    """Return the means of sums of quantized values; with ``image``, the windows at its borders have fewer pixels."""
    kernel, stride, padding = window
    counts: Any
    size, factor = math.prod(kernel), np.float32(scale)
    settings = {"kernel": kernel, "stride": stride, "padding": padding, "count_include_pad": True}
    if isinstance(size, int) and (image is None or is_static(image)):
        counts = np.asarray(ops.avg_pool(np.ones(image, np.float32), **settings)) * size if image else size
        factors = (factor / np.float32(counts)).astype(np.float32)
        return (sums - float(zero * size)) * (b.constant(factors, name="shares") if image else float(factors))
    number = float(size) if isinstance(size, int) else ops.cast(ops.size_value(value=size), dtype="float32")
    exact, counts = sums - number * float(zero), number
    if image is not None:
        counts = ops.avg_pool(ops.full(shape=image, value=1.0, dtype="float32"), **settings) * number
    return exact * (b.constant(factor, name="scale") / counts)  # type: ignore[no-any-return]


class BytePools:
    """Rewriter of the pools of one graph."""

    def __init__(self, editor: Editor, data: Any, zero_of: Any) -> None:
        self.editor, self.data, self.zero_of = editor, data, zero_of

    def before_rounding(self, node: Node) -> None:
        """Round before the maximum of windows of which nothing else is read."""
        pool = self.editor.producer(operand(node))
        scale = self.data(operand(node, 1))
        if pool is None or scale is None or scale.size != 1 or scale.min() <= 0:
            return
        if self.editor.use_count(pool.result) != 1:
            return
        if pool.op is not ops.max_pool:
            self.before_moves(node, pool)
            return
        with self.editor.before(node):
            quantized = ops.quantize(operand(pool), *node.operands[1:], **node.attributes)
            result = ops.max_pool(quantized, **pool.attributes)
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)

    def before_moves(self, node: Node, move: Node) -> None:
        """Round before channels of images are joined, selected or shuffled."""
        source = shuffled(self.editor, move)
        if source is None and (move.op not in (ops.concat, ops.slice) or move.result.ndim != 4):
            return
        with self.editor.before(node):
            images = [source] if source is not None else [v for v in move.operands if v is not None]
            quantized = [ops.quantize(v, *node.operands[1:], **node.attributes) for v in images]
            if source is None:
                result = move.op(*quantized, **move.attributes)
            else:
                result = shuffle(quantized[0], move)
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)
        for code in quantized:
            rounding = self.editor.producer(code)
            assert rounding is not None
            self.before_rounding(rounding)

    def rewrite(self, node: Node) -> None:
        """Rewrite a pool of dequantized bytes."""
        if node.op not in (ops.max_pool, ops.avg_pool, ops.mean):
            return
        source = self.editor.producer(operand(node))
        if source is None or source.op is not ops.dequantize or source.attributes["axis"] is not None:
            return
        quantized, scale, zero = operand(source), self.data(operand(source, 1)), self.zero_of(source)
        if scale is None or scale.size != 1 or scale.min() <= 0 or zero is None or node.result.dtype is not float32:
            return
        if node.op is ops.max_pool:
            a = node.attributes
            if set(a["dilation"]) != {1} and any(n for pair in a["padding"] for n in pair):
                # Pixels between the elements of a window have a maximum that is lower than all quantized values.
                return
            with self.editor.before(node):
                pooled = ops.max_pool(quantized, **node.attributes)
                result = ops.dequantize(pooled, *source.operands[1:], axis=None)
        elif quantized.dtype is uint8 and len(quantized.shape) == 4:
            summed = self.average(node, quantized, float(scale.reshape(())), zero)
            if summed is None:
                return
            result = summed
        else:
            return
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)

    def average(self, node: Node, quantized: Value, scale: float, zero: int) -> Value | None:
        """Return the mean of each window, or None if it is not one of height and width."""
        a, (_, _, height, width) = node.attributes, shape_of(quantized)
        if node.op is ops.mean:
            if tuple(a["axis"]) != (2, 3):
                return None
            kernel, stride, padding = (height, width), (1, 1), ((0, 0), (0, 0))
        else:
            kernel, stride, padding = a["kernel"], a["stride"], a["padding"]
        with self.editor.before(node) as b:
            pixels = ops.transpose(quantized, perm=CHANNELS_LAST)
            sums = sum_pool_bytes(pixels, kernel=kernel, stride=stride, padding=padding, zero=zero)
            exact = ops.cast(ops.transpose(sums, perm=CHANNELS_FIRST), dtype="float32")
            pads = node.op is ops.avg_pool and any(n for pair in padding for n in pair)
            shape = (1, 1, height, width) if pads and not a["count_include_pad"] else None
            result = scaled(b, exact, zero, scale, (kernel, stride, padding), shape)
            if node.op is ops.mean and shape_of(node.result) != shape_of(result):
                result = ops.reshape(result, shape=node.result.shape)
        return result
