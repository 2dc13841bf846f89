"""Inputs that calls pass as arrays of scipy.sparse: checks, and the inputs of the program in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mithril import ops
from mithril.backend import is_sparse
from mithril.graph import Graph, Input, InputError, Node, Shape, TensorType, Value, int32

Array = np.ndarray[Any, Any]
LEAST = 16  # stored elements; programs for fewer would not be faster


def check_sparse(name: str, x: Any, format: str | None) -> None:
    """Raise InputError unless an array has the declared format, and rows of sorted elements at valid positions."""
    if format is None:
        raise InputError(
            f"input '{name}' is a sparse array, but the model declares a dense one",
            hint=f"declare ml.IOKey('{name}', sparse='csr'), or pass {name}.toarray()",
        )
    if not is_sparse(x):
        raise InputError(
            f"input '{name}' is declared sparse='{format}', but got {type(x).__name__}",
            hint=f"pass scipy.sparse.{format}_array(x)",
        )
    if x.format != format or x.ndim != 2:
        raise InputError(
            f"input '{name}' is a sparse array in the format '{x.format}' with {x.ndim} axes",
            facts=[f"expected: '{format}', a matrix"],
            hint=f"pass x.to{format}() of a matrix",
        )
    starts, positions = np.asarray(x.indptr), np.asarray(x.indices)
    counts = np.diff(starts)
    if len(starts) != x.shape[0] + 1 or starts[0] != 0 or (counts < 0).any():
        raise _broken(name, "the starts of its rows do not begin with 0 and increase")
    stored = int(starts[-1])
    if len(positions) < stored or len(x.data) < stored:
        raise _broken(name, f"its rows have {stored} elements, but {min(len(positions), len(x.data))} are stored")
    positions = positions[:stored]
    if stored and (positions.min() < 0 or positions.max() >= x.shape[1]):
        raise _broken(name, f"it has columns from {positions.min()} to {positions.max()} of {x.shape[1]}")
    rises = np.diff(positions) > 0
    is_first = np.zeros(stored + 1, bool)
    is_first[starts] = True
    if not (rises | is_first[1:stored]).all():
        raise _broken(name, "columns of a row are not sorted, or occur twice", "pass x after x.sum_duplicates()")


def _broken(name: str, reason: str, hint: str = "build it again: scipy.sparse.csr_array((data, (row, column)))") -> Any:
    return InputError(f"the sparse array of input '{name}' is inconsistent: {reason}", hint=hint)


def stored_elements(x: Any) -> int:
    """Return the number of stored elements, rounded up to a power of two: programs are compiled for this number."""
    return max(LEAST, 1 << (int(x.indptr[-1]) - 1).bit_length())


def padded_parts(x: Any, count: int) -> dict[str, Array]:
    """Return the parts of a checked array, with ``count`` elements: zeros follow those of its rows."""
    stored = int(x.indptr[-1])
    values, positions = np.zeros(count, x.data.dtype), np.zeros(count, np.int32)
    values[:stored], positions[:stored] = x.data[:stored], x.indices[:stored]
    return {"values": values, "positions": positions, "starts": np.asarray(x.indptr, np.int32)}


def dense_shapes(
    stored: Iterable[tuple[str, int]], types: Mapping[str, TensorType], shapes: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Return the shapes of sparse inputs in a call with parts of these shapes."""
    return {name: (shapes[f"{name}.starts"][0] - 1, types[name].shape[1]) for name, _ in stored}


def with_sparse_inputs(graph: Graph, stored: Iterable[tuple[str, int]]) -> Graph:
    """Return the graph with the parts of sparse inputs as inputs; ``stored`` has the number of elements of each."""
    counts = dict(stored)
    if not counts:
        return graph
    inputs: list[Input] = []
    readers: list[Node] = []
    for i in graph.inputs:
        if i.name not in counts:
            inputs.append(i)
            continue
        rows, columns = i.type.shape
        elements = (counts[i.name],)
        types = {"values": TensorType(i.type.dtype, elements), "positions": TensorType(int32, elements)}
        types["starts"] = TensorType(int32, (rows + 1,))
        parts = [Value(f"{i.name}.{part}", type) for part, type in types.items()]
        inputs += [Input(part, "input") for part in parts]
        readers.append(Node(ops.sparse_to_dense, tuple(parts), {"columns": columns}, (i.value,)))
    return graph.replaced(inputs=tuple(inputs), nodes=(*readers, *graph.nodes))
