"""Views: strides of values that alias others through transposes and reshapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mithril import ops
from mithril.graph import Node, Value
from mithril_cbackend.lowering.element.element_reader import operand, shape_of

Strides = tuple[int, ...]


def contiguous(shape: Sequence[int]) -> Strides:
    """Return row-major strides."""
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def reshaped(shape: Sequence[int], strides: Strides, target_shape: Sequence[int]) -> Strides | None:
    """Return the strides after a reshape, or None if the reshape needs a copy."""
    axes = [(n, step) for n, step in zip(shape, strides, strict=True) if n != 1]
    out: list[int] = []
    left = 1  # remaining size of the axis being split
    step = 0
    for k in reversed(range(len(target_shape))):
        if target_shape[k] == 1:
            out.append(0)
            continue
        if left == 1:
            left, step = axes.pop()
        while left % target_shape[k]:  # this axis merges several axes
            if not axes or axes[-1][1] != left * step:
                return None
            left *= axes.pop()[0]
        out.append(step)
        left, step = left // target_shape[k], step * target_shape[k]
    return tuple(reversed(out))


def view(producers: Mapping[Value, Node], value: Value) -> tuple[Value, Strides] | None:
    """Return the source of a chain of transposes and reshapes and the result's strides in it, or None for copies."""
    node = producers.get(value)
    if node is None or node.op not in (ops.transpose, ops.reshape):
        return value, contiguous(shape_of(value))
    source_view = view(producers, operand(node))
    if source_view is None:
        return None
    source, strides = source_view
    if node.op is ops.transpose:
        return source, tuple(strides[k] for k in node.attributes["perm"])
    result = reshaped(shape_of(operand(node)), strides, shape_of(value))
    return None if result is None else (source, result)


def view_strides(chain: Sequence[Node], value: Value) -> Strides | None:
    """Return a value's strides in the result of a chain of transposes and reshapes, or None for copies."""
    if not chain:
        return contiguous(shape_of(value))
    shape, strides = shape_of(chain[-1].result), contiguous(shape_of(chain[-1].result))
    for node in reversed(chain):
        source_shape = shape_of(operand(node))
        if node.op is ops.transpose:
            perm = node.attributes["perm"]
            strides = tuple(strides[perm.index(k)] for k in range(len(perm)))
        else:
            result = reshaped(shape, strides, source_shape)
            if result is None:
                return None
            strides = result
        shape = source_shape
    return strides
