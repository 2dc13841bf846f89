"""Operations of StableHLO by the rows of JAX's primitives: the same meanings, with other names and attributes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode as Mode
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_importing.arrays import broadcast, reshape
from mithril_jax.importing.regions import combination, extreme_position, sort_keys
from mithril_jax.importing.shapes import descending_order
from mithril_jax.importing.table import ROWS, cast, kind_of

HLO: dict[str, Callable[..., Any]] = {}

# Operations on elements that differ from JAX's primitives by their name alone.
ELEMENTS = {
    "abs": "abs", "add": "add", "and": "and", "atan2": "atan2", "cbrt": "cbrt", "ceil": "ceil", "clamp": "clamp",
    "cosine": "cos", "divide": "div", "exponential": "exp", "exponential_minus_one": "expm1", "floor": "floor",
    "is_finite": "is_finite", "log": "log", "log_plus_one": "log1p", "logistic": "logistic", "maximum": "max",
    "minimum": "min", "multiply": "mul", "negate": "neg", "not": "not", "optimization_barrier": "optimization_barrier",
    "or": "or", "power": "pow", "remainder": "rem", "rsqrt": "rsqrt", "shift_left": "shift_left",
    "shift_right_arithmetic": "shift_right_arithmetic", "shift_right_logical": "shift_right_logical", "sign": "sign",
    "sine": "sin", "sqrt": "sqrt", "subtract": "sub", "tan": "tan", "tanh": "tanh", "xor": "xor",
}  # fmt: skip
CHLO = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erf", "erf_inv", "erfc", "sinh", "square", "tan")
LOGICAL = {"add": "or", "multiply": "and", "maximum": "or", "minimum": "and"}  # of bool
NEUTRAL = {"add": (0,), "multiply": (1,), "or": (0,), "and": (-1, True)}


def hlo(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function of (operation, *operands) for an operation."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        HLO[name] = function
        return function

    return enter


def elements(name: str) -> Callable[..., Any]:
    """Return the function of operands for an operation on elements; arithmetic of bool is logic."""

    def apply(*xs: Any) -> Any:
        return ROWS[ELEMENTS[LOGICAL.get(name, name) if kind_of(xs[-1]) == "bool" else name]](*xs)

    return apply


for _name in ELEMENTS:
    HLO[f"stablehlo.{_name}"] = lambda operation, *xs, name=_name: elements(name)(*xs)
for _name in CHLO:
    HLO[f"chlo.{_name}"] = lambda operation, x, name=_name: ROWS[name](x)


# -- attributes ---------------------------------------------------------------------------------------------------
def ints(operation: Any, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
    """Return an attribute of integers, or the default if it is absent."""
    if name not in operation.attributes:
        return tuple(default)
    attribute = operation.attributes[name]
    if isinstance(attribute, (ir.DenseI64ArrayAttr, ir.DenseBoolArrayAttr)):
        return tuple(int(v) for v in attribute)
    return tuple(int(v) for v in np.asarray(ir.DenseIntElementsAttr(attribute)).reshape(-1))


def number(operation: Any, name: str, default: int | None = None) -> int:
    if default is not None and name not in operation.attributes:
        return default
    return int(ir.IntegerAttr(operation.attributes[name]).value)


def pairs(operation: Any, name: str, count: int) -> list[tuple[int, int]]:
    flat = ints(operation, name, [0] * (2 * count))
    return list(zip(flat[::2], flat[1::2], strict=True))


KINDS = {
    "i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "ui8": "uint8", "ui16": "uint16",
    "ui32": "uint32", "ui64": "uint64", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
}  # fmt: skip


def type_of(kind: Any) -> tuple[tuple[Any, ...], str]:
    """Return the shape, with None for open sizes, and the name of the dtype of a tensor type."""
    if not isinstance(kind, ir.RankedTensorType):
        raise UnsupportedError(f"values of the type {kind} are not supported", facts=["accepted: ranked tensors"])
    element = str(kind.element_type)
    if element not in KINDS:
        raise UnsupportedError(f"tensors of {element} are not supported", facts=[f"accepted: {', '.join(KINDS)}"])
    shape = tuple(None if kind.is_dynamic_dim(k) else kind.get_dim_size(k) for k in range(kind.rank))
    return shape, KINDS[element]


def result_type(operation: Any, position: int = 0) -> tuple[tuple[Any, ...], str]:
    return type_of(operation.results[position].type)


# -- constants, shapes --------------------------------------------------------------------------------------------
@hlo("stablehlo.constant")
def constant(operation: Any) -> Any:
    shape, kind = result_type(operation)
    attribute = operation.attributes["value"]
    if not isinstance(attribute, ir.DenseElementsAttr):
        raise UnsupportedError(f"constants stored as {type(attribute).__name__} are not supported")
    if attribute.is_splat:
        scalar = cast(np.asarray(attribute.get_splat_value().value), kind)
        return broadcast(scalar, shape)
    if kind == "bfloat16":
        return _bfloat16(str(attribute)).reshape(shape)
    return np.asarray(attribute).reshape(shape)


def _bfloat16(text: str) -> Any:
    """Return the elements of a bfloat16 constant from its text, which jaxlib cannot convert: hexadecimal or decimal."""
    body = text.removeprefix("dense<").partition("> : tensor")[0]
    if body.startswith('"0x'):
        return np.frombuffer(bytes.fromhex(body[3:-1]), np.uint16).view(_numpy("bfloat16"))
    words = re.findall(r"[^\[\],\s]+", body)
    bits = [int(w, 16) if w.startswith("0x") else int(np.float32(w).view(np.uint32)) >> 16 for w in words]
    return np.asarray(bits, np.uint16).view(_numpy("bfloat16"))


COUNTERS = 1 << 22  # jax.random counts with uint64, which not every engine has; its counters are computed at import


@hlo("stablehlo.iota")
def iota(operation: Any) -> Any:
    shape, kind = result_type(operation)
    axis = number(operation, "iota_dimension")
    if kind == "uint64" and math.prod(shape) <= COUNTERS:
        line = np.arange(shape[axis], dtype=np.uint64)
        return np.broadcast_to(line.reshape([-1 if k == axis else 1 for k in range(len(shape))]), shape)
    return ROWS["iota"](dtype=kind, shape=shape, dimension=axis)


@hlo("stablehlo.broadcast_in_dim")
def broadcast_in_dim(operation: Any, x: Any) -> Any:
    axes = ints(operation, "broadcast_dimensions")
    return ROWS["broadcast_in_dim"](x, shape=result_type(operation)[0], broadcast_dimensions=axes)


@hlo("stablehlo.reshape")
def reshape_(operation: Any, x: Any) -> Any:
    return reshape(x, result_type(operation)[0])


@hlo("stablehlo.transpose")
def transpose(operation: Any, x: Any) -> Any:
    return ROWS["transpose"](x, ints(operation, "permutation"))


@hlo("stablehlo.reverse")
def reverse(operation: Any, x: Any) -> Any:
    return ROWS["rev"](x, ints(operation, "dimensions"))


@hlo("stablehlo.concatenate")
def concatenate(operation: Any, *xs: Any) -> Any:
    return ROWS["concatenate"](*xs, dimension=number(operation, "dimension"))


@hlo("stablehlo.pad")
def pad(operation: Any, x: Any, value: Any) -> Any:
    columns = (ints(operation, f"edge_padding_{end}") for end in ("low", "high"))
    return ROWS["pad"](x, value, list(zip(*columns, ints(operation, "interior_padding"), strict=True)))


@hlo("stablehlo.slice")
def slice_(operation: Any, x: Any) -> Any:
    return ROWS["slice"](
        x, ints(operation, "start_indices"), ints(operation, "limit_indices"), ints(operation, "strides")
    )


@hlo("stablehlo.dynamic_slice")
def dynamic_slice(operation: Any, x: Any, *starts: Any) -> Any:
    return ROWS["dynamic_slice"](x, *starts, slice_sizes=ints(operation, "slice_sizes"))


@hlo("stablehlo.dynamic_update_slice")
def dynamic_update_slice(operation: Any, x: Any, update: Any, *starts: Any) -> Any:
    return ROWS["dynamic_update_slice"](x, update, *starts)


# -- elements with attributes -------------------------------------------------------------------------------------
@hlo("stablehlo.compare")
def compare(operation: Any, x: Any, y: Any) -> Any:
    return ROWS[direction(operation).lower()](x, y)


def direction(operation: Any) -> str:
    return str(stablehlo.ComparisonDirectionAttr(operation.attributes["comparison_direction"]).value)


@hlo("stablehlo.select")
def select(operation: Any, which: Any, yes: Any, no: Any) -> Any:
    return ops.where(which, yes, no)


@hlo("stablehlo.convert")
def convert(operation: Any, x: Any) -> Any:
    return cast(x, result_type(operation)[1])


@hlo("stablehlo.bitcast_convert")
def bitcast_convert(operation: Any, x: Any) -> Any:
    return ROWS["bitcast_convert_type"](x, result_type(operation)[1])


@hlo("stablehlo.reduce_precision")
def reduce_precision(operation: Any, x: Any) -> Any:
    return ROWS["reduce_precision"](x, number(operation, "exponent_bits"), number(operation, "mantissa_bits"))


@hlo("stablehlo.round_nearest_even")
def round_nearest_even(operation: Any, x: Any) -> Any:
    return ROWS["round"](x, 1)


@hlo("stablehlo.round_nearest_afz")
def round_nearest_away(operation: Any, x: Any) -> Any:
    return ROWS["round"](x, 0)


@hlo("stablehlo.custom_call")
def custom_call(operation: Any, *xs: Any) -> Any:
    return xs if len(xs) != 1 else xs[0]  # only those of NO_EFFECT come here


ASSERTION = "shape_assertion"
NO_EFFECT = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement")


# -- products -----------------------------------------------------------------------------------------------------
@hlo("stablehlo.dot_general")
def dot_general(operation: Any, a: Any, b: Any) -> Any:
    d = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    contracting = d.lhs_contracting_dimensions, d.rhs_contracting_dimensions
    numbers = contracting, (d.lhs_batching_dimensions, d.rhs_batching_dimensions)
    return ROWS["dot_general"](
        a, b, dimension_numbers=numbers, preferred_element_type=_numpy(result_type(operation)[1])
    )


def _numpy(kind: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(kind)


@hlo("stablehlo.convolution")
def convolution(operation: Any, x: Any, w: Any) -> Any:
    d = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    count = len(d.input_spatial_dimensions)
    flipped = [
        d.kernel_spatial_dimensions[k] for k, f in enumerate(ints(operation, "window_reversal", [0] * count)) if f
    ]
    return ROWS["conv_general_dilated"](
        x,
        ROWS["rev"](w, flipped),
        window_strides=ints(operation, "window_strides", [1] * count),
        padding=pairs(operation, "padding", count),
        lhs_dilation=ints(operation, "lhs_dilation", [1] * count),
        rhs_dilation=ints(operation, "rhs_dilation", [1] * count),
        dimension_numbers=(
            (d.input_batch_dimension, d.input_feature_dimension, *d.input_spatial_dimensions),
            (d.kernel_output_feature_dimension, d.kernel_input_feature_dimension, *d.kernel_spatial_dimensions),
            (d.output_batch_dimension, d.output_feature_dimension, *d.output_spatial_dimensions),
        ),
        feature_group_count=number(operation, "feature_group_count", 1),
        batch_group_count=number(operation, "batch_group_count", 1),
    )


# -- reductions and windows ---------------------------------------------------------------------------------------
REDUCTIONS = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min", "and": "and", "or": "or"}


@hlo("stablehlo.reduce")
def reduce(operation: Any, *operands: Any) -> Any:
    count = len(operands) // 2
    arrays, initial, axes = operands[:count], operands[count:], ints(operation, "dimensions")
    names = combination(operation.regions[0].blocks[0], count)
    if names is not None:
        return tuple(_reduced(n, x, axes, first) for n, x, first in zip(names, arrays, initial, strict=True))
    extreme = extreme_position(operation, axes)
    if extreme is None:
        raise UnsupportedError(
            "a reduction by this function is not supported",
            facts=["accepted: sums, products, extremes, their positions, and, or"],
        )
    kind = result_type(operation, 1)[1]
    position = ROWS[f"arg{extreme}"](arrays[0], axes=axes, index_dtype=kind)
    return ROWS[f"reduce_{extreme}"](arrays[0], axes=axes), position


def _reduced(name: str, x: Any, axes: tuple[int, ...], initial: Any) -> Any:
    if kind_of(x) == "bool":
        name = LOGICAL.get(name, name)
    y = ROWS[f"reduce_{REDUCTIONS[name]}"](x, axes=axes)
    return y if _is_neutral(name, initial) else elements(name)(y, initial)


def _is_neutral(name: str, initial: Any) -> bool:
    """Whether a reduction may begin without its initial value."""
    if not isinstance(initial, np.ndarray):
        return False
    value = initial.item()
    if name in NEUTRAL:
        return value in NEUTRAL[name]
    kind = _numpy(str(initial.dtype))
    if kind.kind in "iu":
        return bool(value == (np.iinfo(kind).min if name == "maximum" else np.iinfo(kind).max))
    return bool(value == (-np.inf if name == "maximum" else np.inf))


@hlo("stablehlo.reduce_window")
def reduce_window(operation: Any, *operands: Any) -> Any:
    count = len(operands) // 2
    names = combination(operation.regions[0].blocks[0], count)
    if names is None:
        raise UnsupportedError("a window reduced by this function is not supported")
    results = [
        _windowed(operation, n, x, first) for n, x, first in zip(names, operands, operands[count:], strict=False)
    ]
    return tuple(results)


CUMULATIVE = {"add": "cumsum", "multiply": "cumprod", "maximum": "cummax", "minimum": "cummin"}


def _windowed(operation: Any, name: str, x: Any, initial: Any) -> Any:
    rank = len(x.shape)
    settings: dict[str, Any] = {
        "window_dimensions": ints(operation, "window_dimensions"),
        "window_strides": ints(operation, "window_strides", [1] * rank),
        "padding": pairs(operation, "padding", rank),
        "base_dilation": ints(operation, "base_dilations", [1] * rank),
        "window_dilation": ints(operation, "window_dilations", [1] * rank),
    }
    axis = _cumulative_axis(x, settings)
    if axis is not None and name in CUMULATIVE:
        is_reverse = settings["padding"][axis][0] == 0
        y = getattr(ops, CUMULATIVE[name])(x, axis=axis, reverse=is_reverse)
    elif name in ("add", "maximum", "minimum"):
        y = ROWS[f"reduce_window_{REDUCTIONS[name]}"](x, **settings)
    else:
        raise UnsupportedError(f"a window reduced by {name} is not supported")
    return y if _is_neutral(name, initial) else elements(name)(y, initial)


def _cumulative_axis(x: Any, settings: Any) -> int | None:
    """Return the axis along which the windows hold all elements up to each one, or None."""
    windowed = [k for k, n in enumerate(settings["window_dimensions"]) if n != 1]
    ones = all(v == 1 for name in ("window_strides", "base_dilation", "window_dilation") for v in settings[name])
    if len(windowed) != 1 or not ones:
        return None
    axis, length = windowed[0], x.shape[windowed[0]]
    is_full = settings["window_dimensions"][axis] == length
    return axis if is_full and settings["padding"][axis] in ((length - 1, 0), (0, length - 1)) else None


@hlo("stablehlo.sort")
def sort(operation: Any, *xs: Any) -> Any:
    keys = sort_keys(operation.regions[0].blocks[0])
    axis = number(operation, "dimension", len(xs[0].shape) - 1)
    if keys is None:
        raise UnsupportedError(
            "a sort by this comparison is not supported", facts=["accepted: LT or GT of the first operands"]
        )
    count, is_ascending = keys
    if is_ascending:
        return tuple(ROWS["sort"](*xs, dimension=axis, num_keys=count))
    for key in reversed(range(count)):  # stable: equal keys keep their order
        order = descending_order(xs[key], axis)
        xs = tuple(ops.take_along_axis(x, order, axis=axis) for x in xs)
    return xs


@hlo("chlo.top_k")
def top_k(operation: Any, x: Any) -> Any:
    values, places = ROWS["top_k"](x, number(operation, "k"))
    return values, cast(places, result_type(operation, 1)[1])


# -- gather and scatter -------------------------------------------------------------------------------------------
def _last_axis(starts: Any, axis: int) -> Any:
    """Return the positions with their coordinates in the last axis."""
    rank = len(starts.shape)
    if axis == rank:
        return reshape(starts, (*starts.shape, 1))
    if axis == rank - 1:
        return starts
    return ops.transpose(starts, perm=(*(k for k in range(rank) if k != axis), axis))


@hlo("stablehlo.gather")
def gather(operation: Any, x: Any, starts: Any) -> Any:
    return gathered(operation, x, starts, ints(operation, "slice_sizes"))


def gathered(operation: Any, x: Any, starts: Any, slice_sizes: Sequence[Any]) -> Any:
    d = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    numbers = SimpleNamespace(
        offset_dims=tuple(d.offset_dims),
        collapsed_slice_dims=tuple(d.collapsed_slice_dims),
        start_index_map=tuple(d.start_index_map),
        operand_batching_dims=tuple(d.operand_batching_dims),
        start_indices_batching_dims=tuple(d.start_indices_batching_dims),
    )
    return ROWS["gather"](
        x,
        _last_axis(starts, d.index_vector_dim),
        dimension_numbers=numbers,
        slice_sizes=tuple(slice_sizes),
        mode=Mode.CLIP,
        fill_value=None,
    )


SCATTERS = {"add": "scatter-add", "multiply": "scatter-mul", "maximum": "scatter-max", "minimum": "scatter-min"}


@hlo("stablehlo.scatter")
def scatter(operation: Any, *operands: Any) -> Any:
    if len(operands) != 3:
        raise UnsupportedError("a scatter of several arrays at once is not supported")
    block = operation.regions[0].blocks[0]
    names = combination(block, 1)
    replaces = block.operations[len(block.operations) - 1].operands[0] == block.arguments[1]
    if not replaces and (names is None or names[0] not in SCATTERS):
        raise UnsupportedError("a scatter by this function is not supported")
    d = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
    numbers = SimpleNamespace(
        update_window_dims=tuple(d.update_window_dims),
        inserted_window_dims=tuple(d.inserted_window_dims),
        scatter_dims_to_operand_dims=tuple(d.scattered_dims_to_operand_dims),
        operand_batching_dims=tuple(d.input_batching_dims),
        scatter_indices_batching_dims=tuple(d.scatter_indices_batching_dims),
    )
    x, starts, updates = operands
    name = "scatter" if replaces else SCATTERS[names[0]] if names else ""
    positions = _last_axis(starts, d.index_vector_dim)
    return ROWS[name](x, positions, updates, dimension_numbers=numbers, mode=Mode.FILL_OR_DROP)
