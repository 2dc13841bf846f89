"""Open sizes of StableHLO: tensors of sizes, computed while the model is built, and the operations that read them.

A tensor of sizes is an array of ints and Dims. Where an operation has no meaning for sizes, they become values of the
graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from mithril.graph import (
    Builder,
    InputError,
    Size,
    UnsupportedError,
    assume,
    collect_guards,
    dtype as as_dtype,
    int32,
)
from mithril_importing.arrays import as_value, is_sizes, on_sizes, reshape, sizes_array, sizes_of
from mithril_jax.importing.stablehlo_rows import HLO, direction, gathered, hlo, ints, number, result_type, type_of
from mithril_jax.importing.table import ROWS


def _sizes(x: Any, operation: Any) -> tuple[Size, ...]:
    if not isinstance(x, np.ndarray):
        raise UnsupportedError(
            f"{operation.name} has sizes that are computed from data", facts=["accepted: arithmetic on sizes of inputs"]
        )
    return sizes_of(x)


def apply(operation: Any, operands: list[Any]) -> Any:
    """Return the result of an operation with an operand of sizes."""
    name = operation.name.removeprefix("stablehlo.")
    function = FUNCTIONS.get(name)
    integers = all(isinstance(x, np.ndarray) and (is_sizes(x) or x.dtype.kind in "iu") for x in operands)
    if function is not None and integers:
        result = function(operation, *operands)
        if result is not None:
            return result if is_sizes(result) else result.astype(as_dtype(result_type(operation)[1]).numpy)
    count = READ_SIZES.get(name, len(operands))  # operands of data come first
    kinds = [type_of(v.type)[1] for v in operation.operands]
    values = (as_value(x, as_dtype(kinds[k])) if is_sizes(x) and k < count else x for k, x in enumerate(operands))
    return HLO[operation.name](operation, *values)


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda operation, x, y: on_sizes(function, x, y)


def _convert(operation: Any, x: Any) -> Any:
    return x if "int" in result_type(operation)[1] else None


def _slice(operation: Any, x: Any) -> Any:
    columns = (ints(operation, name) for name in ("start_indices", "limit_indices", "strides"))
    return x[tuple(slice(*row) for row in zip(*columns, strict=True))]


def _broadcast(operation: Any, x: Any) -> Any:
    shape, axes = result_type(operation)[0], ints(operation, "broadcast_dimensions")
    return np.broadcast_to(x.reshape([x.shape[axes.index(k)] if k in axes else 1 for k in range(len(shape))]), shape)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _arithmetic(lambda a, b: a + b),
    "subtract": _arithmetic(lambda a, b: a - b),
    "multiply": _arithmetic(lambda a, b: a * b),
    "divide": _arithmetic(lambda a, b: a // b),
    "remainder": _arithmetic(lambda a, b: a % b),
    "convert": _convert,
    "reshape": lambda operation, x: x.reshape(result_type(operation)[0]),
    "concatenate": lambda operation, *xs: np.concatenate(
        [x.astype(object) for x in xs], number(operation, "dimension")
    ),
    "slice": _slice,
    "broadcast_in_dim": _broadcast,
}
READ_SIZES = {  # by operation: how many operands of data come before those of sizes
    "dynamic_broadcast_in_dim": 1,
    "dynamic_gather": 1,
    "dynamic_iota": 0,
    "dynamic_pad": 2,
    "dynamic_reshape": 1,
    "real_dynamic_slice": 1,
}


# -- assertions ---------------------------------------------------------------------------------------------------
RELATIONS: dict[str, Callable[[Size, Size], tuple[Size, str, Size]]] = {
    "EQ": lambda a, b: (a, "==", b),
    "LE": lambda a, b: (a, "<=", b),
    "GE": lambda a, b: (b, "<=", a),
    "LT": lambda a, b: (a + 1, "<=", b),
    "GT": lambda a, b: (b + 1, "<=", a),
}


def target_of(operation: Any) -> str:
    """Return the name that a custom call calls."""
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def require(operation: Any, env: Mapping[Any, Any]) -> None:
    """Require a comparison of sizes, as a guard of the graph if it depends on open ones; others are not checked."""
    comparison = operation.operands[0].owner
    if getattr(comparison, "name", "") != "stablehlo.compare":
        return
    relation = RELATIONS.get(direction(comparison))
    operands = [env[v] for v in comparison.operands]
    if relation is None or not all(isinstance(x, np.ndarray) and x.dtype.kind in "Oiu" for x in operands):
        return
    reason = _reason(operation, env)
    for a, b in zip(*(_sizes(x, comparison) for x in operands), strict=True):
        with collect_guards() as guards:
            holds = assume(*relation(a, b), reason)
        if not holds:
            raise InputError(
                f"the sizes of the inputs do not satisfy the program: {a} {direction(comparison)} {b}",
                facts=[reason],
                hint="pass other sizes, or export the function for these",
            )
        Builder.current().guards.update(dict.fromkeys(guards))


def _reason(operation: Any, env: Mapping[Any, Any]) -> str:
    """Return the message of an assertion, with its sizes, without the description of all inputs."""
    if "error_message" not in operation.attributes:
        return "an assertion of the program"
    text = str(ir.StringAttr(operation.attributes["error_message"]).value).split(" Using the following")[0]
    operands = [env[v] for v in operation.operands][1:]

    def size(match: re.Match[str]) -> str:
        k = int(match[1])
        return str(operands[k]) if k < len(operands) and isinstance(operands[k], np.ndarray) else match[0]

    return re.sub(r"\{(\d+)\}", size, text).strip()


@hlo("stablehlo.get_dimension_size")
def get_dimension_size(operation: Any, x: Any) -> Any:
    return sizes_array(x.shape[number(operation, "dimension")], as_dtype(result_type(operation)[1]))


@hlo("stablehlo.dynamic_broadcast_in_dim")
def dynamic_broadcast_in_dim(operation: Any, x: Any, sizes: Any) -> Any:
    axes = ints(operation, "broadcast_dimensions")
    return ROWS["broadcast_in_dim"](x, shape=_sizes(sizes, operation), broadcast_dimensions=axes)


@hlo("stablehlo.dynamic_reshape")
def dynamic_reshape(operation: Any, x: Any, sizes: Any) -> Any:
    return reshape(x, _sizes(sizes, operation))


@hlo("stablehlo.dynamic_iota")
def dynamic_iota(operation: Any, sizes: Any) -> Any:
    kind, axis = result_type(operation)[1], number(operation, "iota_dimension")
    return ROWS["iota"](dtype=kind, shape=_sizes(sizes, operation), dimension=axis)


@hlo("stablehlo.dynamic_gather")
def dynamic_gather(operation: Any, x: Any, starts: Any, sizes: Any) -> Any:
    slice_sizes = _sizes(sizes, operation)
    d = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    if isinstance(starts, np.ndarray) and starts.ndim == 1 and not d.operand_batching_dims:
        return _one_slice(x, dict(zip(d.start_index_map, _sizes(starts, operation), strict=True)), slice_sizes, d)
    return gathered(operation, x, as_value(starts, int32) if is_sizes(starts) else starts, slice_sizes)


def _one_slice(x: Any, starts: dict[int, Size], sizes: Sequence[Size], d: Any) -> Any:
    """Return the only slice of a gather, at known positions, which are moved into the tensor."""
    first = [starts.get(k, 0) for k in range(len(sizes))]
    room = [n - size for n, size in zip(x.shape, sizes, strict=True)]
    first = [
        min(max(a, 0), r) if isinstance(a, int) and isinstance(r, int) else a for a, r in zip(first, room, strict=True)
    ]
    y = ROWS["slice"](x, first, [a + n for a, n in zip(first, sizes, strict=True)], (1,) * len(sizes))
    return reshape(y, [n for k, n in enumerate(sizes) if k not in d.collapsed_slice_dims])


@hlo("stablehlo.dynamic_pad")
def dynamic_pad(operation: Any, x: Any, value: Any, low: Any, high: Any, interior: Any) -> Any:
    columns = (_sizes(n, operation) for n in (low, high, interior))
    return ROWS["pad"](x, value, list(zip(*columns, strict=True)))


@hlo("stablehlo.real_dynamic_slice")
def real_dynamic_slice(operation: Any, x: Any, starts: Any, limits: Any, strides: Any) -> Any:
    return ROWS["slice"](x, *(_sizes(n, operation) for n in (starts, limits, strides)))
