"""Operators that the ONNX standard defines by a function of other operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.helper
import onnx.numpy_helper

from mithril_onnx.tensors import code_of_dtype

Types = Sequence[tuple[Any, Sequence[Any]] | None]


def body_of(node: Any, opset: int, types: Types) -> Any:
    """Return the function that defines an operator for operands of these dtypes and shapes, or None."""
    schema = schema_of(node, opset)
    if schema is None:
        return None
    function = None
    if schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= opset]
        if versions:
            function = onnx.FunctionProto.FromString(schema.get_function_with_opset_version(max(versions)))
    elif schema.has_context_dependent_function:
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        if versions:
            protos = [_type_proto(t).SerializeToString() for t in types]
            content = schema.get_context_dependent_function_with_opset_version(
                max(versions), node.SerializeToString(), protos
            )
            function = onnx.FunctionProto.FromString(content) if content else None
    if function is not None:
        present = {a.name for a in function.attribute_proto}
        for name, declared in schema.attributes.items():
            if declared.default_value.name and name not in present:
                function.attribute_proto.append(declared.default_value)
    return function


def schema_of(node: Any, opset: int) -> Any:
    """Return the standard's schema of a node's operator, or None."""
    if node.domain not in ("", "ai.onnx"):
        return None
    try:
        return onnx.defs.get_schema(node.op_type, min(opset, onnx.defs.onnx_opset_version()), "")
    except onnx.defs.SchemaError:
        return None


def _type_proto(t: Any) -> Any:
    if t is None:
        return onnx.TypeProto()
    dtype, shape = t
    sizes = [d if isinstance(d, int) else str(d) for d in shape]
    return onnx.helper.make_tensor_type_proto(code_of_dtype(dtype), sizes)


def with_attributes(node: Any, overrides: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """Return a node with the attributes of the enclosing function in place of references to them."""
    if not _refers(node):
        return node
    copy = type(node)()
    copy.CopyFrom(node)
    del copy.attribute[:]
    for a in node.attribute:
        if not a.ref_attr_name:
            new = copy.attribute.add()
            new.CopyFrom(a)
            if a.HasField("g"):
                del new.g.node[:]
                new.g.node.extend(with_attributes(n, overrides, defaults) for n in a.g.node)
        elif a.ref_attr_name in overrides:
            value = overrides[a.ref_attr_name]
            if isinstance(value, np.ndarray):
                value = onnx.numpy_helper.from_array(value)
            copy.attribute.append(onnx.helper.make_attribute(a.name, value, attr_type=a.type or None))
        elif a.ref_attr_name in defaults:
            new = copy.attribute.add()
            new.CopyFrom(defaults[a.ref_attr_name])
            new.name = a.name
    return copy


def _refers(node: Any) -> bool:
    return any(a.ref_attr_name or any(_refers(n) for n in a.g.node) for a in node.attribute)
