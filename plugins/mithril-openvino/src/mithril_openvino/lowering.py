"""The lowering table: calls of OpenVINO's operations, and of the functions of ``nodes``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from mithril import Node
from mithril.backend import Call, Lowerings, dtype_of, operands_unchanged
from mithril.graph import Registry, bool_, float32, int32, operation_names
from mithril_openvino import nodes


def on_host(function: Callable[..., Any], types: Any, *arrays: Any) -> Any:
    """Call a function of NumPy arrays in an operation of the model."""
    return nodes.on_host(function, types, arrays)


table = Lowerings(
    "openvino",
    ["import numpy as np", "import openvino.opset15 as ov", "from mithril_openvino import nodes"],
    scalar="ov.constant({value}, np.{name})",
    constant="ov.constant({array})",
    host=on_host,
)


# -- conditions -------------------------------------------------------------------------------------------------------
def has_elements(node: Node) -> bool:
    """Whether no size is 0: OpenVINO 2026.4 refuses products, reductions and windows without elements."""
    return not any(v is not None and 0 in v.shape for v in (*node.operands, *node.results))


def has_axes(node: Node) -> bool:
    """Whether the result has an axis: without one, OpenVINO 2026.4 ends the process."""
    return has_elements(node) and bool(node.result.shape)


def is_float(node: Node) -> bool:
    """Whether the operands are floats: OpenVINO sums and multiplies matrices of integers in float32."""
    return has_elements(node) and all(v is None or v.dtype is float32 for v in node.operands)


def is_bool(node: Node) -> bool:
    return has_elements(node) and all(v is None or v.dtype is bool_ for v in node.operands)


def is_number(node: Node) -> bool:
    return all(v is None or v.dtype in (float32, int32) for v in node.operands)


def is_sum(node: Node) -> bool:
    return is_float(node) and bool(node.attributes["axis"])


def is_window(node: Node) -> bool:
    """Whether the window has one to three axes, as OpenVINO's have."""
    x = node.operands[0]
    return is_float(node) and x is not None and 3 <= len(x.shape) <= 5


def is_ungrouped(node: Node) -> bool:
    """Whether there is one group: OpenVINO 2026.4 computes another gradient next to the grouped convolution."""
    return is_float(node) and node.attributes["groups"] == 1


# -- rows -------------------------------------------------------------------------------------------------------------
def calls(names: str, when: Any = None) -> None:
    """Add calls of OpenVINO: ``name`` or ``name=function``; its operands are nodes, as it promotes no numbers."""
    for text in names.split():
        name, _, function = text.partition("=")

        def write(call: Call, function: str = function or name) -> str:
            return f"ov.{function}({', '.join(map(call.argument, call.node.op.operands))})"

        table.function(name, when=when)(write)


def functions(names: str, when: Any = None) -> None:
    """Add calls of functions of ``nodes``, whose parameters are named like operands and attributes."""
    for name in names.split():
        function = getattr(nodes, f"{name}_")

        def write(call: Call, function: Callable[..., Any] = function) -> str:
            return f"nodes.{function.__name__}({', '.join(map(call.argument, signature(function).parameters))})"

        table.function(name, when=when)(write)


calls("log sqrt erf sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh", is_float)
calls("floor ceil=ceiling div=divide pow=power isnan=is_nan", is_float)
calls("add sub=subtract mul=multiply neg=negative abs sign", is_number)
calls("equal not_equal less less_equal", is_float)
calls("bitwise_and bitwise_or bitwise_xor bitwise_not", lambda node: node.result.dtype is int32)
calls("equal not_equal logical_and logical_or logical_xor logical_not", is_bool)
calls("bitwise_and=logical_and bitwise_or=logical_or bitwise_xor=logical_xor bitwise_not=logical_not", is_bool)
calls("where=select")
for _name, _when in {
    "exp trunc expm1 log1p conv": is_float,
    "conv_input_grad conv_weight_grad": is_ungrouped,
    "clip": is_float,
    "cast reshape slice flip": None,
    "take": has_elements,
    "max_pool": is_window,
}.items():
    functions(_name, _when)
for _name in operation_names("sum", "mean", "prod"):
    table.row(_name, f"ov.reduce_{_name}({{x}}, nodes.ints({{axis}}), {{keepdims}})", when=is_sum)
for _name in operation_names("max", "min"):
    _text = f"ov.reduce_{_name}({{x}}, nodes.ints({{axis}}), {{keepdims}})"
    table.row(_name, f"nodes.with_nan({_text}, {{x}}, {{axis}}, {{keepdims}})", when=is_sum)
for _name, _sign in {"any": "or", "all": "and"}.items():
    table.row(_name, f"ov.reduce_logical_{_sign}({{x}}, nodes.ints({{axis}}), {{keepdims}})", when=is_bool)
table.row("round", 'ov.round({x}, "half_to_even")', when=is_float)
table.row("cumsum", "ov.cum_sum({x}, nodes.ints({axis}), {exclusive}, {reverse})", when=is_float)
table.row("matmul", "ov.matmul({a}, {b}, False, False)", when=is_float)
table.row("concat", "ov.concat([{xs}], {axis})")
table.row("transpose", "ov.transpose({x}, nodes.ints({perm}))")
table.row("broadcast_to", "ov.broadcast({x}, nodes.ints({shape}))", when=has_axes)
table.row("full", "ov.constant(np.full({shape}, {value}, {dtype}))")
table.row("iota", "ov.constant(np.indices({shape})[{axis}].astype({dtype}))")
table.row("size_value", "ov.constant({value}, {dtype})")
table.function("barrier", view=True)(operands_unchanged)


@table.function("greater", "greater_equal", when=is_float)
def _greater(call: Call) -> str:
    """Return the opposite comparison: OpenVINO 2026.4 calls nan greater than a number."""
    return f"ov.{call.node.op.name.replace('greater', 'less')}({call.array('b')}, {call.array('a')})"


COMPARED: Registry[str] = Registry(
    "comparisons of integers",
    {
        "equal": "nodes.equal_ints({a}, {b})",
        "not_equal": "ov.logical_not(nodes.equal_ints({a}, {b}))",
        "less": "nodes.less_ints({a}, {b})",
        "less_equal": "ov.logical_not(nodes.less_ints({b}, {a}))",
        "greater": "nodes.less_ints({b}, {a})",
        "greater_equal": "ov.logical_not(nodes.less_ints({a}, {b}))",
    },
)


@table.function(*COMPARED, when=lambda node: dtype_of(node) is int32)
def _compared(call: Call) -> str:
    return COMPARED[call.node.op.name].format(a=call.array("a"), b=call.array("b"))


@table.function("maximum", "minimum", when=is_number)
def _extreme(call: Call) -> str:
    return f"nodes.extreme(ov.{call.node.op.name}, {call.array('a')}, {call.array('b')})"


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


# With semantics="native", nan in maxima and minima is what OpenVINO returns.
native = table.extend()
DIFFERENT = frozenset(operation_names("max", "min", "maximum", "minimum", "max_pool"))
for _name in operation_names("max", "min"):
    native.row(_name, f"ov.reduce_{_name}({{x}}, nodes.ints({{axis}}), {{keepdims}})", when=is_sum)


@native.function("maximum", "minimum", when=is_number)
def _native_extreme(call: Call) -> str:
    return f"ov.{call.node.op.name}({call.array('a')}, {call.array('b')})"


native.row("max_pool", f"ov.max_pool({{x}}, {{stride}}, {{dilation}}, {SIDES}, {{kernel}}).output(0)", when=is_window)
