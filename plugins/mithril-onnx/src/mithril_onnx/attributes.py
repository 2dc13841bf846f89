"""Attributes of nodes as Python values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx

from mithril.base import InputError, UnsupportedError
from mithril_onnx.tensors import to_array

A = onnx.AttributeProto


def attributes_of(node: Any, folder: str | None, body: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the attributes of a node: numbers, strings, tuples of them, arrays, and functions for graphs."""
    return {a.name: _value(a, node, folder, body) for a in node.attribute}


def _value(a: Any, node: Any, folder: str | None, body: Callable[[Any], Any]) -> Any:
    if a.ref_attr_name:
        raise InputError(
            f"the attribute '{a.name}' of node '{node.name}' refers to '{a.ref_attr_name}' outside a function"
        )
    kind = a.type
    if kind == A.INT:
        return int(a.i)
    if kind == A.FLOAT:
        return float(a.f)
    if kind == A.STRING:
        return a.s.decode("utf-8", "replace")
    if kind == A.INTS:
        return tuple(int(i) for i in a.ints)
    if kind == A.FLOATS:
        return tuple(float(f) for f in a.floats)
    if kind == A.STRINGS:
        return tuple(s.decode("utf-8", "replace") for s in a.strings)
    if kind == A.TENSOR:
        return to_array(a.t, folder)
    if kind == A.GRAPH:
        return body(a.g)
    if kind == A.SPARSE_TENSOR:
        from mithril_onnx.reading import dense

        return dense(a.sparse_tensor, folder)
    if kind == A.TYPE_PROTO:
        return a.tp
    raise UnsupportedError(f"the attribute '{a.name}' of node '{node.name}' has an unsupported type {kind}")
