"""The lowering table: calls of OpenVINO's operations, and of the functions of ``nodes``."""

from __future__ import annotations

from collections.abc import Callable

from mithril.backend import NUMPY_NAMES, Call, Lowerings, corrections as c, functions, operands_unchanged
from mithril.graph import DType, Node, bool_, float32, int32
from mithril_openvino import nodes

native = Lowerings(
    "openvino",
    ["import numpy as np", "import openvino.opset15 as ov"],
    scalar="ov.constant({value}, np.{name})",
    constant="ov.constant({array})",
    copy="nodes.copied({x})",
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


is_float, is_int, is_number, is_bool = is_of(float32), is_of(int32), is_of(float32, int32), is_of(bool_)


def is_sum(node: Node) -> bool:
    return is_float(node) and bool(node.attributes["axis"])


def is_window(node: Node) -> bool:
    """Whether the window has one to three axes, as OpenVINO's have."""
    return is_float(node) and 3 <= len(node.result.shape) <= 5


def is_ungrouped(node: Node) -> bool:
    """Whether there is one group: OpenVINO 2026.4 computes another gradient next to the grouped convolution."""
    return is_float(node) and node.attributes["groups"] == 1


# -- rows -------------------------------------------------------------------------------------------------------------
LOGICAL = {f"bitwise_{name}": f"logical_{name}" for name in ("and", "or", "xor", "not")}
functions(native, "ov", ["exp", "log", "sqrt", "erf", "sin", "cos", "tan", "asin", "acos", "atan"], when=is_float)
functions(native, "ov", ["sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "floor"], when=is_float)
functions(native, "ov", ["div", "pow"], NUMPY_NAMES, when=is_float)
functions(native, "ov", ["add", "sub", "mul", "neg", "abs", "sign", "maximum", "minimum"], NUMPY_NAMES, when=is_number)
functions(native, "ov", ["equal", "not_equal", "less", "less_equal"], when=is_number)
functions(native, "ov", LOGICAL, when=is_int)
functions(native, "ov", LOGICAL, LOGICAL, when=is_bool)
functions(native, "ov", ["equal", "not_equal", *LOGICAL.values()], when=is_bool)
native.row("where", "ov.select({condition}, {a}, {b})")
native.helpers(nodes.conv_, when=is_float)
native.helpers(nodes.conv_input_grad_, when=is_ungrouped)
native.helpers(nodes.reshape_, nodes.slice_, view=True)
# OpenVINO's CPU plugin joins the comparison with its neighbors, unlike is_nan.
native.row("isnan", "ov.not_equal({x}, {x})", when=is_float)
native.row("cast", "ov.convert({x}, {dtype})")
native.row("take", "ov.gather({x}, {indices}, nodes.ints({axis}))", when=has_elements)

REDUCED = "ov.reduce_{}({{x}}, nodes.ints({{axis}}), {{keepdims}})"
native.rows({name: REDUCED.format(name) for name in ("sum", "mean", "prod", "max", "min")}, when=is_sum)
native.rows({"any": REDUCED.format("logical_or"), "all": REDUCED.format("logical_and")}, when=is_bool)
native.row("cumsum", "ov.cum_sum({x}, nodes.ints({axis}), {exclusive}, {reverse})", when=is_float)

native.rows({"ceil": "ov.ceiling({x})", "round": 'ov.round({x}, "half_to_even")'}, when=is_float)
native.row("matmul", "ov.matmul({a}, {b}, False, False)", when=is_float)
native.row("concat", "ov.concat([{xs}], {axis})")
native.row("transpose", "ov.transpose({x}, nodes.ints({perm}))")
native.row("broadcast_to", "ov.broadcast({x}, nodes.ints({shape}))", when=has_axes)
native.row("full", "ov.constant(np.full({shape}, {value}, {dtype}))")
native.row("iota", "ov.constant(np.indices({shape})[{axis}].astype({dtype}))")
native.row("size_value", "ov.constant({value}, {dtype})")
native.function("barrier", view=True)(operands_unchanged)
windows = {
    "max_pool": "ov.max_pool({x}, {stride}, {dilation}, *zip(*{padding}), {kernel}).output(0)",
    "avg_pool": "ov.avg_pool({x}, {stride}, *zip(*{padding}), {kernel}, not {count_include_pad})",
}
native.rows(windows, when=is_window)
native.row(
    "pad",
    'ov.pad({x}, *map(nodes.ints, zip(*{widths})), "constant", ov.constant({value}, {dtype}))',
    when=lambda node: has_axes(node) and node.attributes["mode"] == "constant",
)


@native.function("if", "while", "scan")
def _control_flow(call: Call) -> None:
    """Pass the functions of the regions, a list of the operands, and the attributes by name."""
    regions = ", ".join(call.region(k) for k in range(len(call.node.regions)))
    attributes = "".join(f", {name}={call.literal(value)}" for name, value in call.attributes.items())
    arguments = f"{regions}, [{', '.join(map(str, call.operands))}]{attributes}"
    call.line(f"({', '.join(call.results)},) = nodes.{call.node.op.name}_({arguments})")


# OpenVINO 2026.4 calls nan greater than numbers, and exp of nan a number; it compares integers as float32
native.rows({"greater": "ov.less({b}, {a})", "greater_equal": "ov.less_equal({b}, {a})"}, when=is_float)
native.correct(c.expm1, c.log1p, c.exp, c.trunc, c.clip, when=is_float)
native.correct(c.equal, c.not_equal, c.less, c.less_equal, c.greater, c.greater_equal, when=is_int)
native.correct(c.conv_weight_grad, when=is_ungrouped)
native.correct(c.take, when=has_elements)
native.correct(c.cast, c.flip)

table = native.extend()
table.correct(c.maximum, c.minimum, when=is_float)
table.correct(c.max_, c.min_, when=is_sum)
table.correct(c.max_pool, when=is_window)
