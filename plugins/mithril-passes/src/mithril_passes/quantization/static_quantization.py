"""The pass ``static-quantization``: products of int8 weights and 8-bit activations as quantize and dequantize pairs.

Each product reads ``dequantize(quantize(x))`` and ``dequantize(quantized)``, so that every backend computes the
meaning; a backend with integer kernels fuses the pairs. All readers of an activation that keep its range, such as
residual additions and pools, read the same pair, so that only bytes are stored between quantized layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import Builder, Graph, Node, OptionError, Value, ops, pass_
from mithril.graph import Editor, dtype as as_dtype
from mithril.passes import PassContext
from mithril.system import ArrayCache
from mithril_passes.cleaning.cleanup import constant_folding
from mithril_passes.quantization import groups
from mithril_passes.quantization.ranges import Range
from mithril_passes.quantization.setting import STORED, Setting

TAG = "quantized"
SHARED = (ops.add, ops.max_pool, ops.avg_pool, ops.relu, ops.reshape, ops.transpose, ops.concat, ops.mean)
ENCODED = ArrayCache()  # of weights: programs for other sizes share their quantized values
TABLES = {ops.take: 0, ops.embedding: 1}  # look-ups of rows, and the operand that is the table
MAX_TERMS = 66311  # products of the largest bytes whose sum fits 32 bits
MIN_ELEMENTS = 256  # of weights; smaller ones save too little


@pass_(name="static-quantization", exact=False, tolerance=0.2)
def static_quantization(graph: Graph, context: PassContext) -> Graph:
    """Insert quantize and dequantize pairs around the operands of products with constant weights."""
    setting = Setting.of(context.option("quantization"))
    if not context.option("static_inference"):
        raise OptionError(
            "quantization needs the weights when it compiles",
            hint="pass static_inference=True, and bind the parameters",
        )
    if any(i.role == "param" for i in graph.inputs):
        context.record(
            "deferred", "quantization waits for bind(params): a program without bound ones computes in float32"
        )
        return graph
    graph = constant_folding(graph, context)
    if setting.observe is not None:
        products = {node: node.operands[0] for node in graph.nodes if weight_of(graph, node) is not None}
        setting.observe(graph, products)
        return graph
    return Quantizer(graph, context, setting).run()


def weight_of(graph: Graph, node: Node, trained: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any] | None:
    """Return the constant weights of a product that can be quantized, those with a trained scale included, or None."""
    if node.op not in (ops.linear, ops.matmul, ops.conv) or node.tags.get("phase") == "backward":
        return None
    x, w = node.operands[0], node.operands[1]
    data = data_of(graph, w) if trained is None else trained
    if data is None or x is None or (x in graph.input_of and x.type.shape == ()):
        return None
    if data.dtype != np.float32 or data.size < MIN_ELEMENTS or (node.op is ops.matmul and data.ndim != 2):
        return None
    terms = data.size // data.shape[channel_axis(node)]
    return data if terms <= MAX_TERMS and np.isfinite(data).all() else None


def data_of(graph: Graph, value: Value | None) -> np.ndarray[Any, Any] | None:
    """Return the elements of a constant or of stored quantized values, or None if the value is computed."""
    i = graph.input_of.get(value) if value is not None else None
    if i is not None:
        return None if i.role != "constant" or i.data is None else np.asarray(i.data)
    scalar = graph.producers.get(value) if value is not None else None
    if scalar is not None and scalar.is_constant:
        return np.asarray(scalar.attributes["value"], scalar.result.dtype.numpy)
    reader = stored_quantized(graph, value) or trained_rounding(graph, value)
    if reader is None:
        return None
    operands = [data_of(graph, v) for v in reader.operands]
    return np.asarray(reader.op.evaluate(operands, reader.attributes))


def trained_rounding(graph: Graph, value: Value | None) -> Node | None:
    """Return the node that rounds constant weights to the scale of quantization-aware training, or None."""
    node = graph.producers.get(value) if value is not None else None
    if node is None or node.op is not ops.fake_quantize or node.attributes["bits"] != 8:
        return None
    return node if all(data_of(graph, v) is not None for v in node.operands) else None


def stored_quantized(graph: Graph, value: Value | None) -> Node | None:
    """Return the node that reads a weight from the quantized values of a file, or None."""
    node = graph.producers.get(value) if value is not None else None
    if node is None or not node.op.opaque or not node.operands:
        return None
    inputs = [graph.input_of.get(v) for v in node.operands if v is not None]
    return node if all(i is not None and i.role == "constant" and i.data is not None for i in inputs) else None


def table_of(graph: Graph, node: Node) -> np.ndarray[Any, Any] | None:
    """Return the constant table whose rows a look-up reads, or None."""
    position = TABLES.get(node.op)
    data = data_of(graph, node.operands[position]) if position is not None else None
    if data is None or node.attributes.get("axis", 0) != 0:
        return None
    is_large = data.dtype == np.float32 and data.ndim == 2 and data.size >= MIN_ELEMENTS
    return data if is_large and np.isfinite(data).all() else None


def channel_axis(node: Node) -> int:
    """Return the axis of the weights that the result has."""
    return 1 if node.op is ops.matmul else 0


def layer_of(node: Node) -> str:
    """Return the name of a product's layer, or of its result if it has none."""
    return node.origin.path or node.result.name


def encode(weights: np.ndarray[Any, Any], axis: int | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return symmetric int8 quantized values and their scales, one or one per element of an axis."""
    summed = tuple(k for k in range(weights.ndim) if k != axis)
    top = np.abs(weights).max(axis=summed if axis is not None else None, keepdims=True)
    scale = np.where(top > 0, top / 127, 1).astype(np.float32)
    quantized = np.clip(np.rint(weights / scale), -127, 127).astype(np.int8)
    return quantized, scale.reshape(-1) if axis is not None else scale.reshape(())


class Quantizer:
    """Rewriter of a graph with constant weights."""

    def __init__(self, graph: Graph, context: PassContext, setting: Setting) -> None:
        self.graph, self.context, self.setting = graph, context, setting
        self.editor: Editor = graph.edit()
        self.pairs: dict[Value, Value] = {}
        self.rows: dict[tuple[Value, bool], Value] = {}  # rounded per row, or else per image
        self.matrices: dict[tuple[Value, bool], Value] = {}  # 4-bit weights, and whether they are transposed
        self.trained_weights: dict[Value, np.ndarray[Any, Any]] = {}  # their numbers, by the dequantized value
        self.sizes = [0, 0]  # bytes of their quantized values and scales, and of their numbers

    def run(self) -> Graph:
        changed = False
        for node in self.editor.nodes():
            if node.op is ops.fake_quantize:
                changed |= self.trained(node)
                continue
            if self.setting.weights == STORED:
                changed |= self.stored(node)
                continue
            weights = self.weights(node)
            if weights is None:
                self.report_half(node)
            if weights is not None and TAG not in node.tags:
                changed |= self.grouped(node, weights) if self.setting.by_group else self.product(node, weights)
            elif self.setting.by_group and (table := table_of(self.graph, node)) is not None:
                changed |= self.rows_of(node, table)
        if not changed:
            return self.graph
        if self.matrices:
            small, large = self.sizes
            message = f"{len(self.matrices)} weights are {self.setting.weights} in groups of {self.setting.group}"
            self.context.record("choice", f"{message}: {small:,} bytes instead of {large:,}")
        for x, pair in self.pairs.items():
            self._share(x, pair)
        return self.editor.freeze()

    def weights(self, node: Node) -> np.ndarray[Any, Any] | None:
        """Return the constant weights of a product that can be quantized, or None."""
        right = node.operands[1] if len(node.operands) > 1 else None
        trained = self.trained_weights.get(right) if right is not None else None
        return weight_of(self.graph, node, trained)

    def report_half(self, node: Node) -> None:
        """Record a layer whose weights have 16 bits, which are not quantized."""
        data = data_of(self.graph, node.operands[1]) if node.op in (ops.linear, ops.matmul, ops.conv) else None
        if (
            data is None
            or data.size < MIN_ELEMENTS
            or as_dtype(data.dtype).bits != 16
            or self.setting.weights == STORED
        ):
            return
        layer, dtype = layer_of(node), as_dtype(data.dtype).name
        if not self.setting.keeps(layer):
            message = f"'{layer}' stays {dtype}: weights are quantized from float32, as without precision='{dtype}'"
            self.context.record("downgrade", message)

    def trained(self, node: Node) -> bool:
        """Replace the rounding of quantization-aware training by a pair with its scale."""
        x, scale = node.operands
        bits, axis = node.attributes["bits"], node.attributes["axis"]
        if bits != 8 or x is None or scale is None:
            return False
        is_weight = trained_rounding(self.graph, node.result) is not None
        with self.editor.before(node) as b:
            if is_weight:
                arrays = data_of(self.graph, x), data_of(self.graph, scale)
                quantized = b.constant(ops.quantize(*arrays, dtype="int8", axis=axis), name=f"{x.name}.quantized")
            else:
                quantized = ops.quantize(x, scale, dtype="int8", axis=axis)
            pair = ops.dequantize(quantized, scale, axis=axis)
        if is_weight:
            self.trained_weights[pair] = np.asarray(data_of(self.graph, node.result))
        self.editor.replace_value(node.result, pair)
        self.editor.erase_dead(node)
        return True

    def stays(self, layer: str) -> bool:
        """Whether a layer stays in float, which is recorded."""
        ranges = self.setting.ranges
        if self.setting.keeps(layer):
            self.context.record("choice", f"'{layer}' stays float32: it matches 'keep'")
            return True
        if ranges is not None and layer in ranges.keep:
            error, bound = ranges.errors.get(layer), ranges.bound or 0.0
            if error is None:
                message = "the calibration excluded it by 'keep'"
            else:
                message = f"alone it changes results by {error:.3%}, the bound for all is {bound:.3%}"
            self.context.record("downgrade", f"'{layer}' stays float32: {message}")
            return True
        return False

    # -- quantized values of files
    # ---------------------------------------------------------------------------------------------
    def stored(self, node: Node) -> bool:
        """Quantize the other operand of a product with quantized values, unless its layer stays in float."""
        right = node.operands[1] if node.op in (ops.linear, ops.matmul) else None
        is_stored = stored_quantized(self.graph, right) is not None
        if (not is_stored and weight_of(self.graph, node) is None) or self.stays(layer_of(node)):
            return False
        if right is None or not is_stored:
            message = f"its weights are no quantized values of a file that backend '{self.context.backend.name}' reads"
            self.context.record("downgrade", f"'{layer_of(node)}' stays float32: {message}")
            return False
        self.multiply(node, right)
        return True

    # -- groups of 4 bits -------------------------------------------------------------------------------------------
    def grouped(self, node: Node, weights: np.ndarray[Any, Any]) -> bool:
        """Let a product read 4-bit quantized values, unless its layer stays in float."""
        x, is_transposed = node.operands[0], node.op is ops.matmul
        assert x is not None
        if self.stays(layer_of(node)):
            return False
        if node.op is ops.conv:
            self.context.record("downgrade", f"'{layer_of(node)}' stays float32: it is a convolution")
            return False
        right = self.matrix(node, weights, is_transposed)
        if right is None:
            return False
        self.multiply(node, right)
        return True

    def multiply(self, node: Node, right: Value) -> None:
        """Let a product read quantized values, and its left operand in the dtype of the setting."""
        x = node.operands[0]
        assert x is not None
        with self.editor.before(node):
            if self.setting.activations == "dynamic":
                left = self.dynamic(node, x)
            elif self.setting.activations == "bfloat16":
                left = ops.cast(ops.cast(x, dtype="bfloat16"), dtype=x.dtype)
            else:
                left = x
            result = node.op(left, right, *node.operands[2:], **node.attributes)
            if result.shape != node.result.shape:
                result = ops.reshape(result, shape=node.result.shape)
        self.editor.replace_value(node.result, result)
        self.editor.erase_dead(node)

    def rows_of(self, node: Node, table: np.ndarray[Any, Any]) -> bool:
        """Let a look-up read rows of 4-bit quantized values, unless its layer stays in float."""
        matrix = None if self.stays(layer_of(node)) else self.matrix(node, table, False)
        if matrix is None:
            return False
        operands = list(node.operands)
        operands[TABLES[node.op]] = matrix
        self.editor.replace_node(node, node.replaced(operands=tuple(operands)))
        return True

    def matrix(self, node: Node, weights: np.ndarray[Any, Any], is_transposed: bool) -> Value | None:
        """Return the numbers of the quantized values of a matrix, or None if its sums are not whole groups."""
        setting, w = self.setting, node.operands[TABLES.get(node.op, 1)]
        assert w is not None
        if (w, is_transposed) in self.matrices:
            return self.matrices[w, is_transposed]
        rows = weights.T if is_transposed else weights
        if rows.shape[1] % setting.group:
            message = f"its {rows.shape[1]} inputs are no multiple of the group of {setting.group}"
            self.context.record("downgrade", f"'{layer_of(node)}' stays float32: {message}")
            return None
        arguments = setting.weights, setting.group, setting.activations == "dynamic"
        encoded = ENCODED.get(weights, (*arguments, is_transposed), lambda: groups.encode(rows, *arguments))
        self.sizes[0] += encoded.nbytes
        self.sizes[1] += weights.nbytes
        parts = {"quantized": encoded.quantized, "table": encoded.table, "scale": encoded.scale}
        with self.editor.before(node) as b:
            numbers = ops.dequantize_groups(*(b.constant(x, name=f"{w.name}.{part}") for part, x in parts.items()))
            result = ops.transpose(numbers, perm=(1, 0)) if is_transposed else numbers
        self.matrices[w, is_transposed] = result
        return result

    # -- bytes ------------------------------------------------------------------------------------------------------
    def product(self, node: Node, weights: np.ndarray[Any, Any]) -> bool:
        """Quantize the operands of a product, unless its layer stays in float."""
        layer, ranges = layer_of(node), self.setting.ranges
        x, w = node.operands[0], node.operands[1]
        assert x is not None
        assert w is not None
        if self.stays(layer):
            return False
        already = (p := self.editor.producer(x)) is not None and p.op is ops.dequantize
        if not already and self.setting.activations != "dynamic" and (ranges is None or x.name not in ranges.values):
            self.context.record("downgrade", f"'{layer}' stays float32: the ranges lack its input '{x.name}'")
            return False
        axis = channel_axis(node) if self.setting.per_channel else None
        pair = self.editor.producer(w) if w in self.trained_weights else None
        with self.editor.before(node) as b:
            left = x if already else self.activation(b, node, x)
            if pair is not None and pair.attributes["axis"] in (None, channel_axis(node)):
                right = w
            else:
                quantized, scale = encode(weights, axis)
                numbers = b.constant(quantized, name=f"{w.name}.quantized")
                right = ops.dequantize(numbers, b.constant(scale, name=f"{w.name}.scale"), axis=axis)
            is_of_rows = left is not x and left.shape != x.shape  # each with its own scale
            if is_of_rows:
                result = node.op(left, right, *node.operands[2:], **node.attributes)
                result = ops.reshape(result, shape=node.result.shape)
        if is_of_rows:
            self.editor.replace_value(node.result, result)
            self.editor.erase_dead(node)
            return True
        tags = {**node.tags, TAG: True}
        self.editor.replace_node(node, node.replaced(operands=(left, right, *node.operands[2:]), tags=tags))
        return True

    def activation(self, b: Builder, node: Node, x: Value) -> Value:
        """Return the dequantized value of an operand."""
        if self.setting.activations == "dynamic":
            return self.dynamic(node, x)
        pair = self.pairs.get(x)
        if pair is None:
            assert self.setting.ranges is not None
            scale, zero = affine(self.setting.ranges.values[x.name], self.setting.activations)
            s, z = b.constant(float(scale), "float32"), b.constant(int(zero), "int32")
            quantized = ops.quantize(x, s, z, dtype=self.setting.activations)
            pair = self.pairs[x] = ops.dequantize(quantized, s, z)
        return pair

    def dynamic(self, node: Node, x: Value) -> Value:
        """Return the operand rounded with scales of its own: one per row, or one per image."""
        # A product scales each row by itself; a convolution sums over rows of an image, which must have
        # one scale. Several images of a batch have one each: a bright one took the digits of the others
        # (commit f682d50e).
        by_row = node.op is not ops.conv
        pair = self.rows.get((x, by_row))
        if pair is not None:
            return pair
        rows = ops.reshape(x, shape=(-1, x.shape[-1])) if by_row and x.ndim != 2 else x
        is_single = not by_row and x.shape[0] == 1
        top = ops.max(ops.abs(rows), axis=None if is_single else tuple(range(1, rows.ndim)))
        scale = top * (1.0 / 127.0)
        # A row of zeros has no scale; with 1 it stays zeros.
        scale = ops.where(ops.greater(scale, 0.0), scale, 1.0)
        axis = None if is_single else 0
        pair = ops.dequantize(ops.quantize(rows, scale, dtype="int8", axis=axis), scale, axis=axis)
        self.rows[x, by_row] = pair
        return pair

    def _share(self, x: Value, pair: Value) -> None:
        """Let readers that keep the range of a value read its pair."""
        for node in self.editor.users(x):
            if node.op in SHARED and node.result.dtype == x.dtype:
                operands = tuple(pair if v is x else v for v in node.operands)
                self.editor.replace_node(node, node.replaced(operands=operands))


def affine(limits: Range, dtype: str) -> tuple[float, int]:
    """Return the scale and the zero point of a range, which is extended to contain zero."""
    # Zero must be a quantized value: padding and ReLU produce it exactly.
    low, high = min(limits[0], 0.0), max(limits[1], 0.0)
    if dtype == "int8":
        top = max(-low, high)
        return (float(np.float32(top / 127)) if top > 0 else 1.0), 0
    scale = float(np.float32((high - low) / 255)) if high > low else 1.0
    return scale, int(np.clip(np.rint(-low / scale), 0, 255))
