"""The lowering table: methods of tensors, and the functions of ``functions``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from mithril import Node
from mithril.backend import (
    Call,
    Lowerings,
    dtype_of,
    is_integer,
    operands_unchanged,
    operators,
    python_control,
    sliced,
)
from mithril.graph import ALL, float32, operation_names
from mithril_tinygrad import arrays, functions

DTYPES = frozenset(d for d in ALL if not d.is_float or d is float32)  # float64 has the accuracy of float32
EAGER = operation_names("if", "while")  # Python reads the condition at each call


def on_host(function: Callable[..., Any], types: Any, *operands: Any) -> Any:
    return arrays.on_host(function, *operands)


table = Lowerings(
    "tinygrad",
    ["from tinygrad import Tensor, dtypes", "from mithril_tinygrad import arrays, functions"],
    dtype="dtypes.{name}",
    boolean="bool",
    scalar='Tensor({value}, dtype=dtypes.{name}, device="CPU")',
    constant="arrays.of_numpy({array})",
    host=on_host,
)


def is_float(node: Node) -> bool:
    return bool(dtype_of(node).is_float)


def by_method(call: Call) -> str:
    """Return a call of the method of the first operand that has the operation's name."""
    x, *rest = map(call.argument, call.node.op.operands)
    return f"{x}.{call.node.op.name}({', '.join(rest)})"


def calls(names: str, when: Any = None) -> None:
    """Add calls of functions of ``functions``, whose parameters are named like operands and attributes."""
    for name in names.split():
        function = getattr(functions, f"{name}_")

        def write(call: Call, function: Callable[..., Any] = function) -> str:
            return f"functions.{function.__name__}({', '.join(map(call.argument, signature(function).parameters))})"

        table.function(name, when=when)(write)


operators(table)
table.function(*["exp", "log", "sqrt", "sin", "floor", "ceil", "trunc", "isnan"], when=is_float)(by_method)
table.function(*["neg", "abs", "where", "logical_not", "bitwise_not"])(by_method)
calls("abs cos round expm1 log1p sinh cosh tanh erf sign greater_equal less_equal", is_float)
calls("max_pool", is_float)
calls("maximum minimum max min cast clip take conv conv_input_grad conv_weight_grad")
for _name in operation_names("floor", "ceil", "trunc", "round"):
    table.row(_name, "{x}", when=is_integer, view=True)
for _name in operation_names("sum", "prod"):
    table.row(_name, f"functions.reduced({{x}}, '{_name}', {{axis}}, {{keepdims}}, dtype={{dtype}})")
for _name in ("and", "or", "xor"):
    table.row(f"logical_{_name}", f"({{a}} != 0).bitwise_{_name}({{b}} != 0)")
for _name in operation_names("mean", "any", "all"):
    table.row(_name, f"functions.reduced({{x}}, '{_name}', {{axis}}, {{keepdims}})")
table.row("matmul", "{a}.matmul({b}, dtype={dtype})")
table.row("concat", "Tensor.cat({xs}, dim={axis})")
table.row("transpose", "{x}.permute({perm})", view=True)
table.row("reshape", "{x}.reshape({shape})", view=True)
table.row("broadcast_to", "{x}.expand({shape})", view=True)
table.row("flip", "{x}.flip({axis})", view=True)
table.row("full", 'Tensor.full({shape}, {value}, dtype={dtype}, device="CPU")')
table.row("iota", "functions.iota({shape}, {axis}, {dtype})")
table.row("size_value", 'Tensor({value}, dtype={dtype}, device="CPU")')
table.row("pad", "{x}.pad({widths}, value={value})", when=lambda node: node.attributes["mode"] == "constant")
table.row("cumsum", "functions.running({x}, 'cumsum', {axis}, {reverse}, {exclusive})")
table.function("barrier", view=True)(operands_unchanged)
table.function("slice", view=True)(sliced)
python_control(table, "Tensor.stack(*{rows})", "Tensor.zeros({shape}, dtype={dtype})", truth="{x}.item()")


native = table.extend()  # with semantics="native", nan in maxima and minima is what tinygrad returns
DIFFERENT = frozenset(operation_names("max", "min", "maximum", "minimum", "max_pool"))
native.row("max_pool", "functions.native_max_pool({x}, {kernel}, {stride}, {padding}, {dilation})", when=is_float)
native.function("maximum", "minimum")(by_method)
native.rows({name: f"functions.reduced({{x}}, '{name}', {{axis}}, {{keepdims}})" for name in ("max", "min")})
