"""The lowering table of the MLX backend: primitives."""

from __future__ import annotations

from mithril import ops
from mithril.backend import (
    NUMPY_NAMES,
    PREDICATES,
    UNARY,
    Call,
    FourierCalls,
    Lowerings,
    bounds,
    dtype_of,
    functions,
    indexing,
    integer_cast,
    integers,
    is_half,
    is_integer,
    operators,
    python_control,
    reduction_identity,
    reductions,
    shared_helpers,
    sliced,
)
from mithril.graph import Node, operation_names
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
    dialect=helpers.dialect,
    host=helpers.on_host,
    release=True,
)


# -- element-wise -------------------------------------------------------------------------------------------------
operators(table)
_PAIRS = operation_names("maximum", "minimum", "pow", "atan2", "logical_and", "logical_or")
functions(
    table,
    "mx",
    (*UNARY, *PREDICATES, "log2", *_PAIRS, "rsqrt", "erf", "erfinv"),
    {**NUMPY_NAMES, "bitwise_not": "bitwise_invert"},
)
table.row("neg", "-{x}")
table.row("where", "mx.where({condition}, {a}, {b})")


@table.function("sin")
def _sin(call: Call) -> str:
    """Return the sine, for which MLX loses the sign of zero."""
    x = call.array("x")
    return f"mx.where({x} == 0, {x}, {call.helper(helpers.sine)}({x}, 0.0))"


@table.function("cos")
def _cos(call: Call) -> str:
    return f"{call.helper(helpers.sine)}({call.array('x')}, 0.5)"


table.helper(helpers.erf)


@table.function("logical_xor")
def _xor(call: Call) -> str:
    return f"({call.array('a')} != 0) != ({call.array('b')} != 0)"


@table.function("trunc")
def _trunc(call: Call) -> str:
    return f"{call.helper(helpers.trunc)}({call.array('x')})"


@table.function("sign")
def _sign(call: Call) -> str:
    return f"{call.helper(integers.sign)}({call.array('x')})"


table.rows(dict.fromkeys(operation_names("floor", "ceil", "round", "trunc"), "{x}"), when=is_integer, view=True)


shared_helpers(table)
for _name, _helper in (("floordiv", integers.floordiv_float), ("mod", integers.mod_float)):
    table.helper(_helper, op=_name)


@table.function("clip")
def _clip(call: Call) -> str:
    text = call.array("x") if any(bound is not None for bound in bounds(call)) else f"mx.array({call.array('x')})"
    for name, bound in zip(("maximum", "minimum"), bounds(call), strict=True):
        if bound is not None:
            text = f"mx.{name}({text}, mx.array({bound}, {call.dtype()}))"
    return text


@table.function("cast")
def _cast(call: Call) -> str:
    if call.type.dtype.is_bool:
        return f"{call.array('x')} != 0"
    plain = f"{call.array('x')}.astype({call.dtype()})"
    return integer_cast(call, plain) if call.type.dtype.is_integer else plain


def is_slope(node: Node) -> bool:
    """Whether the node selects floats in a generated gradient, where MLX need not differentiate the view."""
    return bool(node.result.dtype.is_float) and node.tags.get("phase") == "backward"


@table.function("where", when=is_slope)
def _where_slope(call: Call) -> str:
    condition, a, b = call.operands
    if "0.0" not in (a, b):
        return f"mx.where({condition}, {a}, {b})"
    selection = f"{call.array('a')}, {condition}" if b == "0.0" else f"{call.array('b')}, ~{condition}"
    return f"{call.helper(helpers.masked)}({selection})"


@table.function("bitcast")
def _bitcast(call: Call) -> str:
    return f"{call.array('x')}.view({call.dtype()})"


# -- reductions ---------------------------------------------------------------------------------------------------
def _reduced(call: Call, widened: str = "") -> str:
    return f"{call.array('x')}{widened}, {call.literal(call.axis)}, {call.keepdims}"


@table.function("sum", "prod")
def _sum(call: Call) -> str:
    name = call.node.op.name
    widened = ".astype(mx.float32)" if is_half(call.node) else f".astype({call.dtype()})"
    if call.type.dtype is call.operand_type("x").dtype and not is_half(call.node):
        widened = ""
    expression = f"{call.helper(helpers.reduced)}({_reduced(call, widened)}, mx.{name}, {0 if name == 'sum' else 1})"
    return expression if not widened and call.type.dtype.is_float else f"{expression}.astype({call.dtype()})"


@table.function("mean")
def _mean(call: Call) -> str:
    widened = ".astype(mx.float32)" if is_half(call.node) else ""
    expression = f'{call.helper(helpers.reduced)}({_reduced(call, widened)}, mx.mean, float("nan"))'
    return f"{expression}.astype({call.dtype()})" if widened else expression


@table.function("max", "min")
def _extreme(call: Call) -> str:
    largest = call.node.op is ops.max
    start = reduction_identity(call, 'float("-inf")', 'float("inf")')
    return f"{call.helper(helpers.extreme)}({_reduced(call)}, {largest}, {start})"


@table.function("any", "all")
def _logic(call: Call) -> str:
    if not call.axis:
        return f"{call.array('x')} != 0"
    keepdims = ", keepdims=True" if call.keepdims else ""
    return f"mx.{call.node.op.name}({call.array('x')}, axis={call.literal(call.axis)}{keepdims})"


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
    return f"{call.helper(reductions.dot)}({call.array('a')}, {call.array('b')}, {axes}, {_product(call)})"


for _name, _transform in FourierCalls(module="mx.fft", complex_array="{re} + 1j * {im}").functions():
    table.function(_name)(_transform)


# -- shapes -------------------------------------------------------------------------------------------------------
@table.function("reshape", "transpose", "broadcast_to", view=True)
def _shaped(call: Call) -> str:
    name, x = call.node.op.name, call.array("x")
    argument = call.literal(call.perm) if name == "transpose" else call.shape()
    return f"mx.{name}({x}, {argument})"


@table.function("flip")
def _flip(call: Call) -> str:
    return f"{call.helper(helpers.flip)}({call.array('x')}, {call.literal(call.axis)})"


table.row("stop_gradient", "mx.stop_gradient({x})", view=True)  # for gradients of MLX
table.row("concat", "mx.concatenate([{xs}], {axis})")
table.row("full", "mx.full({shape}, {value}, {dtype})")
table.row("size_value", "mx.array({value}, {dtype})")


@table.function("tril", "triu")
def _triangle(call: Call) -> str:
    return f"{call.helper(helpers.triangle)}({call.array('x')}, mx.{call.node.op.name}, {call.k})"


@table.function("barrier", view=True)
def _barrier(call: Call) -> str:
    # MLX evaluates an operation as soon as its operands exist: each result waits for all operands.
    operands = ", ".join(str(x) for x in call.operands)
    # One result is an array, not a list of one; it waits for its own operand in any case.
    return f"mx.depends([{operands}], [{operands}])" if len(call.operands) > 1 else operands


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
    return f"{call.helper(indexing.pad_inside)}({call.array('x')}, {call.literal(call.widths)}, {call.mode!r})"


@table.function("slice", view=True)
def _slice(call: Call) -> str:
    return sliced(call, indexing.part)


@table.function("argsort", "sort")
def _sort(call: Call) -> str:
    x = call.array("x")
    order = f"{call.helper(indexing.argsort)}({x}, {call.axis}, {call.descending})"
    if call.node.op is ops.argsort:
        return f"{order}.astype(mx.int32)"
    return f"mx.take_along_axis({x}, {order}, {call.axis})" if call.type.shape else x


# -- windows ------------------------------------------------------------------------------------------------------
table.helpers(
    helpers.conv,
    helpers.conv_input_grad,
    helpers.conv_weight_grad,
)
for _function in (helpers.expert_matmul, helpers.expert_weight_grad):
    table.helper(_function, when=lambda node: node.result.dtype.is_float)  # MLX multiplies no groups of integers


# x[step] is mx.take, whose derivative ends the process where the array is empty, with MLX 0.32.
python_control(table, "mx.stack({rows})", "mx.zeros({shape}, {dtype})", row="mx.squeeze({x}[{step}:{step} + 1], 0)")
