"""The lowering table of the NumPy backend."""

from __future__ import annotations

from importlib.util import find_spec

from mithril import ops
from mithril.backend import (
    NUMPY_NAMES,
    PREDICATES,
    SIGNS,
    UNARY,
    Call,
    FourierCalls,
    Lowerings,
    axes_text,
    bounds,
    cached_attention,
    expert_matmul,
    expert_weight_grad,
    functions,
    indexing,
    integer_cast,
    is_half,
    is_integer,
    is_wide_float,
    operands_unchanged,
    operators,
    python_control,
    reduction_identity,
    reductions,
    shared_helpers,
    sliced,
    sparse_matmul,
    sparse_matmul_transposed,
)
from mithril.graph import Node, operation_names
from mithril_numpy import helpers, linear_algebra

table = Lowerings(
    "numpy",
    ["import numpy as np"],
    bfloat16="ml_dtypes.bfloat16",
    copy="np.array({x})",
    reserved=vars(helpers),
    dialect=helpers.dialect,
    release=True,
    host=helpers.on_host,
)


# -- element-wise: an operator where there is one, with a form that writes into a dead operand -------------------------
operators(table)
for _name in operation_names("add", "sub", "mul", "div"):
    table.row(
        _name, f"{{a}} {SIGNS[_name]} {{b}}", out=f"np.{NUMPY_NAMES.get(_name, _name)}({{a}}, {{b}}, out={{out}})"
    )
functions(table, "np", PREDICATES)
_PAIRS = operation_names("maximum", "minimum", "floordiv", "mod", "atan2", "logical_and", "logical_or", "logical_xor")
_BITS = operation_names("bitwise_and", "bitwise_or", "bitwise_xor")
_OWN_NAMES = {**NUMPY_NAMES, "abs": "absolute", "round": "rint"}
functions(table, "np", (*UNARY, "neg", "sign", "trunc", *_PAIRS, *_BITS), _OWN_NAMES, out=True)
table.rows(dict.fromkeys(operation_names("floor", "ceil", "round", "trunc"), "{x}.copy()"), when=is_integer)
table.row("sign", "np.sign({x}) + {dtype}(0)", when=lambda node: node.result.dtype.name == "bfloat16")  # both zeros
table.row("where", "np.where({condition}, {a}, {b})")


def _is_whole(node: Node) -> bool:
    """Whether the condition has the result's shape and the elements have four bytes or more."""
    condition, result = node.operands[0], node.result
    is_wide = result.dtype.bits >= 32 and not result.dtype.is_bool
    return condition is not None and is_wide and bool(result.shape) and condition.type.shape == result.shape


@table.function("where", when=_is_whole)
def _where(call: Call) -> str:
    shapes = [None if t is None else t.shape for t in call.types]
    if shapes[1] == call.type.shape and call.b in ("0", "0.0"):
        return f"{call.helper(helpers.masked)}({call.condition}, {call.a})"
    if shapes[1] == shapes[2] == call.type.shape:
        return f"{call.helper(helpers.chosen)}({call.condition}, {call.a}, {call.b})"
    return f"np.where({call.condition}, {call.a}, {call.b})"


@table.function("pow")
def _pow(call: Call) -> str:
    exponent = str(call.b).strip("()")
    if exponent.lstrip("-").replace(".", "").isdigit() and float(exponent) != 0.5:
        return f"np.power({call.a}, {call.b})"
    return f"{call.helper(helpers.power)}({call.array('a')}, {call.array('b')})"


shared_helpers(table)
table.helpers(expert_matmul, expert_weight_grad)

SPARSE = helpers.SCIPY_PRODUCTS if find_spec("scipy") is not None else (sparse_matmul, sparse_matmul_transposed)
for _helper in SPARSE:
    table.helper(_helper, when=is_wide_float)


@table.function("attention", when=lambda node: bool(node.tags.get("cached")))
def _cached_attention(call: Call) -> str:
    scale = call.scale if call.scale is not None else float(call.operand_type("q").shape[3]) ** -0.5
    arrays = ", ".join(call.array(name) for name in ("q", "k", "v", "mask"))
    return f"{call.helper(cached_attention)}({arrays}, {call.literal(scale)})"


@table.function("dynamic_update_slice", "dynamic_update_rows")
def _dynamic_update(call: Call) -> str:
    x, update, starts = (call.array(name) for name in call.node.op.operands)
    axis = f", {call.axis}" if "axis" in call.attributes else ""
    out = f", {x}" if call.is_spent("x") else ""
    return f"{call.helper(getattr(helpers, call.node.op.name))}({x}, {update}, {starts}{axis}{out})"


@table.function("erf", "erfinv")
def _special(call: Call) -> str:
    return f"{call.helper(getattr(helpers, call.node.op.name))}(np.asarray({call.x}))"


@table.function("clip")
def _clip(call: Call) -> str:
    (low, high), text = bounds(call), str(call.x)
    if low is None and high is None:
        return f"np.array({text})"
    text = text if low is None else f"np.maximum({text}, {low})"
    return text if high is None else f"np.minimum({text}, {high})"


@table.function("cast", view=False)
def _cast(call: Call) -> str:
    if call.type.dtype.is_bool:
        return f"{call.x} != 0"
    if call.type.dtype.is_integer:
        return integer_cast(call, f"np.asarray({call.x}).astype({call.dtype()})")
    return f"np.asarray({call.x}).astype({call.dtype()})"


@table.function("bitcast")
def _bitcast(call: Call) -> str:
    return f"np.array({call.array('x')}).view({call.dtype()})"


# -- reductions ---------------------------------------------------------------------------------------------------
@table.function("sum", "prod")
def _sum(call: Call) -> str:
    name = call.node.op.name
    keepdims = ", keepdims=True" if call.keepdims else ""
    if is_half(call.node):
        return f"np.{name}({call.x}, axis={axes_text(call)}, dtype=np.float32{keepdims}).astype({call.dtype()})"
    exact = f", dtype={call.dtype()}" if is_integer(call.node) else ""
    return f"np.{name}({call.x}, axis={axes_text(call)}{exact}{keepdims})"


@table.function("mean")
def _mean(call: Call) -> str:
    keepdims = ", keepdims=True" if call.keepdims else ""
    if not _never_empty(call):
        return f"{call.helper(helpers.average)}({call.array('x')}, {axes_text(call)}, {call.keepdims})"
    if is_half(call.node):
        return f"np.mean({call.x}, axis={axes_text(call)}, dtype=np.float32{keepdims}).astype({call.dtype()})"
    return f"np.mean({call.x}, axis={axes_text(call)}{keepdims})"


def _never_empty(call: Call) -> bool:
    return all(isinstance(n, int) and n > 0 for n in (call.operand_type("x").shape[k] for k in call.axis))


@table.function("max", "min")
def _extreme(call: Call) -> str:
    name = call.node.op.name
    keepdims = ", keepdims=True" if call.keepdims else ""
    if _never_empty(call):
        return f"np.{name}({call.x}, axis={axes_text(call)}{keepdims})"
    initial = reduction_identity(call, "-np.inf", "np.inf")
    return f"np.{name}({call.x}, axis={axes_text(call)}{keepdims}, initial={initial})"


@table.function("any", "all")
def _logic(call: Call) -> str:
    keepdims = ", keepdims=True" if call.keepdims else ""
    return f"np.{call.node.op.name}({call.x}, axis={axes_text(call)}{keepdims})"


table.rows(
    {
        "argmax": "np.argmax({x}, axis={axis}, keepdims={keepdims}).astype(np.int32)",
        "argmin": "np.argmin({x}, axis={axis}, keepdims={keepdims}).astype(np.int32)",
    }
)


@table.function("cumsum", "cumprod")
def _running(call: Call) -> str:
    start = 0 if call.node.op is ops.cumsum else 1
    flags = f"{call.axis}, {call.reverse}, {call.exclusive}"
    return f"{call.helper(reductions.running)}({call.x}, np.{call.node.op.name}, {start}, {flags})"


# -- products -----------------------------------------------------------------------------------------------------
@table.function("matmul")
def _matmul(call: Call) -> str:
    if is_half(call.node):
        return f"np.matmul({call.a}.astype(np.float32), {call.b}.astype(np.float32)).astype({call.dtype()})"
    return f"np.matmul({call.a}, {call.b})"


@table.function("dot")
def _dot(call: Call) -> str:
    axes = ", ".join(call.literal(getattr(call, n)) for n in ("contract_a", "contract_b", "batch_a", "batch_b"))
    name = call.helper(reductions.dot)
    if is_half(call.node):
        operands = f"{call.a}.astype(np.float32), {call.b}.astype(np.float32)"
        return f"{name}({operands}, {axes}, np.matmul).astype({call.dtype()})"
    return f"{name}({call.a}, {call.b}, {axes}, np.matmul)"


for _lower in linear_algebra.FUNCTIONS:
    table.function(_lower.__name__)(_lower)

for _name, _transform in FourierCalls(
    module="np.fft", complex_array="{re} + 1j * {im}", cast="{x}.astype({dtype}, copy=False)"
).functions():
    table.function(_name)(_transform)


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


table.function("barrier", view=True)(operands_unchanged)


@table.function("iota", view=True)
def _iota(call: Call) -> str:
    if len(call.type.shape) == 1:
        return f"np.arange({call.literal(call.type.shape[0])}).astype({call.dtype()})"
    return f"{call.helper(helpers.iota)}({call.shape()}, {call.axis}, {call.dtype()})"


@table.function("slice", view=True)
def _slice(call: Call) -> str:
    return sliced(call)


@table.function("pad")
def _pad(call: Call) -> str:
    if call.mode == "constant":
        return f"{call.helper(helpers.pad)}({call.x}, {call.literal(call.widths)}, {call.literal(call.value)})"
    if not any(map(any, call.widths)):
        return f"{call.x}.copy()"
    return f"{call.helper(indexing.pad_inside)}({call.x}, {call.literal(call.widths)}, {call.mode!r})"


# -- places -------------------------------------------------------------------------------------------------------
@table.function("dynamic_slice", view=True)
def _dynamic_slice(call: Call) -> str:
    return f"{call.x}[{call.helper(helpers.window)}({call.x}, {call.starts}, {call.literal(call.sizes)})]"


@table.function("argsort", "sort")
def _sort(call: Call) -> str:
    order = f"{call.helper(indexing.argsort)}({call.x}, {call.axis}, {call.descending})"
    if call.node.op is ops.argsort:
        return f"{order}.astype(np.int32)"
    return f"np.take_along_axis({call.x}, {order}, {call.axis})"


# -- windows ------------------------------------------------------------------------------------------------------
table.helpers(
    helpers.conv,
    helpers.conv_input_grad,
    helpers.conv_weight_grad,
)


# -- control flow -------------------------------------------------------------------------------------------------
python_control(table, "np.stack({rows})", "np.empty({shape}, {dtype})")
