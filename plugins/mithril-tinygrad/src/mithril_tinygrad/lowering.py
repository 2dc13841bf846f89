"""The lowering table: methods of tensors, and the functions of ``functions``."""

from __future__ import annotations

from mithril.backend import (
    Call,
    Lowerings,
    corrections as c,
    is_float,
    is_integer,
    operands_unchanged,
    operators,
    python_control,
    sliced,
)
from mithril.graph import ALL, float32, operation, operation_names
from mithril_tinygrad import functions

DTYPES = frozenset(d for d in ALL if not d.is_float or d is float32)  # float64 has the accuracy of float32
EAGER = (operation("if"), operation("while"))  # Python reads the condition at each call
native = Lowerings(
    "tinygrad",
    ["from tinygrad import Tensor, dtypes"],
    dtype="dtypes.{name}",
    boolean="bool",
    scalar='Tensor({value}, dtype=dtypes.{name}, device="CPU")',
    constant="functions.of_numpy({array})",
    module=functions,
    host=functions.on_host,
)


def by_method(call: Call) -> str:
    """Return a call of the method of the first operand that has the operation's name."""
    x, *rest = map(call.argument, call.node.op.operands)
    return f"{x}.{call.node.op.name}({', '.join(rest)})"


def reduced(*names: str, more: str = "") -> dict[str, str]:
    return {name: f"functions.reduced({{x}}, '{name}', {{axis}}, {{keepdims}}{more})" for name in names}


operators(native)
native.function(*["exp", "log", "sqrt", "sin", "floor", "ceil", "trunc", "isnan"], when=is_float)(by_method)
native.function(*["erf", "sign", "round"], when=is_float)(by_method)
native.function(*["neg", "abs", "where", "maximum", "minimum", "logical_not", "bitwise_not"])(by_method)
native.helpers(functions.take_, functions.conv_, functions.conv_input_grad_, functions.conv_weight_grad_)
native.helpers(functions.cumsum_, functions.iota_, functions.max_pool_)
native.row("cast", "{x}.cast({dtype})")
native.rows(dict.fromkeys(operation_names("floor", "ceil", "trunc", "round"), "{x}"), when=is_integer, view=True)
native.rows({f"logical_{name}": f"({{a}} != 0).bitwise_{name}({{b}} != 0)" for name in ("and", "or", "xor")})
native.rows(reduced("sum", "prod", more=", dtype={dtype}") | reduced("mean", "max", "min", "any", "all"))
native.row("matmul", "{a}.matmul({b}, dtype={dtype})")
native.row("concat", "Tensor.cat({xs}, dim={axis}).contiguous()")
native.row("transpose", "{x}.permute({perm})", view=True)
native.row("reshape", "{x}.reshape({shape})", view=True)
native.row("broadcast_to", "{x}.expand({shape})", view=True)
native.row("flip", "{x}.flip({axis})", view=True)
native.row("full", 'Tensor.full({shape}, {value}, dtype={dtype}, device="CPU")')
native.row("size_value", 'Tensor({value}, dtype={dtype}, device="CPU")')
native.row("pad", "{x}.pad({widths}, value={value})", when=lambda node: node.attributes["mode"] == "constant")
native.function("barrier", view=True)(operands_unchanged)
native.function("slice", view=True)(sliced)
python_control(native, "Tensor.stack(*{rows})", "Tensor.zeros({shape}, dtype={dtype})", truth="{x}.item()")

native.correct(c.expm1, c.log1p, c.tanh, c.sinh, c.cosh, c.cos, c.erf, c.sign, c.abs_, c.round_, when=is_float)
native.correct(c.greater_equal, c.less_equal, when=is_float)
native.correct(c.clip, c.cast, c.take)

table = native.extend()
table.correct(*c.KEEPING_NAN, when=is_float)
