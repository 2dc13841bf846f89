"""Products of dequantized operands as integer products whose sums are scaled.

``matmul(dequantize(a), dequantize(w))`` with constant quantized values ``w`` becomes a product of bytes with int32
sums. The scales, the zero point and the operations that follow are the epilogue of its tiles. Activations are unsigned,
as the instructions of x86 need them: signed ones are quantized to quantized values that are 128 larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Builder, Editor, Graph, Node, Value, bfloat16, decompose, float16, float32, int8, uint8
from mithril_cbackend.graph import byte_images, fusion, signals, sparse_constants, sparse_places
from mithril_cbackend.graph.byte_pools import BytePools
from mithril_cbackend.graph.group_products import GroupProducts
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.int8x4.byte_operations import quantize_bytes
from mithril_cbackend.lowering.int8x4.group_operation import block_matrix

CONVOLUTIONS = (ops.conv, ops.conv_input_grad, ops.conv_weight_grad)


def widened(graph: Graph) -> Graph:
    """Return the graph with operands of 16 bits converted before convolutions, and their results rounded."""
    small = [n for n in graph.nodes if n.op in CONVOLUTIONS and n.result.dtype in (bfloat16, float16)]
    if not small:
        return graph
    editor: Editor = graph.edit()
    upcast: dict[Value, Value] = {}
    for node in editor.nodes():
        if node.op not in CONVOLUTIONS or node.result.dtype not in (bfloat16, float16):
            continue
        with editor.before(node) as b:
            for v in node.operands:
                if v is not None and v not in upcast and v.dtype in (bfloat16, float16):
                    data = editor.data_of(v)
                    if data is None:
                        upcast[v] = ops.cast(v, dtype="float32")
                    else:
                        upcast[v] = b.constant(np.asarray(data).astype(np.float32), name=v.name)
            operands = [None if v is None else upcast.get(v, v) for v in node.operands]
            result = ops.cast(node.op(*operands, **node.attributes), dtype=node.result.dtype)
        editor.replace_value(node.result, result)
        editor.erase_dead(node)
    return editor.freeze()


PAIRS = (ops.quantize, ops.dequantize, ops.dequantize_groups, block_matrix)
MAX_TERMS = 66311  # products of the largest bytes whose sum fits 32 bits
TINY = 1e-30  # scales between it and its reciprocal have reciprocals
OFFSET = 128  # from signed to unsigned quantized values
Array = np.ndarray[Any, Any]


def is_kept(node: Node) -> bool:
    """Whether the node reaches ``fused`` undivided."""
    return node.op in PAIRS


def fused(graph: Graph, machine: Machine) -> Graph:
    """Return the graph with integer products, divided into the operations that kernels compute."""
    graph = signals.as_images(sparse_constants.rewritten(sparse_places.checked(widened(graph))), machine)
    if any(is_kept(node) for node in graph.nodes):
        graph = IntegerProducts(graph).run()
        graph = decompose(graph, lambda node: fusion.is_lowered(node) or fusion.runs_on_host(node), "c")
    return byte_images.rewritten(graph, machine)


@dataclass(frozen=True)
class Weights:
    """Constant symmetric quantized values [k, n] or [n, k], with one scale or one per column of the product."""

    quantized: Array
    scale: Array  # of shape [1] or [n]
    is_transposed: bool

    @property
    def sums(self) -> Array:
        """Return the sum of each column."""
        sums: Array = self.quantized.sum(axis=1 if self.is_transposed else 0, dtype=np.int64).astype(np.int32)
        return sums


class IntegerProducts:
    """Rewriter of one graph; regions stay in float."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.editor: Editor = graph.edit()
        self.unsigned: dict[Value, Value] = {}

    def run(self) -> Graph:
        groups = GroupProducts(self.editor, self.data, self.zero_of)
        pools = BytePools(self.editor, self.data, self.zero_of)
        for node in reversed([*self.editor.nodes()]):
            if node.op is ops.quantize:
                pools.before_rounding(node)
        for node in self.editor.nodes():
            pools.rewrite(node)
        for node in self.editor.nodes():
            if node.op is ops.matmul:
                if not groups.product(node):
                    self.product(node)
            elif node.op is ops.take:
                groups.rows(node)
            elif node.op is ops.conv and len(node.result.shape) == 4:
                self.convolution(node)
        for node in self.editor.nodes():
            if node.op in (ops.dequantize, block_matrix):
                self.fold(node)
            elif node.op is ops.quantize:
                self.rounding(node)
        return self.editor.freeze()

    def product(self, node: Node) -> None:
        left, weights = self.editor.producer(operand(node)), self.weights(operand(node, 1))
        if weights is None or left is None or left.op is not ops.dequantize or node.result.dtype is not float32:
            return
        quantized, scale = left.operands[0], left.operands[1]
        assert quantized is not None
        assert scale is not None
        zero = self.zero_of(left)
        by_row = left.attributes["axis"] is not None and scale.ndim == 1
        terms = weights.quantized.shape[1 if weights.is_transposed else 0]
        if quantized.dtype not in (int8, uint8) or zero is None or terms > MAX_TERMS:
            return
        if by_row and (left.attributes["axis"] != 0 or len(node.result.shape) != 2 or zero != 0):
            return
        if not by_row and scale.ndim:
            return
        with self.editor.before(node) as b:
            result = self.scaled(b, quantized, scale if by_row else self.scalar(scale), zero, weights)
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)

    def convolution(self, node: Node) -> None:
        """Rewrite a convolution with constant quantized values of images with one scale, or one for each."""
        left, right = self.editor.producer(operand(node)), self.editor.producer(operand(node, 1))
        if left is None or right is None or left.op is not ops.dequantize or right.op is not ops.dequantize:
            return
        quantized, scale, zero = left.operands[0], left.operands[1], self.zero_of(left)
        data, scales = self.data(right.operands[0]), self.data(right.operands[1])
        assert quantized is not None
        assert scale is not None
        if data is None or scales is None or zero is None or quantized.dtype not in (int8, uint8):
            return
        if scale.ndim and left.attributes["axis"] != 0:
            return
        shifted = data.astype(np.int32) - (self.zero_of(right) or 0)
        terms = int(np.prod(data.shape[1:]))
        by_channel = not scales.ndim or right.attributes["axis"] == 0
        fits = shifted.min() >= -128 and shifted.max() <= 127 and terms <= MAX_TERMS
        if self.zero_of(right) is None or not by_channel or not fits or node.result.dtype is not float32:
            return
        column = (1, -1, 1, 1)
        with self.editor.before(node) as b:
            factor = self.scalar(scale)
            if quantized.dtype is int8:
                quantized, zero = self.as_unsigned(quantized), zero + OFFSET
            attributes = dict(node.attributes)
            if zero and any(n for pair in attributes["padding"] for n in pair):
                widths = ((0, 0), (0, 0), *attributes["padding"])
                quantized, attributes["padding"] = ops.pad(quantized, widths=widths, value=zero), ((0, 0), (0, 0))
            weights = ops.cast(b.constant(shifted.astype(np.int8), name="quantized"), dtype="int32")
            sums = ops.conv(ops.cast(quantized, dtype="int32"), weights, **attributes)
            if zero:
                offset = (zero * shifted.sum(axis=(1, 2, 3), dtype=np.int64)).astype(np.int32).reshape(column)
                sums = sums - b.constant(offset, name="zero")
            total = ops.cast(sums, dtype="float32")
            spread = np.broadcast_to(scales.astype(np.float32).reshape(-1), (data.shape[0],)).reshape(column)
            if isinstance(factor, float):
                result = total * b.constant((spread * np.float32(factor)).astype(np.float32), name="scale")
            else:
                by_image = ops.reshape(factor, shape=(*scale.shape, 1, 1, 1)) if scale.ndim else factor
                result = total * by_image * b.constant(np.array(spread), name="scale")
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)

    def scaled(self, b: Builder, quantized: Value, scale: Any, zero: int, weights: Weights) -> Value:
        """Build the integer product and scale its sums."""
        if quantized.dtype is int8:
            quantized, zero = self.as_unsigned(quantized), zero + OFFSET
        right = ops.cast(b.constant(weights.quantized, name="quantized"), dtype="int32")
        if weights.is_transposed:
            right = ops.transpose(right, perm=(1, 0))
        sums = ops.matmul(ops.cast(quantized, dtype="int32"), right)
        if zero:
            sums = sums - b.constant((zero * weights.sums.astype(np.int64)).astype(np.int32), name="zero")
        total = ops.cast(sums, dtype="float32")
        # Both factors are known: one multiplication per result instead of two.
        if isinstance(scale, float):
            return total * b.constant((weights.scale * np.float32(scale)).astype(np.float32), name="scale")
        factor = ops.reshape(scale, shape=(*scale.shape, 1)) if scale.ndim else scale
        return total * factor * b.constant(weights.scale, name="scale")  # type: ignore[no-any-return]

    def as_unsigned(self, quantized: Value) -> Value:
        """Return signed quantized values plus 128: quantized that way, or else converted."""
        if quantized in self.unsigned:
            return self.unsigned[quantized]
        source = self.editor.producer(quantized)
        zero = None if source is None or source.op is not ops.quantize else self.zero_of(source)
        if source is not None and zero is not None:
            x, scale = source.operands[0], source.operands[1]
            with self.editor.before(source) as b:
                point: Any = b.constant(zero + OFFSET, "int32")
                axis = source.attributes["axis"]
                if axis is not None:
                    assert scale is not None
                    point = ops.broadcast_to(point, shape=scale.shape)
                result = ops.quantize(x, scale, point, dtype="uint8", axis=axis)
        else:
            result = ops.cast(ops.cast(quantized, dtype="int32") + OFFSET, dtype="uint8")
        self.unsigned[quantized] = result
        return result

    def rounding(self, node: Node) -> None:
        """Multiply by the reciprocal of a constant scale; saturation includes that of a rectifier."""
        x, scale, zero = operand(node), self.data(operand(node, 1)), self.zero_of(node)
        is_byte = node.result.dtype is uint8 and x.dtype is float32
        if not is_byte or scale is None or scale.size != 1 or zero is None:
            return
        factor = np.float32(scale.reshape(()))
        # Beyond these limits the reciprocal is subnormal or infinite, and only the division of the
        # reference is right.
        if not TINY < factor < 1 / TINY:
            return
        relu = self.editor.producer(x)
        # Files of ONNX round on both sides of a pool; quantize(dequantize(q)) of one scale is q, so the
        # bytes are read as is.
        if relu is not None and relu.op is ops.dequantize and self.is_inverse(relu, node, zero):
            self.editor.replace_value(node.result, operand(relu))
            self.editor.erase_dead(node)
            return
        # With a zero point of 0, saturation of unsigned bytes at 0 is the rectifier.
        if zero == 0 and relu is not None and self.is_rectifier(relu):
            x = operand(relu)
        with self.editor.before(node):
            result = quantize_bytes(x, scale=float(factor), zero=zero)
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)

    def is_inverse(self, source: Node, node: Node, zero: int) -> bool:
        """Whether rounding returns the bytes that were dequantized."""
        scale = self.data(operand(source, 1))
        is_equal = scale is not None and scale.size == 1 and (scale == self.data(operand(node, 1))).all()
        return bool(is_equal) and operand(source).dtype is uint8 and self.zero_of(source) == zero

    def is_rectifier(self, node: Node) -> bool:
        """Whether a node is the maximum of a value and 0."""
        if node.op is ops.relu:
            return True
        bound = self.data(operand(node, 1)) if node.op is ops.maximum else None
        return bound is not None and not bound.any() and node.result.shape == operand(node).shape

    # -- constants ------------------------------------------------------------------------------------------------
    def data(self, value: Value | None) -> Array | None:
        """Return the elements of a constant, or None if the value is computed."""
        if value is None:
            return None
        producer = self.editor.producer(value)
        if producer is not None:
            if producer.op is not ops.constant:
                return None
            return np.asarray(producer.attributes["value"], producer.result.dtype.numpy)
        elements = self.editor.data_of(value)
        return None if elements is None else np.asarray(elements)

    def zero_of(self, node: Node) -> int | None:
        """Return the zero point of a pair, or None if it is computed or not one number for all axes."""
        if len(node.operands) < 3 or node.operands[2] is None:
            return 0
        data = self.data(node.operands[2])
        if data is None or not data.size or (data != data.flat[0]).any():
            return None
        return int(data.flat[0])

    def scalar(self, scale: Value) -> Any:
        """Return a constant scale as a float, else its value."""
        data = self.data(scale)
        return scale if data is None else float(data.reshape(()))

    def weights(self, value: Value) -> Weights | None:
        """Return constant quantized values that a product reads dequantized and perhaps transposed, or None."""
        producer = self.editor.producer(value)
        is_transposed = producer is not None and producer.op is ops.transpose and producer.attributes["perm"] == (1, 0)
        if is_transposed:
            assert producer is not None
            producer = self.editor.producer(operand(producer))
        if producer is None or producer.op is not ops.dequantize:
            return None
        quantized, scale, zero = (
            self.data(producer.operands[0]),
            self.data(producer.operands[1]),
            self.zero_of(producer),
        )
        axis = producer.attributes["axis"]
        if quantized is None or scale is None or zero is None or quantized.ndim != 2:
            return None
        shifted = quantized.astype(np.int32) - zero
        columns = 0 if is_transposed else 1
        # The instructions multiply by signed bytes; values that leave their range once the zero point
        # is subtracted, and scales along the summed axis, which no epilogue can apply, stay with float
        # kernels.
        if shifted.min() < -128 or shifted.max() > 127 or (scale.ndim and axis != columns):
            return None
        return Weights(shifted.astype(np.int8), scale.astype(np.float32).reshape(-1), is_transposed)

    def fold(self, node: Node) -> None:
        """Replace constant quantized values that no integer kernel reads by their numbers."""
        elements = [None if v is None else self.data(v) for v in node.operands]
        if any(v is not None and e is None for v, e in zip(node.operands, elements, strict=True)):
            return
        if not self.editor.users(node.result) or not shape_of(node.result):
            return
        numbers = node.op.evaluate(elements, node.attributes)
        with self.editor.before(node) as b:
            constant = b.constant(np.asarray(numbers), name=node.result.name)
        self.editor.replace_value(node.result, constant)
        self.editor.erase_dead(node)
