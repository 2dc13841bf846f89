"""The kinds of values in an import: known arrays, values of the graph, vectors of sizes; and their quantization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Builder, DType, Value, float32
from mithril_importing.arrays import as_value
from mithril_tflite.reading import Quantization


class Handle(str):
    """The name of a variable of the file."""


def real(x: Any, q: Quantization, dtype: DType) -> Value:
    """Return the real numbers of a stored tensor."""
    # Biases have 32 bits, which float32 must round only after their scale.
    if isinstance(x, np.ndarray) and x.dtype.itemsize >= 4:
        shape = [-1 if k == q.axis else 1 for k in range(x.ndim)] if not q.is_single else [1] * x.ndim
        scaled = (x.astype(np.float64) - q.zero.reshape(shape)) * q.scale.astype(np.float64).reshape(shape)
        return as_value(scaled.astype(np.float32), float32)
    scale, zero = _parameters(q, dtype)
    value: Value = ops.dequantize(as_value(x, dtype), scale, zero, axis=None if q.is_single else q.axis)
    return value


def stored(y: Value, q: Quantization, dtype: DType) -> Value:
    """Return real numbers as a tensor stores them: rounded to quanta, halves to even, within its limits."""
    node = _producer(y)
    # The order that kernels for bytes recognize.
    if node is not None and node.op is ops.transpose and q.is_single:
        numbers: Value = ops.transpose(stored(node.operands[0], q, dtype), perm=node.attributes["perm"])
        return numbers
    scale, zero = _parameters(q, dtype)
    value: Value = ops.quantize(y, scale, zero, dtype=dtype, axis=None if q.is_single else q.axis)
    return value


def transposed(x: Value, perm: Sequence[int]) -> Value:
    """Return x with its axes in another order, and stored numbers before they become real."""
    node = _producer(x)
    result: Value
    if node is None or node.op is not ops.dequantize:
        result = ops.transpose(x, perm=tuple(perm))
        return result
    numbers, *scale_and_zero = node.operands
    axis = node.attributes["axis"]
    numbers = ops.transpose(numbers, perm=tuple(perm))
    result = ops.dequantize(numbers, *scale_and_zero, axis=None if axis is None else tuple(perm).index(axis))
    return result


def _producer(x: Value) -> Any:
    """Return the node of the current builder that computes x, or None."""
    return next((n for n in reversed(Builder.current().nodes) if any(r is x for r in n.results)), None)


def _parameters(q: Quantization, dtype: DType) -> tuple[Value, Value | None]:
    """Return scale and zero as operands of dequantize and quantize; without a zero if it is 0."""
    shape = () if q.is_single else (-1,)
    scale = as_value(q.scale.astype(np.float32).reshape(shape), float32)
    if not q.zero.any():
        return scale, None
    return scale, as_value(q.zero.astype(dtype.numpy).reshape(shape), dtype)
