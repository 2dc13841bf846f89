"""Batch buckets: batch sizes rounded up to a few sizes, for backends that compile each size separately.

``hints={"input_batch_size_range": (1, 32)}`` sets the bounds. Requires a model whose rows are independent, so that
padding rows do not affect the others; their results are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mithril.backend import Backend
from mithril.graph import Decisions, Dim, Graph, Symbol, TensorType, Value, symbols
from mithril.ops import first_row_mixing_node


@dataclass(frozen=True)
class Buckets:
    """Batch sizes, and the batch axes of inputs and outputs."""

    sizes: tuple[int, ...]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]

    def size(self, rows: int) -> int:
        """Return the bucket for a number of rows."""
        # An empty batch has no last row that padding could copy.
        return next((n for n in self.sizes if n >= rows > 0), rows)

    def rounded(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        """Return input types with the batch size of the bucket."""
        out = dict(types)
        for name, axis in self.inputs.items():
            shape = types[name].shape
            rows = shape[axis]
            assert isinstance(rows, int)
            out[name] = TensorType(types[name].dtype, (*shape[:axis], self.size(rows), *shape[axis + 1 :]))
        return out

    def rows(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of rows of a call."""
        name, axis = next(iter(self.inputs.items()))
        return int(inputs[name].shape[axis])

    def pad_batch(self, backend: Backend, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Pad the inputs to the size of the bucket with copies of the last row."""
        rows = self.rows(inputs)
        size = self.size(rows)
        if size == rows:
            return inputs
        resized = {name: backend.resized(inputs[name], axis, size) for name, axis in self.inputs.items()}
        return {**inputs, **resized}

    def trim_batch(self, backend: Backend, results: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
        """Remove the results of padding rows."""
        if self.size(rows) == rows:
            return results
        return {
            name: backend.resized(x, self.outputs[name], rows) if name in self.outputs else x
            for name, x in results.items()
        }


@dataclass(frozen=True)
class BucketedExecutable:
    """An executable for any number of rows, which pads batches to buckets."""

    executable: Any
    buckets: Buckets
    backend: Backend

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        results = self.executable(params, self.buckets.pad_batch(self.backend, inputs))
        return self.buckets.trim_batch(self.backend, results, self.buckets.rows(inputs))


def find_buckets(graph: Graph, decisions: Decisions) -> Buckets | None:
    """Return the buckets of a traced graph if a bounded symbol for the batch is the only one in the input types."""
    free_symbols = symbols(*(n for i in graph.inputs for n in i.type.shape))
    if len(free_symbols) != 1 or free_symbols[0].high is None:
        return None
    rows = Dim(free_symbols[0].name, free_symbols[0].low, free_symbols[0].high)
    mixed = first_row_mixing_node(graph, rows)
    if mixed is not None:
        decisions.record(
            "choice", f"batch bucketing disabled: {mixed} depends on all rows, so padding would change results"
        )
        return None
    sizes = _sizes(free_symbols[0])
    text = ", ".join(map(str, sizes))
    decisions.record("choice", f"batches are padded to {text} rows, so that few sizes are compiled")
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    return Buckets(sizes, _axes({i.name: i.value for i in graph.arguments}, rows), _axes(outputs, rows))


def _axes(values: Mapping[str, Value], rows: Dim) -> dict[str, int]:
    return {name: list(v.shape).index(rows) for name, v in values.items() if rows in v.shape}


def _sizes(symbol: Symbol) -> tuple[int, ...]:
    """Return the powers of two between the bounds, and the upper bound."""
    assert symbol.high is not None
    powers = (1 << k for k in range(symbol.high.bit_length()))
    return (*(n for n in powers if max(symbol.low, 1) <= n < symbol.high), symbol.high)
