"""Row-independence analysis: does each output row depend only on the same input row?

Rows are the elements of axes whose size is one symbol, usually the batch size. If rows are independent, a batch can be
padded with additional rows, and the results trimmed, without changing them.
"""

from __future__ import annotations

from typing import Any

from mithril.graph import Dim, Graph, Node, Value, axes_of, symbols, types_of


class _Mixed(Exception):
    """Raised for a value with rows along several axes, or along part of an axis."""


def first_row_mixing_node(graph: Graph, size: Dim) -> str | None:
    """Return the first node that mixes rows or depends on the row count, or None if there is none."""
    for i in graph.inputs:
        try:
            _row_axis(i.value, size)
        except _Mixed:
            return f"input '{i.name}' of shape [{', '.join(map(str, i.type.shape))}]"
    for node in graph.nodes:
        try:
            independent = _is_independent(node, size)
        except _Mixed:
            independent = False
        if not independent:
            return f"'{node.op.name}'" + (f" in {node.origin}" if str(node.origin) else "")
    return None


def _row_axis(value: Value, size: Dim) -> int | None:
    """Return the axis along which a value has rows, or None."""
    axes = [axis for axis, n in enumerate(value.shape) if _mentions(n, size)]
    if not axes:
        return None
    if len(axes) > 1 or value.shape[axes[0]] != size:
        raise _Mixed
    return axes[0]


def _mentions(thing: Any, size: Dim) -> bool:
    """Whether an attribute or a size depends on the number of rows."""
    if isinstance(thing, (tuple, list)):
        return any(_mentions(part, size) for part in thing)
    return isinstance(thing, Dim) and size.symbol in symbols(thing)


def _is_independent(node: Node, size: Dim) -> bool:
    operands = [None if v is None else _row_axis(v, size) for v in node.operands]
    results = [_row_axis(v, size) for v in node.results]
    counted = [name for name, value in node.attributes.items() if _mentions(value, size)]
    if all(axis is None for axis in (*operands, *results)) and not counted:
        return True
    if node.regions:  # a loop over rows has their number as an attribute; otherwise its body decides
        return not counted and all(first_row_mixing_node(region, size) is None for region in node.regions)
    op = node.op
    if op.composite and not op.elementwise and op.declared_axes is None:
        types = types_of(node.operands)
        return first_row_mixing_node(op.decompose(types, node.attributes), size) is None
    axes = axes_of(node)
    if any(name != axes.shape_attribute for name in counted):
        return False
    factors = {axes.rows(k, axis) for k, axis in enumerate(operands) if axis is not None}
    factors |= {_result_factor(axes, k, axis) for k, axis in enumerate(results) if axis is not None}
    return None not in factors


def _result_factor(axes: Any, result: int, axis: int) -> str | None:
    """Return the factor of a result's rows, including those of iota: additional rows do not change them."""
    (factor, *rest) = axes.results[result][axis] or ("",)
    counted = axes.role(factor) is not None and axes.role(factor).kind == "count"
    return factor if counted and not rest else axes.result_rows(axis, result)
