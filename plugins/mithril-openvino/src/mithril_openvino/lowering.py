"""The lowering table: calls of OpenVINO's operations, and of the functions of ``nodes``."""

from __future__ import annotations

from collections.abc import Callable

from mithril import Node
from mithril.backend import Call, Lowerings, dtype_of, functions, operands_unchanged
from mithril.graph import DType, Registry, bool_, float32, int32, operation_names
from mithril_openvino import nodes

table = Lowerings(
    "openvino",
    ["import numpy as np", "import openvino.opset15 as ov"],
    scalar="ov.constant({value}, np.{name})",
    constant="ov.constant({array})",
    numbers=False,
    module=nodes,
    host=nodes.on_host,
)


# -- conditions -------------------------------------------------------------------------------------------------------
def has_elements(node: Node) -> bool:
    """Whether no size is 0: OpenVINO 2026.4 refuses products, reductions and windows without elements."""
    return not any(v is not None and 0 in v.shape for v in (*node.operands, *node.results))


def has_axes(node: Node) -> bool:
    """Whether the result has an axis: without one, OpenVINO 2026.4 ends the process."""
    return has_elements(node) and bool(node.result.shape)


def is_of(*dtypes: DType) -> Callable[[Node], bool]:
    """Return a condition: elements of these dtypes. OpenVINO sums and multiplies matrices of integers in float32."""
    return lambda node: has_elements(node) and all(v is None or v.dtype in dtypes for v in node.operands)


is_float, is_bool = is_of(float32), is_of(bool_)


def is_number(node: Node) -> bool:
    return bool_ not in (dtype_of(node), dtype_of(node, -1))


def is_int(node: Node) -> bool:
    return dtype_of(node) is int32


def is_sum(node: Node) -> bool:
    return is_float(node) and bool(node.attributes["axis"])


def is_window(node: Node) -> bool:
    """Whether the window has one to three axes, as OpenVINO's have."""
    return is_float(node) and 3 <= len(node.result.shape) <= 5


def is_ungrouped(node: Node) -> bool:
    """Whether there is one group: OpenVINO 2026.4 computes another gradient next to the grouped convolution."""
    return is_float(node) and node.attributes["groups"] == 1


# -- rows -------------------------------------------------------------------------------------------------------------
NAMES: Registry[str] = Registry(
    "OpenVINO's names",
    {
        "add": "add",
        "sub": "subtract",
        "mul": "multiply",
        "div": "divide",
        "neg": "negative",
        "pow": "power",
        "ceil": "ceiling",
        "isnan": "is_nan",
        "where": "select",
    },
)
LOGICAL = {f"bitwise_{name}": f"logical_{name}" for name in ("and", "or", "xor", "not")}
UNARY = operation_names(
    *("log", "sqrt", "erf", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
    *("atanh", "floor", "ceil", "isnan"),
)
EXTREMES = operation_names("maximum", "minimum")
functions(table, "ov", UNARY, NAMES, when=is_float)
functions(table, "ov", ["div", "pow", "equal", "not_equal", "less", "less_equal"], NAMES, when=is_float)
functions(table, "ov", ["add", "sub", "mul", "neg", "abs", "sign"], NAMES, when=is_number)
functions(table, "ov", LOGICAL, when=is_int)
functions(table, "ov", LOGICAL, LOGICAL, when=is_bool)
functions(table, "ov", ["equal", "not_equal", *LOGICAL.values()], when=is_bool)
functions(table, "ov", ["where"], NAMES)
table.helpers(nodes.exp_, nodes.trunc_, nodes.expm1_, nodes.log1p_, nodes.clip_, nodes.conv_, when=is_float)
table.helpers(nodes.conv_input_grad_, nodes.conv_weight_grad_, when=is_ungrouped)
table.helpers(nodes.cast_, nodes.reshape_, nodes.slice_, nodes.flip_)
table.helpers(nodes.take_, when=has_elements)
table.helpers(nodes.max_pool_, when=is_window)
# OpenVINO 2026.4 calls nan greater than a number
table.rows({"greater": "ov.less({b}, {a})", "greater_equal": "ov.less_equal({b}, {a})"}, when=is_float)
table.rows(
    {
        "equal": "nodes.equal_ints({a}, {b})",
        "not_equal": "ov.logical_not(nodes.equal_ints({a}, {b}))",
        "less": "nodes.less_ints({a}, {b})",
        "less_equal": "ov.logical_not(nodes.less_ints({b}, {a}))",
        "greater": "nodes.less_ints({b}, {a})",
        "greater_equal": "ov.logical_not(nodes.less_ints({a}, {b}))",
    },
    when=is_int,
)
table.rows({name: f"nodes.extreme(ov.{name}, {{a}}, {{b}})" for name in EXTREMES}, when=is_number)

REDUCED = "ov.reduce_{}({{x}}, nodes.ints({{axis}}), {{keepdims}})"
REDUCTIONS = {name: REDUCED.format(name) for name in operation_names("sum", "mean", "prod", "max", "min")}
WITH_NAN = {name: f"nodes.with_nan({REDUCTIONS[name]}, {{x}}, {{axis}}, {{keepdims}})" for name in ("max", "min")}
table.rows(REDUCTIONS | WITH_NAN, when=is_sum)
table.rows({"any": REDUCED.format("logical_or"), "all": REDUCED.format("logical_and")}, when=is_bool)
table.row("cumsum", "ov.cum_sum({x}, nodes.ints({axis}), {exclusive}, {reverse})", when=is_float)

table.row("round", 'ov.round({x}, "half_to_even")', when=is_float)
table.row("matmul", "ov.matmul({a}, {b}, False, False)", when=is_float)
table.row("concat", "ov.concat([{xs}], {axis})")
table.row("transpose", "ov.transpose({x}, nodes.ints({perm}))")
table.row("broadcast_to", "ov.broadcast({x}, nodes.ints({shape}))", when=has_axes)
table.row("full", "ov.constant(np.full({shape}, {value}, {dtype}))")
table.row("iota", "ov.constant(np.indices({shape})[{axis}].astype({dtype}))")
table.row("size_value", "ov.constant({value}, {dtype})")
table.function("barrier", view=True)(operands_unchanged)
SIDES = "*nodes.sides({padding})"
table.row("avg_pool", f"ov.avg_pool({{x}}, {{stride}}, {SIDES}, {{kernel}}, not {{count_include_pad}})", when=is_window)
table.row(
    "pad",
    'ov.pad({x}, *map(nodes.ints, nodes.sides({widths})), "constant", ov.constant({value}, {dtype}))',
    when=lambda node: has_axes(node) and node.attributes["mode"] == "constant",
)


@table.function("if", "while", "scan")
def _control_flow(call: Call) -> str:
    """Pass the functions of the regions, a list of the operands, and the attributes by name."""
    regions = ", ".join(call.region(k) for k in range(len(call.node.regions)))
    attributes = "".join(f", {name}={call.literal(value)}" for name, value in call.attributes.items())
    return f"nodes.{call.node.op.name}_({regions}, [{', '.join(map(str, call.operands))}]{attributes})"


native = table.extend()
DIFFERENT: Registry[str] = Registry(
    "native semantics", dict.fromkeys(("max", "min", "maximum", "minimum", "max_pool"), "nan may be ignored")
)
native.rows({name: REDUCTIONS[name] for name in WITH_NAN}, when=is_sum)
functions(native, "ov", EXTREMES, when=is_number)
native.row("max_pool", f"ov.max_pool({{x}}, {{stride}}, {{dilation}}, {SIDES}, {{kernel}}).output(0)", when=is_window)
