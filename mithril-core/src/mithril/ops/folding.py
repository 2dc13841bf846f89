"""Expressions that can be computed in advance: of constants at compilation, of parameters when they are bound."""

from __future__ import annotations

from collections.abc import Container

from mithril.graph import Node, Value, is_static, numel
from mithril.ops.quantization import dequantize, dequantize_groups

FOLD_LIMIT = 1 << 16  # elements: a larger result would cost more memory than it saves time


def is_foldable(node: Node, available: Container[Value | None], limit: int) -> bool:
    """Whether a node can be computed in advance from available values, to results of at most ``limit`` elements."""
    # An operation without operands, such as iota, is cheaper to compute than to store.
    if node.regions or node.op.opaque or not node.operands:
        return False
    for operand in node.operands:
        if operand is not None and operand not in available:
            return False
    if node.op in (dequantize, dequantize_groups) and node.result.ndim > 1:
        # Quantized values take a fraction of the memory of their numbers, and integer kernels read them.
        return False
    return all(is_static(v.shape) and int(numel(v.shape)) <= limit for v in node.results)
