"""The lowering table of the MLX backend: primitives."""

from __future__ import annotations

from mithril import ops
from mithril.backend.codegen import Call, Lowerings
from mithril.backend.codegen.common import (
    NUMPY_NAMES,
    QUESTIONS,
    UNARY,
    as_it_is,
    bounds,
    dtype_of,
    functions,
    is_half,
    is_integer,
    nothing_yet,
    operators,
)
from mithril.backend.codegen.control_flow import python_control
from mithril.backend.codegen.slice_syntax import sliced
from mithril.ir import Node
from mithril_mlx import helpers

table = Lowerings(
    "mlx",
    ["import mlx.core as mx"],
    dtype="mx.{name}",
    scalar="mx.array({value}, mx.{name})",
    signed=True,
    constant="mx.array({array}, {dtype})",
    copy="mx.array({x})",
    reserved=vars(helpers),
    host=helpers.on_host,
    release=True,
)


# -- element-wise -------------------------------------------------------------------------------------------------
operators(table)
_PAIRS = ("maximum", "minimum", "pow", "atan2", "logical_and", "logical_or")
functions(
    table,
    "mx",
    (*UNARY, *QUESTIONS, "log2", *_PAIRS, "rsqrt", "erf", "erfinv"),
    {**NUMPY_NAMES, "bitwise_not": "bitwise_invert"},
)
table.row("neg", "-{x}")
table.row("where", "mx.where({condition}, {a}, {b})")


@table.function("sin")
def _sin(call: Call) -> str:
    """Return the sine, for which MLX loses the sign of zero."""
    return f"mx.where({call.array('x')} == 0, {call.array('x')}, mx.sin({call.array('x')}))"


table.helper(helpers.erf)


@table.function("logical_xor")
def _xor(call: Call) -> str:
    return f"({call.array('a')} != 0) != ({call.array('b')} != 0)"


@table.function("trunc")
def _trunc(call: Call) -> str:
    x = call.array("x")
    return f"mx.where({x} < 0, mx.ceil({x}), mx.floor({x}))"


@table.function("sign")
def _sign(call: Call) -> str:
    return f"{call.helper(helpers.sign)}({call.array('x')})"


for _name in ("floor", "ceil", "round", "trunc"):
    table.row(_name, "{x}", when=is_integer, view=True)


@table.function("floordiv", "mod")
def _division(call: Call) -> str:
    kind = "int" if is_integer(call.node) else "float"
    helper = getattr(helpers, f"{call.node.op.name}_{kind}")
    return f"{call.helper(helper)}({call.array('a')}, {call.array('b')})"


@table.function("pow", when=is_integer)
def _pow_int(call: Call) -> str:
    return f"{call.helper(helpers.pow_int)}({call.array('a')}, {call.array('b')})"


table.helpers(helpers.shift_left, helpers.shift_right)


@table.function("clip")
def _clip(call: Call) -> str:
    text = call.array("x") if any(bound is not None for bound in bounds(call)) else f"mx.array({call.array('x')})"
    for name, bound in zip(("maximum", "minimum"), bounds(call), strict=True):
        if bound is not None:
            text = f"mx.{name}({text}, mx.array({bound}, {call.dtype()}))"
    return text


@table.function("cast")
def _cast(call: Call) -> str:
    source, target = call.operand_type("x").dtype, call.type.dtype
    if target.is_bool:
        return f"{call.array('x')} != 0"
    if target.is_integer and not source.is_bool:
        low, high = target.limits
        return f"{call.helper(helpers.cast_to_int)}({call.array('x')}, {call.dtype()}, {low}, {high})"
    return f"{call.array('x')}.astype({call.dtype()})"


def is_slope(node: Node) -> bool:
    """A choice between floats in a gradient that mithril made: MLX cannot differentiate a view, and need not there."""
    return bool(node.result.dtype.is_float) and node.tags.get("phase") == "backward"


@table.function("where", when=is_slope)
def _where_slope(call: Call) -> str:
    condition, a, b = call.operands
    if "0.0" not in (a, b):
        return f"mx.where({condition}, {a}, {b})"
    kept = f"{call.array('a')}, {condition}" if b == "0.0" else f"{call.array('b')}, ~{condition}"
    return f"{call.helper(helpers.kept_where)}({kept})"


# -- reductions ---------------------------------------------------------------------------------------------------
def _reduced(call: Call, widened: str = "") -> str:
    return f"{call.array('x')}{widened}, {call.literal(call.axis)}, {call.keepdims}"


@table.function("sum", "prod")
def _sum(call: Call) -> str:
    name = call.node.op.name
    widened = ".astype(mx.float32)" if is_half(call.node) else f".astype({call.dtype()})"
    if call.type.dtype is call.operand_type("x").dtype and not is_half(call.node):
        widened = ""
    made = f"{call.helper(helpers.reduced)}({_reduced(call, widened)}, mx.{name}, {0 if name == 'sum' else 1})"
    return made if not widened and call.type.dtype.is_float else f"{made}.astype({call.dtype()})"


@table.function("mean")
def _mean(call: Call) -> str:
    widened = ".astype(mx.float32)" if is_half(call.node) else ""
    made = f'{call.helper(helpers.reduced)}({_reduced(call, widened)}, mx.mean, float("nan"))'
    return f"{made}.astype({call.dtype()})" if widened else made


@table.function("max", "min")
def _extreme(call: Call) -> str:
    largest = call.node.op is ops.max
    start = nothing_yet(call, 'float("-inf")', 'float("inf")')
    return f"{call.helper(helpers.extreme)}({_reduced(call)}, {largest}, {start})"


@table.function("any", "all")
def _logic(call: Call) -> str:
    if not call.axis:
        return f"{call.array('x')} != 0"
    kept = ", keepdims=True" if call.keepdims else ""
    return f"mx.{call.node.op.name}({call.array('x')}, axis={call.literal(call.axis)}{kept})"


@table.function("argmax", "argmin")
def _position(call: Call) -> str:
    largest = call.node.op is ops.argmax
    return f"{call.helper(helpers.position)}({call.array('x')}, {call.axis}, {call.keepdims}, {largest})"


@table.function("cumsum", "cumprod")
def _running(call: Call) -> str:
    flags = f"{call.axis}, {call.reverse}, {call.exclusive}"
    return f"{call.helper(helpers.running)}({call.array('x')}, mx.{call.node.op.name}, {flags})"


# -- products -----------------------------------------------------------------------------------------------------
def _product(call: Call) -> str:
    kind = dtype_of(call.node)
    if not kind.is_float:
        return call.helper(helpers.matmul_int)
    return call.helper(helpers.matmul) if is_half(call.node) else "mx.matmul"


@table.function("matmul")
def _matmul(call: Call) -> str:
    return f"{_product(call)}({call.array('a')}, {call.array('b')})"


@table.function("dot")
def _dot(call: Call) -> str:
    axes = ", ".join(call.literal(call.attributes[n]) for n in ("contract_a", "contract_b", "batch_a", "batch_b"))
    return f"{call.helper(helpers.dot)}({call.array('a')}, {call.array('b')}, {axes}, {_product(call)})"


# -- shapes -------------------------------------------------------------------------------------------------------
@table.function("reshape", "transpose", "broadcast_to", view=True)
def _shaped(call: Call) -> str:
    name, x = call.node.op.name, call.array("x")
    wanted = call.literal(call.perm) if name == "transpose" else call.shape()
    return f"mx.{name}({x}, {wanted})"


@table.function("flip")
def _flip(call: Call) -> str:
    return f"{call.helper(helpers.flip)}({call.array('x')}, {call.literal(call.axis)})"


table.row("concat", "mx.concatenate([{xs}], {axis})")
table.row("full", "mx.full({shape}, {value}, {dtype})")
table.row("size_value", "mx.array({value}, {dtype})")


@table.function("tril", "triu")
def _triangle(call: Call) -> str:
    return f"{call.helper(helpers.triangle)}({call.array('x')}, mx.{call.node.op.name}, {call.k})"


table.function("barrier", view=True)(as_it_is)


@table.function("iota")
def _iota(call: Call) -> str:
    shape = call.type.shape
    place = ["1"] * len(shape)
    place[call.axis] = "-1"
    text = f"mx.arange({call.literal(shape[call.axis])}, dtype=mx.int32)"
    if len(shape) > 1:
        text = f"mx.broadcast_to({text}.reshape({', '.join(place)}), {call.shape()})"
    return f"({text} != 0)" if call.type.dtype.is_bool else f"{text}.astype({call.dtype()})"


@table.function("pad")
def _pad(call: Call) -> str:
    if call.mode == "constant":
        fill = f"mx.array({call.literal(call.value)}, {call.dtype()})"
        return f"mx.pad({call.array('x')}, {call.literal(call.widths)}, constant_values={fill})"
    return f"{call.helper(helpers.pad_inside)}({call.array('x')}, {call.literal(call.widths)}, {call.mode!r})"


@table.function("slice", view=True)
def _slice(call: Call) -> str:
    return sliced(call, helpers.part)


# -- places -------------------------------------------------------------------------------------------------------
table.helpers(
    helpers.take,
    helpers.take_along_axis,
    helpers.gather_nd,
    helpers.scatter_nd,
    helpers.scatter_nd_add,
    helpers.dynamic_slice,
    helpers.dynamic_update_slice,
)


@table.function("argsort", "sort")
def _sort(call: Call) -> str:
    x = call.array("x")
    order = f"{call.helper(helpers.argsort)}({x}, {call.axis}, {call.descending})"
    if call.node.op is ops.argsort:
        return f"{order}.astype(mx.int32)"
    return f"mx.take_along_axis({x}, {order}, {call.axis})" if call.type.shape else x


# -- windows ------------------------------------------------------------------------------------------------------
table.helpers(
    helpers.conv,
    helpers.conv_input_grad,
    helpers.conv_weight_grad,
    helpers.avg_pool,
    helpers.avg_pool_grad,
)


def _settings(call: Call, *names: str) -> str:
    return ", ".join(call.literal(call.attributes[n]) for n in names)


@table.function("max_pool", "max_pool_positions")
def _max_pool(call: Call) -> str:
    kind = call.operand_type("x").dtype
    lowest = 'float("-inf")' if kind.is_float else str(kind.limits[0])
    rest = _settings(call, "kernel", "stride", "padding", "dilation")
    return f"{call.helper(getattr(helpers, call.node.op.name))}({call.x}, {rest}, {lowest})"


# -- random -------------------------------------------------------------------------------------------------------
table.helpers(
    helpers.random_bits,
    helpers.split_key,
    helpers.fold_in,
)


python_control(table, "mx.stack({rows})", "mx.zeros({shape}, {dtype})")
