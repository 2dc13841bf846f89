"""Weights of 16-bit floats that products of few rows read unchanged; NumPy would convert all of them to float32."""

from __future__ import annotations

import math

from mithril import ops
from mithril.graph import Graph, Node, Value, is_matrix_transpose
from mithril_ggml.lowering.products import FEW
from mithril_ggml.program.program_builder import static


def half_matrices(graph: Graph) -> dict[int, Value]:
    """Return the matrices [out, in] of 16-bit floats by the identity of the product that reads their float32 form."""
    matrices = {}
    for node in graph.nodes:
        value = _converted(graph, node.operands[1]) if node.op in (ops.matmul, ops.linear) else None
        if value is None or not _has_few_rows(node):
            continue
        if node.op is ops.matmul:
            transpose = graph.producers.get(value)
            value = transpose.operands[0] if transpose is not None and is_matrix_transpose(transpose) else None
        if value is not None:
            matrices[id(node)] = value
    return matrices


def _converted(graph: Graph, value: Value | None) -> Value | None:
    """Return the matrix of 16-bit floats that a value is converted from."""
    cast = graph.producers.get(value) if value is not None else None
    source = cast.operands[0] if cast is not None and cast.op is ops.cast else None
    is_half = source is not None and source.dtype.is_float and source.dtype.bits == 16 and source.ndim == 2
    return source if is_half else None


def _has_few_rows(node: Node) -> bool:
    x = node.operands[0]
    return x is not None and x.ndim > 0 and x.shape[-1] != 0 and math.prod(static(x)[:-1]) <= FEW
