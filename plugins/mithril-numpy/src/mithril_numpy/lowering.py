"""The lowering table of the NumPy backend."""

from __future__ import annotations

from typing import Any

from mithril.codegen import Call, Lowerings
from mithril.codegen.control import python_control
from mithril.codegen.slicing import sliced
from mithril.graph import Node
from mithril_numpy import helpers

table = Lowerings("numpy", ["import numpy as np"], bfloat16="ml_dtypes.bfloat16", reserved=vars(helpers), release=True)


def dtype_of(node: Node, k: int = 0) -> Any:
    operand = node.operands[k]
    assert operand is not None
    return operand.dtype


def is_integer(node: Node) -> bool:
    return bool(dtype_of(node).is_integer)


def is_half(node: Node) -> bool:
    return bool(dtype_of(node).is_float and dtype_of(node).bits == 16)


# -- element-wise: an operator where there is one, with a form that writes into a dead operand -------------------------
for _name, _sign, _function in (
    ("add", "+", "add"),
    ("sub", "-", "subtract"),
    ("mul", "*", "multiply"),
    ("div", "/", "divide"),
):
    table.row(_name, f"{{a}} {_sign} {{b}}", out=f"np.{_function}({{a}}, {{b}}, out={{out}})")
for _name, _function in (
    ("maximum", "maximum"),
    ("minimum", "minimum"),
    ("pow", "power"),
    ("floordiv", "floor_divide"),
    ("mod", "mod"),
    ("atan2", "arctan2"),
    ("bitwise_and", "bitwise_and"),
    ("bitwise_or", "bitwise_or"),
    ("bitwise_xor", "bitwise_xor"),
    ("logical_and", "logical_and"),
    ("logical_or", "logical_or"),
    ("logical_xor", "logical_xor"),
):
    table.row(_name, f"np.{_function}({{a}}, {{b}})", out=f"np.{_function}({{a}}, {{b}}, out={{out}})")
for _name, _sign in (
    ("equal", "=="),
    ("not_equal", "!="),
    ("less", "<"),
    ("less_equal", "<="),
    ("greater", ">"),
    ("greater_equal", ">="),
):
    table.row(_name, f"{{a}} {_sign} {{b}}")
for _name, _function in {
    "neg": "negative",
    "abs": "absolute",
    "sign": "sign",
    "exp": "exp",
    "expm1": "expm1",
    "log": "log",
    "log1p": "log1p",
    "sqrt": "sqrt",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "sinh": "sinh",
    "cosh": "cosh",
    "tanh": "tanh",
    "asinh": "arcsinh",
    "acosh": "arccosh",
    "atanh": "arctanh",
    "floor": "floor",
    "ceil": "ceil",
    "round": "rint",
    "trunc": "trunc",
    "logical_not": "logical_not",
    "bitwise_not": "invert",
    "square": "square",
}.items():
    table.row(_name, f"np.{_function}({{x}})", out=f"np.{_function}({{x}}, out={{out}})")
table.rows({"isnan": "np.isnan({x})", "isinf": "np.isinf({x})", "isfinite": "np.isfinite({x})"})
for _name in ("floor", "ceil", "round", "trunc"):
    table.row(_name, "{x}.copy()", when=is_integer)
table.row("where", "np.where({condition}, {a}, {b})")


def _is_whole(node: Node) -> bool:
    """A condition of the result's shape, over elements of four bytes or more."""
    condition, result = node.operands[0], node.result
    wide = result.dtype.bits >= 32 and not result.dtype.is_bool
    return condition is not None and wide and bool(result.shape) and condition.type.shape == result.shape


@table.function("where", when=_is_whole)
def _where(call: Call) -> str:
    shapes = [None if t is None else t.shape for t in call.types]
    if shapes[1] == call.type.shape and call.b in ("0", "0.0"):
        return f"{call.helper(helpers.masked)}({call.condition}, {call.a})"
    if shapes[1] == shapes[2] == call.type.shape:
        return f"{call.helper(helpers.chosen)}({call.condition}, {call.a}, {call.b})"
    return f"np.where({call.condition}, {call.a}, {call.b})"


for _name, _helper in (("floordiv", helpers.floordiv_int), ("mod", helpers.mod_int), ("pow", helpers.pow_int)):
    table.helper(_helper, op=_name, when=is_integer)


table.helpers(helpers.shift_left, helpers.shift_right)


@table.function("erf", "erfinv")
def _special(call: Call) -> str:
    return f"{call.helper(getattr(helpers, call.node.op.name))}(np.asarray({call.x}))"


@table.function("clip")
def _clip(call: Call) -> str:
    integer, low, high = not call.type.dtype.is_float, call.low, call.high
    limits = call.type.dtype.limits if integer else (0, 0)
    text = call.x
    if low is not None:
        text = f"np.maximum({text}, {max(int(low), limits[0]) if integer else call.number(low)})"
    if high is not None:
        text = f"np.minimum({text}, {min(int(high), limits[1]) if integer else call.number(high)})"
    return str(text)


@table.function("cast", view=False)
def _cast(call: Call) -> str:
    if call.type.dtype.is_bool:
        return f"{call.x} != 0"
    if call.type.dtype.is_integer:
        return f"{call.helper(helpers.cast_to_int)}(np.asarray({call.x}), {call.dtype()})"
    return f"np.asarray({call.x}).astype({call.dtype()})"


# -- reductions ---------------------------------------------------------------------------------------------------
def _axes(call: Call) -> str:
    """The axes as written; all of them as None."""
    axes = call.axis
    rank = len(call.operand_type("x").shape)
    if axes == tuple(range(rank)):
        return "None"
    return str(axes[0]) if len(axes) == 1 else call.literal(axes)


@table.function("sum", "prod")
def _sum(call: Call) -> str:
    name = call.node.op.name
    kept = ", keepdims=True" if call.keepdims else ""
    if is_half(call.node):
        return f"np.{name}({call.x}, axis={_axes(call)}, dtype=np.float32{kept}).astype({call.dtype()})"
    exact = f", dtype={call.dtype()}" if is_integer(call.node) else ""
    return f"np.{name}({call.x}, axis={_axes(call)}{exact}{kept})"


@table.function("mean")
def _mean(call: Call) -> str:
    kept = ", keepdims=True" if call.keepdims else ""
    if is_half(call.node):
        return f"np.mean({call.x}, axis={_axes(call)}, dtype=np.float32{kept}).astype({call.dtype()})"
    return f"np.mean({call.x}, axis={_axes(call)}{kept})"


@table.function("max", "min")
def _extreme(call: Call) -> str:
    name = call.node.op.name
    kept = ", keepdims=True" if call.keepdims else ""
    kind = call.type.dtype
    sizes = [call.operand_type("x").shape[k] for k in call.axis]
    if all(isinstance(n, int) and n > 0 for n in sizes):
        return f"np.{name}({call.x}, axis={_axes(call)}{kept})"
    if kind.is_float:
        start = "-np.inf" if name == "max" else "np.inf"
    else:
        start = str(kind.limits[0 if name == "max" else 1])
    return f"np.{name}({call.x}, axis={_axes(call)}{kept}, initial={start})"


@table.function("any", "all")
def _logic(call: Call) -> str:
    kept = ", keepdims=True" if call.keepdims else ""
    return f"np.{call.node.op.name}({call.x}, axis={_axes(call)}{kept})"


table.rows(
    {
        "argmax": "np.argmax({x}, axis={axis}, keepdims={keepdims}).astype(np.int32)",
        "argmin": "np.argmin({x}, axis={axis}, keepdims={keepdims}).astype(np.int32)",
    }
)


@table.function("cumsum", "cumprod")
def _running(call: Call) -> str:
    start = 0 if call.node.op.name == "cumsum" else 1
    flags = f"{call.axis}, {call.reverse}, {call.exclusive}"
    return f"{call.helper(helpers.running)}({call.x}, np.{call.node.op.name}, {start}, {flags})"


# -- products -----------------------------------------------------------------------------------------------------
@table.function("matmul")
def _matmul(call: Call) -> str:
    if is_half(call.node):
        return f"np.matmul({call.a}.astype(np.float32), {call.b}.astype(np.float32)).astype({call.dtype()})"
    return f"np.matmul({call.a}, {call.b})"


@table.function("dot")
def _dot(call: Call) -> str:
    axes = ", ".join(call.literal(getattr(call, n)) for n in ("contract_a", "contract_b", "batch_a", "batch_b"))
    name = call.helper(helpers.dot)
    if is_half(call.node):
        return f"{name}({call.a}.astype(np.float32), {call.b}.astype(np.float32), {axes}).astype({call.dtype()})"
    return f"{name}({call.a}, {call.b}, {axes})"


# -- shapes: views of what they are given -----------------------------------------------------------------------------
table.row("reshape", "np.reshape({x}, {shape})", view=True)
table.row("transpose", "np.transpose({x}, {perm})", view=True)
table.row("broadcast_to", "np.broadcast_to({x}, {shape})", view=True)
table.row("flip", "np.flip({x}, {axis})", view=True)
table.row("concat", "np.concatenate([{xs}], axis={axis})")
table.row("full", "np.full({shape}, {value}, {dtype})")
table.row("tril", "np.tril({x}, {k})")
table.row("triu", "np.triu({x}, {k})")
table.row("size_value", "np.asarray({value}, {dtype})")


@table.function("barrier", view=True)
def _barrier(call: Call) -> str:
    return ", ".join(str(x) for x in call.operands)


@table.function("iota", view=True)
def _iota(call: Call) -> str:
    if len(call.type.shape) == 1:
        return f"np.arange({call.literal(call.type.shape[0])}).astype({call.dtype()})"
    return f"{call.helper(helpers.iota)}({call.shape()}, {call.axis}, {call.dtype()})"


@table.function("slice", view=True)
def _slice(call: Call) -> str:
    return sliced(call)


table.helper(helpers.pad)


# -- places -------------------------------------------------------------------------------------------------------
table.helpers(
    helpers.take,
    helpers.take_along_axis,
    helpers.gather_nd,
    helpers.scatter_nd,
    helpers.scatter_nd_add,
    helpers.dynamic_update_slice,
)


@table.function("dynamic_slice", view=True)
def _dynamic_slice(call: Call) -> str:
    return f"{call.x}[{call.helper(helpers.window)}({call.x}, {call.starts}, {call.literal(call.sizes)})]"


@table.function("argsort", "sort")
def _sort(call: Call) -> str:
    order = f"{call.helper(helpers.argsort)}({call.x}, {call.axis}, {call.descending})"
    if call.node.op.name == "argsort":
        return f"{order}.astype(np.int32)"
    return f"np.take_along_axis({call.x}, {order}, {call.axis})"


# -- windows ------------------------------------------------------------------------------------------------------
table.helpers(
    helpers.conv,
    helpers.conv_input_grad,
    helpers.conv_weight_grad,
    helpers.max_pool,
    helpers.max_pool_positions,
    helpers.avg_pool,
    helpers.avg_pool_grad,
)


# -- random -------------------------------------------------------------------------------------------------------
table.helpers(
    helpers.random_bits,
    helpers.split_key,
    helpers.fold_in,
)


# -- control flow -------------------------------------------------------------------------------------------------
python_control(table, "np.stack({rows})", "np.empty({shape}, {dtype})")
