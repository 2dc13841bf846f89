"""Parts of a program that PyTorch has one kernel for, though no operation of mithril's means them.

They are found in the graph just before its source is written, by rules as passes have them, and become operations known
to nobody but this backend's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.backend import Call, Lowerings
from mithril.base import TensorType, operation
from mithril.ir import Attribute, Graph, Op, Value
from mithril.rewrite import Rule, rewrite

RSQRT2, RSQRT2PI = 0.7071067811865476, 0.3989422804014327
SETTINGS = {"stride": "Ints", "padding": "Pairs", "dilation": "Ints", "groups": "int"}

op = operation


def private(name: str, *operands: str, like: Any, **attributes: str) -> Op:
    """An operation of this backend alone; ``like`` gives the types of its results from those of the operands."""
    return Op(
        name=f"torch.{name}",
        operands=operands,
        optional=frozenset(),
        variadic=False,
        attributes={n: Attribute(n, kind) for n, kind in attributes.items()},
        reference=lambda *given, **settings: NotImplemented,
        declared_at=__name__,
        doc="",
        infer_rule=lambda types, given, regions: like(types, given),
    )


def _first(types: Sequence[TensorType | None], given: Any) -> Any:
    return types[:1]


def _convolved(types: Sequence[TensorType | None], given: Any) -> Any:
    return op("conv").infer(types[:2], given)


relu_grad = private("relu_grad", "g", "y", like=_first)
gelu_grad = private("gelu_grad", "g", "x", like=_first)
layer_norm_grad = private("layer_norm_grad", "g", "x", "mean", "spread", "scale", like=_first)
conv_bias = private("conv_bias", "x", "w", "b", like=_convolved, **SETTINGS)
conv_bias_relu = private("conv_bias_relu", "x", "w", "b", like=_convolved, **SETTINGS)


# -- what is looked for -------------------------------------------------------------------------------------------
def _conv_and_bias(x: Any, w: Any, b: Any, *, stride: Any, padding: Any, dilation: Any, groups: Any, shape: Any) -> Any:
    made = op("conv")(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return op("add")(made, op("reshape")(b, shape=shape))


def _is_bias(x: Value, w: Value, b: Value, *, shape: Any) -> bool:
    return b.ndim == 1 and b.shape[0] == w.shape[0] and tuple(shape) == (1, w.shape[0], *[1] * (w.ndim - 2))


def _gelu_slope(g: Any, x: Any) -> Any:
    half = op("mul")(op("add")(op("erf")(op("mul")(x, RSQRT2)), 1.0), 0.5)
    bell = op("mul")(op("mul")(x, op("exp")(op("mul")(op("square")(x), -0.5))), RSQRT2PI)
    return op("mul")(g, op("add")(half, bell))


def _layer_norm_slope(g: Any, x: Any, mean: Any, spread: Any, scale: Any, *, axis: Any) -> Any:
    def average(v: Any) -> Any:
        return op("mean")(v, axis=axis, keepdims=True)

    normal = op("mul")(op("sub")(x, mean), spread)
    t = op("mul")(g, scale)
    away = op("mul")(normal, average(op("mul")(t, normal)))
    return op("mul")(spread, op("sub")(op("sub")(t, average(t)), away))


def _is_trailing(g: Value, x: Value, mean: Value, spread: Value, scale: Value, *, axis: Any) -> bool:
    axes = tuple(range(x.ndim - scale.ndim, x.ndim))
    kept = tuple(1 if k in axes else n for k, n in enumerate(x.shape))
    same = g.type == x.type and mean.type == spread.type == TensorType(x.dtype, kept)
    return same and tuple(axis) == axes and scale.shape == x.shape[x.ndim - scale.ndim :] and scale.dtype is x.dtype


def _alike(g: Value, y: Value) -> bool:
    return g.type == y.type and g.dtype.is_float


# The slope of relu where its result is nan is left open by the operation; PyTorch lets the cotangent through. Of any
# other value that is compared with 0 the cotangent is 0 there.
RELU = (
    Rule(lambda g, y: op("where")(op("greater")(y, 0.0), g, 0.0), relu_grad, exact=False, name="relu", when=_alike),
    Rule(
        lambda g, y: op("where")(op("greater_equal")(0.0, y), 0.0, g),
        relu_grad,
        exact=False,
        name="relu of linear",
        when=_alike,
    ),
)
RULES = (
    Rule(_gelu_slope, gelu_grad, exact=False, name="gelu", when=_alike, shared=True),
    Rule(
        _layer_norm_slope,
        lambda g, x, mean, spread, scale: layer_norm_grad(g, x, mean, spread, scale),
        exact=False,
        name="layer norm",
        when=_is_trailing,
        shared=True,
    ),
    Rule(
        _conv_and_bias,
        lambda x, w, b, *, stride, padding, dilation, groups: conv_bias(
            x, w, b, stride=stride, padding=padding, dilation=dilation, groups=groups
        ),
        exact=False,
        name="bias of a convolution",
        when=_is_bias,
    ),
    Rule(
        lambda x, w, b, *, stride, padding, dilation, groups: op("relu")(
            conv_bias(x, w, b, stride=stride, padding=padding, dilation=dilation, groups=groups)
        ),
        conv_bias_relu,
        exact=False,
        name="relu of a convolution",
    ),
)


def joined(graph: Graph) -> Graph:
    """The graph with those parts as one operation each."""
    rectified = {
        v for node in graph.nodes if "relu" in (node.op.name, node.attributes.get("activation")) for v in node.results
    }
    graph = rewrite(graph, [r.restricted(lambda g, y: y in rectified) for r in RELU]) if rectified else graph
    return rewrite(graph, RULES)


# -- how they are written -----------------------------------------------------------------------------------------
def add_rows(table: Lowerings) -> None:
    """The rows of a table that these operations need."""
    table.row(relu_grad, "torch.ops.aten.threshold_backward({g}, {y}, 0)")
    table.row(gelu_grad, "torch.ops.aten.gelu_backward({g}, {x})")
    table.function(layer_norm_grad)(_layer_norm_grad)
    table.function(conv_bias, conv_bias_relu)(_conv)


def _layer_norm_grad(call: Call) -> str:
    shape = call.literal(call.operand_type("scale").shape)
    given = f"{call.g}, {call.x}, {shape}, {call.mean}, {call.spread}, {call.scale}, None"
    return f"torch.ops.aten.native_layer_norm_backward({given}, [True, False, False])[0]"


def _conv(call: Call) -> str:
    from mithril_torch import helpers

    rest = ", ".join(call.literal(call.attributes[n]) for n in SETTINGS)
    relu = ", relu=True" if call.node.op is conv_bias_relu else ""
    return f"{call.helper(helpers.conv)}({call.x}, {call.w}, {rest}, {call.b}{relu})"
