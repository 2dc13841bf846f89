"""Operation calls: symbolic operands append a node to the current graph, NumPy arrays are computed eagerly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph.builder import Builder
from mithril.graph.core import Graph, Op, Value, types_of
from mithril.graph.current_builder import computing, is_building
from mithril.graph.declaration import RANDOM_KEY, SCALARS
from mithril.graph.dims import TensorType
from mithril.graph.dtypes import DType, dtype as as_dtype, scalar_dtype
from mithril.graph.errors import MithrilError, OperationError
from mithril.graph.registry import operation

ACCEPTED = (Value, np.ndarray, np.generic, bool, int, float)  # without a further look at their elements


def apply(op: Op, operands: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    """Append a node if an operand is symbolic, or if a builder is active and no operand is an array; else compute."""
    if attributes or op.variadic or len(operands) > len(op.operands):
        operands, attributes = op.bind(operands, attributes)
    for operand in operands:
        if isinstance(operand, Value):
            return emit(op, operands, attributes)
        delegate = getattr(operand, "__mithril_apply__", None)
        if delegate is not None:
            return delegate(op, operands, attributes)
    has_arrays = any(isinstance(o, (np.ndarray, np.generic)) for o in operands)
    if not has_arrays and is_building():  # iota(), or scalars only, while a graph is being traced
        return emit(op, operands, attributes)
    return op.evaluate(operands, attributes)


def emit(op: Op, operands: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """Append a node to the current graph and return its results."""
    builder = Builder.current()
    values = convert(op, builder, operands)
    complete = op.canonical(types_of(values), op.complete(attributes))
    results = builder.emit(op, values, complete)
    return results[0] if len(op.results) == 1 else results


def convert(op: Op, builder: Builder, operands: Sequence[Any]) -> list[Value | None]:
    """Convert scalars and arrays to constants, and cast promoted operands to their common dtype."""
    slots = _checked_operands(op, operands)
    target = op.common_dtype(slots)
    out: list[Value | None] = []
    for k, operand in enumerate(slots):
        dtype = target if target is not None and op.is_promoted(k) else None
        if operand is None:
            out.append(None)
        elif isinstance(operand, Value):
            out.append(operand if dtype is None or operand.dtype is dtype else _cast(operand, dtype))
        else:
            out.append(builder.constant(operand, dtype))
    return out


def _checked_operands(op: Op, operands: Sequence[Any]) -> list[Any]:
    """Return the operands, with None for absent ones; raise OperationError for objects other than numbers."""
    slots = op.all_operands(operands)
    for k, operand in enumerate(slots):
        if operand is None or isinstance(operand, ACCEPTED):
            continue
        try:
            kind = np.asarray(operand).dtype.kind
        except Exception:  # rows of several lengths, or an object with a conversion of its own
            kind = "O"
        if kind in "OSUMm":
            parts = operand if isinstance(operand, (list, tuple)) else ()
            is_joined = any(isinstance(x, Value) or hasattr(x, "__mithril_apply__") for x in parts)
            hint = "ops.stack and ops.concat join values: ops.concat([x, y], axis=1)" if is_joined else ""
            raise OperationError(
                f"operation '{op.name}': operand '{op.operand_name(k)}' cannot be a {type(operand).__name__}",
                facts=[f"got {operand!r:.200}", "accepted: values, NumPy arrays, Python numbers, rows of equal length"],
                hint=RANDOM_KEY if op.operand_name(k) == "key" else hint,
            )
    return slots


def evaluate(op: Op, operands: Sequence[Any], attributes: Mapping[str, Any], regions: Sequence[Graph] = ()) -> Any:
    """Compute the operation on NumPy arrays by its reference implementation."""
    slots = _checked_operands(op, operands)
    target = op.common_dtype(slots)
    arrays: list[Any] = []
    for k, operand in enumerate(slots):
        if operand is None:
            arrays.append(None)
            continue
        promoted = target if target is not None and op.is_promoted(k) else None
        kind = promoted or (scalar_dtype(operand) if type(operand) in SCALARS else None)
        arrays.append(np.asarray(operand, dtype=kind.numpy if kind else None))
    types = [None if a is None else TensorType(as_dtype(a.dtype), a.shape) for a in arrays]
    complete = op.canonical(types, op.complete(attributes))
    expected = op.infer(types, complete, regions)
    extra = {"regions": regions} if regions else {}
    try:
        with np.errstate(all="ignore"), computing():
            result = op.reference(*arrays, **complete, **extra)
    except (MithrilError, TimeoutError):
        raise
    except Exception as cause:
        raise op.own_error("failed", f"{type(cause).__name__}: {cause}", types, complete) from cause
    results = (result,) if len(op.results) == 1 else tuple(result)
    if len(results) != len(expected):
        conflict = f"it returns {len(results)} results, expected {len(expected)} by its type rules"
        raise op.own_error("conflicts with its type rules", conflict, types, complete)
    out = tuple(np.asarray(r, dtype=t.dtype.numpy) for r, t in zip(results, expected, strict=True))
    for array, t in zip(out, expected, strict=True):
        if array.shape != t.shape:
            conflict = f"it returns shape {list(array.shape)}, expected {list(t.shape)} by its shape rule"
            raise op.own_error("conflicts with its type rules", conflict, types, complete)
    return out[0] if len(op.results) == 1 else out


def _cast(value: Value, dtype: DType) -> Value:
    """Insert an implicit cast, tagged so that ``static_types`` can reject it."""
    result: Value = operation("cast")(value, dtype=dtype)
    nodes = Builder.current().nodes
    nodes[-1] = nodes[-1].replaced(tags={**nodes[-1].tags, "promotion": True})
    return result


Op._apply = staticmethod(apply)
Op._evaluate = staticmethod(evaluate)
