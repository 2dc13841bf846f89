"""Chains of operations, each applied to the previous result and the next arrays: as a graph, and run by MLX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.backend import BuildOptions
from mithril.graph import Graph, InputError, TensorType, dtype as as_dtype, operation, trace
from mithril_mlx.backend import MlxBackend
from mithril_mlx.mlx_loader import mx

WORDS = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "negative": "neg",
    "power": "pow",
    "gemm": "matmul",
}


def canonical_name(name: str) -> str:
    """Return mithril's name of an operation; names of MLX and NumPy are accepted."""
    return WORDS.get(name.lower(), name.lower())


def arity(name: str) -> int:
    """Return the number of arrays that an operation needs."""
    op = operation(canonical_name(name))
    if op.variadic or len(op.results) != 1:
        raise InputError(f"'{name}' cannot be part of a sequence: its number of operands or results is not fixed")
    return len(op.operands) - len(op.optional)


def arrays_for(operations: Sequence[str]) -> int:
    """Return the number of arrays that a sequence of operations needs."""
    return sum(arity(name) for name in operations) - (len(operations) - 1)


def type_of(array: mx.array) -> TensorType:
    return TensorType(as_dtype(str(array.dtype).rpartition(".")[2].rstrip("_")), tuple(array.shape))


def chain(operations: Sequence[str], types: Sequence[TensorType]) -> Graph:
    """Build the graph of a sequence of operations on arrays of these types."""
    if not operations:
        raise InputError("there are no operations to run")
    num_arrays = arrays_for(operations)
    if len(types) != num_arrays:
        raise InputError(
            f"{', '.join(operations)} work on {num_arrays} arrays, not on {len(types)}",
            facts=["the first operation takes its operands, each further one the result so far and the next arrays"],
        )

    def row(*values: Any) -> Any:
        first = arity(operations[0])
        result, rest = operation(canonical_name(operations[0]))(*values[:first]), list(values[first:])
        for name in operations[1:]:
            count = arity(name) - 1
            result = operation(canonical_name(name))(result, *rest[:count])
            del rest[:count]
        return result

    return trace(row, types, name="-".join(operations))


def build(graph: Graph, *, jit: bool) -> Any:
    """Return a function of arrays that computes the only result of a graph."""
    backend = MlxBackend()
    options = BuildOptions(jit=jit)
    executable: Any = backend.build(backend.decomposed(graph, options), options)
    names, (output,) = [i.name for i in graph.inputs], graph.output_names

    def call(*arrays: mx.array) -> mx.array:
        result: mx.array = executable({}, dict(zip(names, arrays, strict=True)))[output]
        return result

    return call
