"""The lowering table of the PyTorch backend: primitives."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from mithril import ops
from mithril.backend import (
    HELPERS,
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
    is_wide_float,
    operators,
    python_control,
    reduction_identity,
    reductions,
    shared_helpers,
    sliced,
)
from mithril.graph import Node, UnsupportedError, operation_names, uint32
from mithril_torch import helpers, linear_algebra

table = Lowerings(
    "torch",
    ["import torch", "import torch.nn.functional as F"],
    dtype="torch.{name}",
    boolean="bool",
    scalar="torch.tensor({value}, dtype=torch.{name})",
    constant="torch.from_numpy({array}.copy()).to({dtype})",
    copy="{x}.clone()",
    reserved=vars(helpers),
    dialect=helpers.dialect,
    host=helpers.on_host,
    release=True,
)


def is_inexact(node: Node) -> bool:
    return bool(dtype_of(node).is_float)


def has_onednn() -> bool:
    import torch

    return bool(torch.backends.mkldnn.is_available())


def is_uint32(node: Node) -> bool:
    """Whether an operand is uint32, for which PyTorch lacks most operations."""
    return any(v is not None and v.dtype.name == "uint32" for v in node.operands)


# -- element-wise -------------------------------------------------------------------------------------------------
operators(table)
functions(table, "torch", (*UNARY, *PREDICATES, "log2", "trunc", "erf", "erfinv", "rsqrt"))
table.row("neg", "-{x}")


@table.function("sign")
def _sign(call: Call) -> str:
    return f"{call.helper(integers.sign)}({call.x})"


table.rows(dict.fromkeys(operation_names("floor", "ceil", "round", "trunc"), "{x}"), when=is_integer, view=True)


@table.function("maximum", "minimum", "pow", "atan2", "logical_and", "logical_or", "logical_xor")
def _pairs(call: Call) -> str:
    name = call.node.op.name
    return f"torch.{name}({call.array('a')}, {call.array('b')})"


shared_helpers(table)
for _name, _helper in (("floordiv", integers.floordiv_float), ("mod", integers.mod_float)):
    table.helper(_helper, op=_name)


@table.function("where")
def _where(call: Call) -> str:
    return f"torch.where({call.array('condition')}, {call.array('a')}, {call.array('b')})"


def _uint32_function(function: str, narrow: bool) -> Any:
    def lower(call: Call) -> str:
        op = call.node.op
        operands = ", ".join(call.array(name) for name in op.operands)
        text = f"{call.helper(helpers.as_int64)}({function}, {operands})"
        return f"{text}.to(torch.uint32)" if narrow else text

    return lower


# PyTorch 2 stores uint32 but lacks these kernels. int64 holds all values of uint32, and the cast
# back keeps the low 32 bits, which is arithmetic modulo 2**32.
for _name, _function, _narrow in (
    ("add", "torch.add", True),
    ("sub", "torch.sub", True),
    ("mul", "torch.mul", True),
    ("maximum", "torch.maximum", True),
    ("minimum", "torch.minimum", True),
    ("bitwise_not", "torch.bitwise_not", True),
    ("neg", "torch.neg", True),
    ("sign", "torch.sign", True),
    ("square", "torch.square", True),
    ("less", "torch.lt", False),
    ("less_equal", "torch.le", False),
    ("greater", "torch.gt", False),
    ("greater_equal", "torch.ge", False),
):
    table.function(_name, when=is_uint32)(_uint32_function(_function, _narrow))


table.row("abs", "{x}.clone()", when=is_uint32)


@table.function("where", when=is_uint32)
def _where_uint32(call: Call) -> str:
    """Select among int64: torch.compile promotes the condition with uint32, for which it has no rule (2.13)."""
    a, b = (f"{call.array(name)}.to(torch.int64)" for name in ("a", "b"))
    return f"torch.where({call.array('condition')}, {a}, {b}).to(torch.uint32)"


@table.function("shift_left", "shift_right", "floordiv", "mod", "pow", when=is_uint32)
def _uint32_helper(call: Call) -> str:
    name = call.node.op.name
    helper = call.helper(HELPERS[f"{name}_int" if name in ("floordiv", "mod", "pow") else name])
    return f"{call.helper(helpers.as_int64)}({helper}, {call.array('a')}, {call.array('b')}).to(torch.uint32)"


@table.function("clip")
def _clip(call: Call) -> str:
    low, high = bounds(call)
    keywords = [f"{name}={bound}" for name, bound in (("min", low), ("max", high)) if bound is not None]
    if not keywords:
        return f"{call.array('x')}.clone()"
    if is_uint32(call.node):
        return f"torch.clamp({call.array('x')}.to(torch.int64), {', '.join(keywords)}).to(torch.uint32)"
    return f"torch.clamp({call.x}, {', '.join(keywords)})"


@table.function("cast")
def _cast(call: Call) -> str:
    source, target = call.operand_type("x").dtype, call.type.dtype
    if target.is_bool:
        return f"{call.array('x')} != 0"
    plain = f"{call.array('x')}.to({call.dtype()}{', copy=True' if source is target else ''})"
    return integer_cast(call, plain) if target.is_integer else plain


@table.function("bitcast")
def _bitcast(call: Call) -> str:
    return f"{call.array('x')}.clone().view({call.dtype()})"


# -- reductions ---------------------------------------------------------------------------------------------------
def _reduced(call: Call) -> str:
    return f"{call.array('x')}, {call.literal(call.axis)}, {call.keepdims}"


@table.function("sum", "prod")
def _sum(call: Call) -> str:
    name = call.helper(helpers.total if call.node.op is ops.sum else helpers.product)
    if is_half(call.node):
        return f"{name}({_reduced(call)}, torch.float32).to({call.dtype()})"
    return f"{name}({_reduced(call)}, {call.dtype()})"


@table.function("sum", when=lambda node: bool(dtype_of(node).bits == 32 and node.attributes["axis"]))
def _sum_plain(call: Call) -> str:
    keepdim = ", keepdim=True" if call.keepdims else ""
    dtype = f", dtype={call.dtype()}" if is_integer(call.node) else ""
    return f"torch.sum({call.array('x')}, {call.literal(call.axis)}{keepdim}{dtype})"


@table.function("sum", "prod", when=is_uint32)
def _sum_uint32(call: Call) -> str:
    name = call.helper(helpers.total if call.node.op is ops.sum else helpers.product)
    return f"{name}({_reduced(call)}, torch.int64).to(torch.uint32)"


@table.function("mean")
def _mean(call: Call) -> str:
    name = call.helper(helpers.average)
    if is_half(call.node):
        x, axes = call.array("x"), call.literal(call.axis)
        return f"{name}({x}.to(torch.float32), {axes}, {call.keepdims}).to({call.dtype()})"
    return f"{name}({_reduced(call)})"


@table.function("max", "min")
def _extreme(call: Call) -> str:
    largest = call.node.op is ops.max
    start = reduction_identity(call, 'float("-inf")', 'float("inf")')
    return f"{call.helper(helpers.extreme)}({_reduced(call)}, {largest}, {start})"


@table.function("any", "all")
def _logic(call: Call) -> str:
    return f"{call.helper(helpers.logic)}({_reduced(call)}, torch.{call.node.op.name})"


@table.function("argmax", "argmin")
def _position(call: Call) -> str:
    largest = call.node.op is ops.argmax
    return f"{call.helper(helpers.position)}({call.array('x')}, {call.axis}, {call.keepdims}, {largest})"


@table.function("cumsum", "cumprod")
def _running(call: Call) -> str:
    name = call.node.op.name
    flags = f"{0 if name == 'cumsum' else 1}, {call.axis}, {call.reverse}, {call.exclusive}"
    return f"{call.helper(reductions.running)}({call.array('x')}, torch.{name}, {flags})"


# -- products -----------------------------------------------------------------------------------------------------
@table.function("matmul")
def _matmul(call: Call) -> str:
    name = "torch.matmul" if is_inexact(call.node) else call.helper(helpers.matmul_int)
    return f"{name}({call.array('a')}, {call.array('b')})"


@table.function("dot")
def _dot(call: Call) -> str:
    axes = ", ".join(call.literal(call.attributes[n]) for n in ("contract_a", "contract_b", "batch_a", "batch_b"))
    kind = dtype_of(call.node)
    multiply = call.helper(helpers.matmul) if kind.name == "float32" and has_onednn() else "torch.matmul"
    if not kind.is_float:
        multiply = call.helper(helpers.matmul_int)
    return f"{call.helper(reductions.dot)}({call.array('a')}, {call.array('b')}, {axes}, {multiply})"


for _lower in linear_algebra.FUNCTIONS:
    table.function(_lower.__name__)(_lower)


def _of_elements(transform: Callable[[Call], str]) -> Callable[[Call], str]:
    """Return a lowering that calls no transform of tensors without elements, which MKL refuses."""

    def lower(call: Call) -> str:
        text, shape = transform(call), call.shape()
        if all(isinstance(n, int) and n for n in call.type.shape):
            return text
        empty = f"torch.empty({shape}, dtype={call.dtype()})"
        result = empty if len(call.results) == 1 else f"({empty}, {empty})"
        return f"{text} if 0 not in {shape} else {result}"

    return lower


for _name, _transform in FourierCalls(
    module="torch.fft",
    complex_array="torch.complex({re}, {im})",
    axis="dim",
    cast="{x}.to({dtype})",
    upcast=helpers.single,
).functions():
    table.function(_name)(_of_elements(_transform))


# -- shapes -------------------------------------------------------------------------------------------------------
table.row("reshape", "torch.reshape({x}, {shape})", view=True)
table.row("transpose", "{x}.permute({perm})", view=True)
table.row("broadcast_to", "{x}.expand({shape})", view=True)
# For gradients of autograd, on meshes too; those of the graph end here themselves.
table.row("stop_gradient", "{x}.detach()", view=True)
table.row("flip", "torch.flip({x}, {axis})")
table.row("concat", "torch.cat([{xs}], {axis})")
table.row("full", "torch.full({shape}, {value}, dtype={dtype})")
table.row("tril", "torch.tril({x}, {k})")
table.row("triu", "torch.triu({x}, {k})")
table.row("size_value", "torch.tensor({value}, dtype={dtype})")


def is_scalar(node: Node) -> bool:
    operand = node.operands[0]
    return operand is not None and not operand.type.shape


@table.function("reshape", "transpose", "broadcast_to", when=is_scalar, view=True)
def _of_scalar(call: Call) -> str:
    return f"{call.array('x')}.expand({call.shape()})" if call.type.shape else call.array("x")


@table.function("barrier", view=True)
def _barrier(call: Call) -> str:
    return ", ".join(f"{call.helper(helpers.stored)}({x})" for x in call.operands)


@table.function("iota")
def _iota(call: Call) -> str:
    shape = call.type.shape
    sizes = ["1"] * len(shape)
    sizes[call.axis] = "-1"
    text = f"torch.arange({call.literal(shape[call.axis])}, dtype=torch.int64)"
    if len(shape) > 1:
        text = f"{text}.reshape({', '.join(sizes)}).expand({call.shape()})"
    return f"({text} != 0)" if call.type.dtype.is_bool else f"{text}.to({call.dtype()})"


@table.function("pad")
def _pad(call: Call) -> str:
    if call.mode == "constant":
        widths = [n for pair in reversed(call.widths) for n in pair]
        return f"F.pad({call.array('x')}, {call.literal(widths)}, value={call.literal(call.value)})"
    return f"{call.helper(indexing.pad_inside)}({call.array('x')}, {call.literal(call.widths)}, {call.mode!r})"


@table.function("slice", view=True)
def _slice(call: Call) -> str:
    return sliced(call, indexing.part)


@table.function("argsort", "sort")
def _sort(call: Call) -> str:
    x = call.array("x")
    key = f"{x}.to(torch.int64)" if is_uint32(call.node) else x
    order = f"{call.helper(indexing.argsort)}({key}, {call.axis}, {call.descending})"
    if call.node.op is ops.argsort:
        return f"{order}.to(torch.int32)"
    if is_uint32(call.node):
        return f"torch.gather({key}, {call.axis}, {order}).to(torch.uint32)"
    return f"torch.gather({x}, {call.axis}, {order})"


@table.function("flip", "tril", "triu", when=is_uint32)
def _layout_uint32(call: Call) -> str:
    x, attributes = f"{call.array('x')}.to(torch.int64)", call.attributes
    last = call.literal(attributes["axis"] if call.node.op is ops.flip else attributes["k"])
    return f"torch.{call.node.op.name}({x}, {last}).to(torch.uint32)"


# -- windows ------------------------------------------------------------------------------------------------------
table.helpers(
    helpers.conv,
    helpers.conv_input_grad,
    helpers.conv_weight_grad,
    helpers.expert_matmul,
    helpers.expert_weight_grad,
)
table.helper(helpers.sparse_matmul, when=is_wide_float)
table.helper(helpers.sparse_matmul_transposed, when=is_wide_float)


@table.function("conv", "conv_input_grad", "conv_weight_grad", when=lambda node: not dtype_of(node).is_float)
def _no_integer_convolution(call: Call) -> str:
    raise UnsupportedError(
        f"backend 'torch' does not support '{call.node.op.name}' of {dtype_of(call.node)}",
        facts=[str(call.node.origin)],
        hint="cast the operands to a float first: cast(x, dtype='float32')",
    )


@table.function("dynamic_update_slice", "dynamic_update_rows")
def _dynamic_update(call: Call) -> str:
    x, update, starts = (call.array(name) for name in call.node.op.operands)
    axis = f", {call.axis}" if "axis" in call.attributes else ""
    # Only a donated state without later readers may be overwritten; another one is copied first.
    if not call.is_spent("x") or 0 in call.operand_type("update").shape:
        helper = table.dialect.version(getattr(indexing, call.node.op.name))
        return f"{call.helper(helper)}({x}, {update}, {starts}{axis})"
    if axis:
        start = call.helper(table.dialect.version(indexing.row_start))
        first = f"{start}({x}, {starts}{axis}, {update}.shape[{call.axis}])"
        return f"{call.helper(helpers.overwritten_rows)}({x}, {first}, {update}{axis})"
    first = f"{call.helper(table.dialect.version(indexing.window_start))}({x}, {starts}, {update}.shape)"
    return f"{call.helper(helpers.overwritten)}({x}, {first}, {update})"


@table.function(
    "scatter_nd_add",
    "dynamic_update_slice",
    "dynamic_update_rows",
    "max_pool",
    "max_pool_positions",
    when=is_uint32,
)
def _mixed_uint32(call: Call) -> str:
    """Emit the helper on int64, since PyTorch does not support uint32."""
    function = HELPERS[call.node.op.name]
    operands = zip(call.node.op.operands, call.node.operands, strict=True)
    converted = {name for name, value in operands if value is not None and value.dtype is uint32}
    names = [p.name for p in signature(function).parameters.values() if p.default is p.empty]
    arguments = [f"{call.argument(n)}.to(torch.int64)" if n in converted else call.argument(n) for n in names]
    text = f"{call.helper(function)}({', '.join(arguments)})"
    return f"{text}.to(torch.uint32)" if call.type.dtype is uint32 else text


python_control(table, "torch.stack({rows})", "torch.empty({shape}, dtype={dtype})")
