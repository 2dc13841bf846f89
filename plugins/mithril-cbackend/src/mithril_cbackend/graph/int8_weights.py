"""Weights of eight bits: large parameters become int8, with a scale for each row, and are widened where they are read.

Products read int8 and have their columns scaled, rows of tables are widened as they are taken, so that nothing wide is
stored; other operations get floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril import ops
from mithril.base.dtypes import float32, int8
from mithril.base.tensor_type import TensorType
from mithril.ir import Graph, Input, Node, Value
from mithril_cbackend.lowering.element.element_reader import operand, shape_of

LEAST = 256  # elements; of less there is nothing to be saved
Arrays = dict[str, np.ndarray[Any, Any]]


def quantized(graph: Graph, params: Mapping[str, np.ndarray[Any, Any]]) -> tuple[Graph, Arrays]:
    """The graph that reads such weights, not decomposed yet, and its parameters."""
    inputs: list[Input] = []
    arrays: Arrays = dict(params)
    narrowed: dict[Value, Narrow] = {}
    for i in graph.inputs:
        if not worth_it(i) or i.value in graph.outputs:
            inputs.append(i)
            continue
        whole = i.data if i.role == "constant" else params[i.name]
        assert whole is not None
        axis = 1 if all(multiplies(node, i.value) for node in graph.users.get(i.value, ())) else 0
        numbers, scale = rounded(whole, axis)
        narrow = Value(i.name, TensorType(int8, i.type.shape))
        scales = Value(f"{i.name}.scale", TensorType(float32, scale.shape))
        narrowed[i.value] = Narrow(narrow, scales, axis)
        if i.role == "param":
            arrays[narrow.name], arrays[scales.name] = numbers, scale
            numbers = scale = None
        inputs += [Input(narrow, i.role, numbers), Input(scales, i.role, scale)]
    editor = graph.edit()
    for node in editor.nodes():
        made = None
        with editor.before(node):
            if (found := behind_product(graph, node, narrowed)) is not None:
                made = product_of_narrow(node, found)
            elif (found := taken_from(node, narrowed)) is not None:
                made = rows_of_narrow(node, found)
        if made is not None:
            editor.replace_value(node.result, made)
            editor.erase_dead(node)
            continue
        users = graph.users.get(node.results[0], ()) if node.op.name == "transpose" else ()
        if users and all(behind_product(graph, user, narrowed) is not None for user in users):
            continue
        for v in node.operands:
            if v in narrowed:  # widened just before it is first read, so that its floats are not held for long
                found = narrowed[v]
                with editor.before(node):
                    wide = ops.dequantize(found.numbers, found.scales, axis=found.axis)
                editor.replace_value(v, wide)
    return editor.freeze().replaced(inputs=tuple(inputs)), arrays


@dataclass(frozen=True)
class Narrow:
    """What takes the place of a weight: int8, and a scale for each of its places along an axis."""

    numbers: Value
    scales: Value
    axis: int


def multiplies(node: Node, value: Value) -> bool:
    """Whether a matrix is the right operand of a product, and nothing else of it."""
    return node.op.name == "matmul" and len(value.shape) == 2 and node.operands[1] is value is not node.operands[0]


def behind_product(graph: Graph, node: Node, narrowed: Mapping[Value, Narrow]) -> Narrow | None:
    """The weight whose scales may be multiplied with a node's result: one for each column of a product."""
    right = node.operands[1] if node.op.name == "matmul" else None
    if right is None or not multiplies(node, right):
        return None
    if right in narrowed:
        return narrowed[right] if narrowed[right].axis == 1 else None
    made = graph.producers.get(right)
    found = narrowed.get(operand(made)) if made is not None and made.op.name == "transpose" else None
    return found if found is not None and found.axis == 0 else None


def product_of_narrow(node: Node, weight: Narrow) -> Value:
    """The product of what is on its left with int8, its columns scaled."""
    right = ops.cast(weight.numbers, dtype="float32")
    if weight.axis == 0:
        right = ops.transpose(right, perm=(1, 0))
    made: Value = ops.matmul(node.operands[0], right) * weight.scales
    return made


def taken_from(node: Node, narrowed: Mapping[Value, Narrow]) -> Narrow | None:
    """The table whose rows a node takes."""
    found = narrowed.get(operand(node)) if node.op.name == "take" else None
    return found if found is not None and found.axis == node.attributes["axis"] == 0 else None


def rows_of_narrow(node: Node, table: Narrow) -> Value:
    """Rows of int8, each with its scale."""
    rows = ops.cast(ops.take(table.numbers, node.operands[1], axis=0), dtype="float32")
    scales = ops.take(table.scales, node.operands[1], axis=0)
    made: Value = rows * ops.reshape(scales, shape=(*scales.shape, *(1,) * (len(table.numbers.shape) - 1)))
    return made


def worth_it(i: Input) -> bool:
    """Whether an input is a matrix of weights, or more than a matrix."""
    weights = i.role in ("param", "constant") and i.type.dtype is float32
    return weights and len(i.type.shape) >= 2 and math.prod(shape_of(i.value)) >= LEAST


def rounded(whole: np.ndarray[Any, Any], axis: int) -> tuple[Any, Any]:
    """The nearest of 255 steps between plus and minus the largest magnitude of each part along an axis."""
    top = np.abs(whole).max(axis=tuple(k for k in range(whole.ndim) if k != axis), keepdims=True)
    scale = np.where(top > 0, top / 127, 1).astype(np.float32)
    return np.rint(whole / scale).astype(np.int8), scale.reshape(-1)
