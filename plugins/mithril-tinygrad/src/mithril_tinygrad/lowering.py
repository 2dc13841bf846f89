"""The lowering table: methods of tensors, and the functions of ``functions``."""

from __future__ import annotations

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
from mithril.graph import ALL, Registry, float32, operation, operation_names
from mithril_tinygrad import functions

DTYPES = frozenset(d for d in ALL if not d.is_float or d is float32)  # float64 has the accuracy of float32
EAGER = (operation("if"), operation("while"))  # Python reads the condition at each call
table = Lowerings(
    "tinygrad",
    ["from tinygrad import Tensor, dtypes"],
    dtype="dtypes.{name}",
    boolean="bool",
    scalar='Tensor({value}, dtype=dtypes.{name}, device="CPU")',
    constant="functions.of_numpy({array})",
    module=functions,
    host=functions.on_host,
)


def is_float(node: Node) -> bool:
    return bool(dtype_of(node).is_float)


def by_method(call: Call) -> str:
    """Return a call of the method of the first operand that has the operation's name."""
    x, *rest = map(call.argument, call.node.op.operands)
    return f"{x}.{call.node.op.name}({', '.join(rest)})"


def reduced(*names: str, more: str = "") -> dict[str, str]:
    return {name: f"functions.reduced({{x}}, '{name}', {{axis}}, {{keepdims}}{more})" for name in names}


operators(table)
table.function(*["exp", "log", "sqrt", "sin", "floor", "ceil", "trunc", "isnan"], when=is_float)(by_method)
table.function(*["neg", "abs", "where", "logical_not", "bitwise_not"])(by_method)
table.helpers(
    *(functions.abs_, functions.cos_, functions.round_, functions.expm1_, functions.log1p_, functions.sinh_),
    *(functions.cosh_, functions.tanh_, functions.erf_, functions.sign_, functions.greater_equal_),
    *(functions.less_equal_, functions.max_pool_),
    when=is_float,
)
table.helpers(
    *(functions.maximum_, functions.minimum_, functions.max_, functions.min_, functions.cast_, functions.clip_),
    *(functions.take_, functions.conv_, functions.conv_input_grad_, functions.conv_weight_grad_, functions.cumsum_),
    functions.iota_,
)
table.rows(dict.fromkeys(operation_names("floor", "ceil", "trunc", "round"), "{x}"), when=is_integer, view=True)
table.rows({f"logical_{name}": f"({{a}} != 0).bitwise_{name}({{b}} != 0)" for name in ("and", "or", "xor")})
table.rows(reduced("sum", "prod", more=", dtype={dtype}") | reduced("mean", "any", "all"))
table.row("matmul", "{a}.matmul({b}, dtype={dtype})")
table.row("concat", "Tensor.cat({xs}, dim={axis})")
table.row("transpose", "{x}.permute({perm})", view=True)
table.row("reshape", "{x}.reshape({shape})", view=True)
table.row("broadcast_to", "{x}.expand({shape})", view=True)
table.row("flip", "{x}.flip({axis})", view=True)
table.row("full", 'Tensor.full({shape}, {value}, dtype={dtype}, device="CPU")')
table.row("size_value", 'Tensor({value}, dtype={dtype}, device="CPU")')
table.row("pad", "{x}.pad({widths}, value={value})", when=lambda node: node.attributes["mode"] == "constant")
table.function("barrier", view=True)(operands_unchanged)
table.function("slice", view=True)(sliced)
python_control(table, "Tensor.stack(*{rows})", "Tensor.zeros({shape}, dtype={dtype})", truth="{x}.item()")

native = table.extend()
DIFFERENT: Registry[str] = Registry(
    "native semantics", dict.fromkeys(("max", "min", "maximum", "minimum", "max_pool"), "nan may be ignored")
)
native.helper(functions.native_max_pool, op="max_pool", when=is_float)
native.function("maximum", "minimum")(by_method)
native.rows(reduced("max", "min"))
