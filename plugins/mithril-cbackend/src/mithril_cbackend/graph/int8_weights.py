"""Int8 weight quantization: large parameters become int8 with a scale per row, and are dequantized on use.

Matmuls read int8 and scale the columns of their result, and rows of tables are dequantized as they are gathered, so
that no float copy is stored; other operations use dequantized weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import (
    Graph,
    Input,
    Node,
    TensorType,
    UnsupportedError,
    Value,
    axes_of,
    float32,
    int8,
    is_matrix_transpose,
    is_product,
    linear_in,
    reads_rows,
)
from mithril_cbackend.lowering.element.element_reader import operand, shape_of

MIN_ELEMENTS = 256  # smaller weights save too little memory
Arrays = dict[str, np.ndarray[Any, Any]]


def quantized(graph: Graph, params: Mapping[str, np.ndarray[Any, Any]]) -> tuple[Graph, Arrays]:
    """Return the graph with int8 weights, which must be decomposed again, and its parameters."""
    inputs: list[Input] = []
    arrays: Arrays = dict(params)
    quantized_weights: dict[Value, QuantizedWeight] = {}
    for i in graph.inputs:
        if not should_quantize(i) or i.value in graph.outputs:
            inputs.append(i)
            continue
        weights = i.data if i.role == "constant" else params[i.name]
        assert weights is not None
        axis = min(scaled_axes(graph, i.value), default=0)
        numbers, scale = quantize_symmetric(weights, axis)
        int8_value = Value(i.name, TensorType(int8, i.type.shape))
        scales = Value(f"{i.name}.scale", TensorType(float32, scale.shape))
        quantized_weights[i.value] = QuantizedWeight(int8_value, scales, axis)
        if i.role == "param":
            arrays[int8_value.name], arrays[scales.name] = numbers, scale
            numbers = scale = None
        inputs += [Input(int8_value, i.role, numbers), Input(scales, i.role, scale)]
    editor = graph.edit()
    for node in editor.nodes():
        replacement = None
        with editor.before(node):
            if (read := scaled_product_operand(graph, node, quantized_weights)) is not None:
                replacement = quantized_product(node, *read)
            elif (table := taken_table(node, quantized_weights)) is not None:
                replacement = quantized_rows(node, table)
        if replacement is not None:
            editor.replace_value(node.result, replacement)
            editor.erase_dead(node)
            continue
        users = graph.users.get(node.results[0], ()) if is_matrix_transpose(node) else ()
        # The products read the int8 weight transposed, so that this transpose of floats has no reader.
        if users and all(scaled_product_operand(graph, user, quantized_weights) is not None for user in users):
            continue
        for v in node.operands:
            if (
                v in quantized_weights
            ):  # dequantized just before its first use, to keep the floats alive for a short time
                weight = quantized_weights[v]
                with editor.before(node):
                    dequantized = ops.dequantize(weight.numbers, weight.scales, axis=weight.axis)
                editor.replace_value(v, dequantized)
    return editor.freeze().replaced(inputs=tuple(inputs)), arrays


@dataclass(frozen=True)
class QuantizedWeight:
    """An int8 weight with a scale for each index along an axis."""

    numbers: Value
    scales: Value
    axis: int


def _places(node: Node, value: Value) -> list[int]:
    """Return where a node reads a value: ``==`` of values is an operation in the graph that is built here."""
    return [k for k, v in enumerate(node.operands) if v is value]


def matmul_role(node: Node, value: Value | None) -> str | None:
    """Return whether a matmul uses the matrix by "rows" or by "columns", or None if it does neither."""
    if value is None or len(value.shape) != 2 or len(places := _places(node, value)) != 1:
        return None
    (k,) = places
    return reads_rows(node, k) if is_product(node) and linear_in(node, k) else None


def scaled_axes(graph: Graph, value: Value) -> set[int]:
    """Return the axes that users of a weight need scales along: the one that a matmul does not sum over, else 0."""
    axes: set[int] = set()
    for node in graph.users.get(value, ()):
        if is_matrix_transpose(node):
            axes |= {1 - axis for axis in scaled_axes(graph, node.result)}
        else:
            axes.add(1 if matmul_role(node, value) == "columns" else 0)
    return axes


def outer_axis(node: Node, value: Value) -> int:
    """Return the axis of a matmul result that comes from the rows or columns of the weight."""
    axes = axes_of(node)
    read = axes.operands[_places(node, value)[0]]
    assert read is not None
    (factor,) = read[0 if matmul_role(node, value) == "rows" else 1]
    return next(axis for axis, factors in enumerate(axes.results[0]) if factor in factors)


def scaled_product_operand(
    graph: Graph, node: Node, quantized_weights: Mapping[Value, QuantizedWeight]
) -> tuple[Value, QuantizedWeight, bool] | None:
    """Return the operand, its weight and whether it is transposed if the node's result can be scaled, or None."""
    for value in node.operands if len(node.results) == 1 else ():
        read = matmul_role(node, value)
        if value is None or read is None:
            continue
        producer = graph.producers.get(value)
        is_transposed = producer is not None and is_matrix_transpose(producer)
        weight = (
            quantized_weights.get(operand(producer))
            if producer is not None and is_transposed
            else quantized_weights.get(value)
        )
        if weight is not None and weight.axis == ((read == "columns") != is_transposed):
            return value, weight, is_transposed
    return None


def quantized_product(node: Node, value: Value, weight: QuantizedWeight, is_transposed: bool) -> Value:
    """Build the matmul with an int8 operand and scale its result."""
    numbers = ops.cast(weight.numbers, dtype="float32")
    if is_transposed:
        numbers = ops.transpose(numbers, perm=(1, 0))
    op = node.op
    product = op(*[numbers if v is value else v for v in node.operands], **node.attributes)
    axis = outer_axis(node, value)
    shape = tuple(n if k == axis else 1 for k, n in enumerate(product.shape))
    # A scale per output is applied after the sum: the product reads bytes, and no float copy of the
    # weight exists.
    result: Value = product * (ops.reshape(weight.scales, shape=shape) if axis < len(shape) - 1 else weight.scales)
    return result


def taken_table(node: Node, quantized_weights: Mapping[Value, QuantizedWeight]) -> QuantizedWeight | None:
    """Return the quantized table whose rows the node gathers, or None if there is none."""
    table = quantized_weights.get(operand(node)) if node.op is ops.take else None
    return table if table is not None and table.axis == node.attributes["axis"] == 0 else None


def quantized_rows(node: Node, table: QuantizedWeight) -> Value:
    """Gather int8 rows and scale each."""
    rows = ops.cast(ops.take(table.numbers, node.operands[1], axis=0), dtype="float32")
    scales = ops.take(table.scales, node.operands[1], axis=0)
    result: Value = rows * ops.reshape(scales, shape=(*scales.shape, *(1,) * (len(table.numbers.shape) - 1)))
    return result


def should_quantize(i: Input) -> bool:
    """Whether an input is a large float weight with at least two axes."""
    weights = i.role in ("param", "constant") and i.type.dtype.is_float
    if not weights or len(i.type.shape) < 2 or math.prod(shape_of(i.value)) < MIN_ELEMENTS:
        return False
    if i.type.dtype is not float32:
        raise UnsupportedError(
            f"quantization='int8' takes float32 weights, and '{i.name}' is {i.type.dtype}",
            hint="compile without precision='float16' or 'bfloat16', which int8 replaces, or without quantization",
        )
    return True


def quantize_symmetric(weights: np.ndarray[Any, Any], axis: int) -> tuple[Any, Any]:
    """Quantize symmetrically to 255 steps, with a scale for each index along an axis."""
    top = np.abs(weights).max(axis=tuple(k for k in range(weights.ndim) if k != axis), keepdims=True)
    # A row of zeros has no scale; with 1 its numbers are zeros.
    scale = np.where(top > 0, top / 127, 1).astype(np.float32)
    return np.rint(weights / scale).astype(np.int8), scale.reshape(-1)
