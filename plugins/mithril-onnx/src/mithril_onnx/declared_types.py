"""The types that a file declares for the results of its nodes, compared with those of an import."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril.graph import DType, OperationError, Size, Value
from mithril_importing.arrays import is_sizes
from mithril_importing.declared_types import other_type, type_text
from mithril_onnx.reading import OnnxFile, declared_shape
from mithril_onnx.tensors import dtype_of_code

COMPARED = (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16)  # element types of 8 bits and more, which every result keeps


def declared_types(graph: Any) -> dict[str, tuple[DType, tuple[Size, ...] | None]]:
    """Return the dtype and the shape that a graph declares for values, by name."""
    types = {}
    for info in (*graph.value_info, *graph.output):
        tensor = info.type.tensor_type
        if info.type.WhichOneof("value") == "tensor_type" and tensor.elem_type in COMPARED:
            types[info.name] = dtype_of_code(tensor.elem_type), declared_shape(tensor, info.name)
    return types


def compare(file: OnnxFile, node: Any, name: str, result: Any, declared: tuple[DType, tuple[Size, ...] | None]) -> None:
    """Raise OperationError if a result differs from its declaration.

    Where an input of the file has an open size, declared inner sizes may be those of one example: only the rank counts.
    """
    if not isinstance(result, (Value, np.ndarray)):
        return
    dtype, shape = declared
    actual = other_type(
        result,
        dtype,
        shape,
        lambda a, b: file.has_open_sizes or type(a) is not int or type(b) is not int or a == b,
        "int64" if is_sizes(result) else None,
    )
    if actual is not None:
        raise OperationError(
            f"node '{node.name or name}' ({node.op_type}) of '{file.name}' gives {actual} for '{name}'",
            facts=[f"the file declares {type_text(dtype, shape)}"],
            hint="check the file: onnx.checker.check_model(model, full_check=True); if it is valid, please report this "
            "as a mithril bug",
        )
