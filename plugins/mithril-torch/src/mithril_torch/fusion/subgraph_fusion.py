"""Fusion of subgraphs for which PyTorch has one kernel but mithril has no operation.

Rewrite rules match them just before the source is generated, and replace them by operations private to this backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.backend import Call, Lowerings
from mithril.graph import Attribute, Graph, Op, TensorType, Value, operation
from mithril.passes import Rule, rewrite

# 1 / sqrt(2) and 1 / sqrt(2 pi), of the derivative of GELU.
RSQRT2, RSQRT2PI = 0.7071067811865476, 0.3989422804014327
SETTINGS = {"stride": "Ints", "padding": "Pairs", "dilation": "Ints", "groups": "int"}

op = operation


def backend_op(name: str, *operands: str, infer: Any, **attributes: str) -> Op:
    """Declare an operation private to this backend; ``infer`` returns its result types from the operand types."""
    return Op(
        name=f"torch.{name}",
        operands=operands,
        optional=frozenset(),
        variadic=False,
        attributes={n: Attribute(n, kind) for n, kind in attributes.items()},
        reference=lambda *given, **settings: NotImplemented,
        declared_at=__name__,
        doc="",
        infer_rule=lambda types, given, regions: infer(types, given),
    )


def kernel_for(declared: Op, name: str) -> Op:
    """Declare an operation private to this backend with the meaning of another, for graphs that passes still see."""
    return Op(
        name=f"torch.{name}",
        operands=declared.operands,
        optional=declared.optional,
        variadic=declared.variadic,
        attributes=declared.attributes,
        results=declared.results,
        reference=declared.reference,
        declared_at=__name__,
        doc="",
        infer_rule=lambda types, given, regions: declared.infer(types, given),
    )


def _like_first(types: Sequence[TensorType | None], attributes: Any) -> Any:
    return types[:1]


def _like_conv(types: Sequence[TensorType | None], attributes: Any) -> Any:
    return op("conv").infer(types[:2], attributes)


sigmoid_grad = backend_op("sigmoid_grad", "g", "y", infer=_like_first)
tanh_grad = backend_op("tanh_grad", "g", "y", infer=_like_first)
lerp = backend_op("lerp", "a", "b", "weight", infer=_like_first)
lerp.elementwise = True  # a constant weight is a literal in the source
relu_grad = backend_op("relu_grad", "g", "y", infer=_like_first)
gelu_grad = backend_op("gelu_grad", "g", "x", infer=_like_first)
layer_norm_grad = backend_op("layer_norm_grad", "g", "x", "mean", "spread", "scale", infer=_like_first)
batch_norm_grad = backend_op("batch_norm_grad", "g", "x", "mean", "spread", "scale", infer=_like_first)
conv_bias = backend_op("conv_bias", "x", "w", "b", infer=_like_conv, **SETTINGS)
conv_bias_relu = backend_op("conv_bias_relu", "x", "w", "b", infer=_like_conv, **SETTINGS)


# -- patterns -----------------------------------------------------------------------------------------------------
def _conv_and_bias(x: Any, w: Any, b: Any, *, stride: Any, padding: Any, dilation: Any, groups: Any, shape: Any) -> Any:
    result = op("conv")(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return op("add")(result, op("reshape")(b, shape=shape))


def _is_bias(x: Value, w: Value, b: Value, *, shape: Any) -> bool:
    return b.ndim == 1 and b.shape[0] == w.shape[0] and tuple(shape) == (1, w.shape[0], *[1] * (w.ndim - 2))


def _gelu_grad_graph(g: Any, x: Any) -> Any:
    half = op("mul")(op("add")(op("erf")(op("mul")(x, RSQRT2)), 1.0), 0.5)
    bell = op("mul")(op("mul")(x, op("exp")(op("mul")(op("square")(x), -0.5))), RSQRT2PI)
    return op("mul")(g, op("add")(half, bell))


def _layer_norm_grad_graph(g: Any, x: Any, mean: Any, spread: Any, scale: Any, *, axis: Any) -> Any:
    def average(v: Any) -> Any:
        return op("mean")(v, axis=axis, keepdims=True)

    normal = op("mul")(op("sub")(x, mean), spread)
    t = op("mul")(g, scale)
    projection = op("mul")(normal, average(op("mul")(t, normal)))
    return op("mul")(spread, op("sub")(op("sub")(t, average(t)), projection))


def _is_trailing(g: Value, x: Value, mean: Value, spread: Value, scale: Value, *, axis: Any) -> bool:
    axes = tuple(range(x.ndim - scale.ndim, x.ndim))
    reduced_shape = tuple(1 if k in axes else n for k, n in enumerate(x.shape))
    types_match = g.type == x.type and mean.type == spread.type == TensorType(x.dtype, reduced_shape)
    scale_matches = scale.shape == x.shape[x.ndim - scale.ndim :] and scale.dtype is x.dtype
    return types_match and tuple(axis) == axes and scale_matches


def _is_channel(g: Value, x: Value, mean: Value, spread: Value, scale: Value, *, axis: Any) -> bool:
    """Whether the statistics are those of axis 1, as are the entries of the scale."""
    if x.ndim < 2 or tuple(axis) != tuple(k for k in range(x.ndim) if k != 1):
        return False
    channels = (x.shape[1], *[1] * (x.ndim - 2))
    types_match = g.type == x.type and mean.type == spread.type == TensorType(x.dtype, (1, *channels))
    return types_match and scale.type == TensorType(x.dtype, channels) and x.dtype.name in ("float32", "float64")


def _same_floats(g: Value, y: Value) -> bool:
    return g.type == y.type and g.dtype.is_float


def _toward(a: Any, b: Any, weight: Any) -> Any:
    return op("add")(op("mul")(op("sub")(b, a), weight), a)


def _is_weighted(a: Value, b: Value, weight: Value) -> bool:
    return a.type == b.type and a.dtype.name in ("float32", "float64") and weight.type == TensorType(a.dtype, ())


def _join_padded(a: Any, b: Any, *, low: Any, high: Any) -> Any:
    """Concatenate two parts of a cotangent, such as those of the gates of a recurrent step, and pad the rest."""
    axis = _padded_axis(low)
    first, second, before, after = (a, b, low, high) if low[axis][0] < high[axis][0] else (b, a, high, low)
    parts = op("concat")(first, second, axis=axis)
    rest = tuple((before[axis][0], after[axis][1]) if k == axis else (0, 0) for k in range(len(low)))
    return op("pad")(parts, widths=rest) if any(map(any, rest)) else parts


def _padded_axis(widths: Any) -> int:
    return next((k for k, pair in enumerate(widths) if any(pair)), 0)


def _are_neighbors(a: Value, b: Value, *, low: Any, high: Any) -> bool:
    """Whether two padded parts are neighbors along the only padded axis."""
    if any(not isinstance(n, int) for v in (a, b) for n in v.shape) or a.dtype is not b.dtype:
        return False
    axis = _padded_axis(low)
    pairs = [pair for widths in (low, high) for k, pair in enumerate(widths) if k != axis]
    if any(map(any, pairs)) or any(n < 0 for widths in (low, high) for n in widths[axis]):
        return False
    (start, end), (other, other_end) = low[axis], high[axis]
    total = start + a.shape[axis] + end
    return bool(total - end == other or total - other_end == start)


# relu leaves its gradient at nan unspecified, where PyTorch passes the cotangent through. For other values that are
# compared with 0 the cotangent at nan must be 0, so the rules apply to results of relu only.
RELU = (
    Rule(
        lambda g, y: op("where")(op("greater")(y, 0.0), g, 0.0),
        relu_grad,
        exact=False,
        name="relu",
        when=_same_floats,
    ),
    Rule(
        lambda g, y: op("where")(op("greater_equal")(0.0, y), 0.0, g),
        relu_grad,
        exact=False,
        name="relu of linear",
        when=_same_floats,
    ),
)
RULES = (
    Rule(
        lambda g, y: op("mul")(op("mul")(g, y), op("sub")(1.0, y)),
        sigmoid_grad,
        exact=False,
        name="sigmoid",
        when=_same_floats,
    ),
    Rule(
        lambda g, y: op("mul")(g, op("sub")(1.0, op("square")(y))),
        tanh_grad,
        exact=False,
        name="tanh",
        when=_same_floats,
    ),
    Rule(
        lambda a, b, *, low, high: op("add")(
            op("pad")(a, widths=low, mode="constant", value=0), op("pad")(b, widths=high, mode="constant", value=0)
        ),
        _join_padded,
        exact=False,
        name="neighbors",
        when=_are_neighbors,
    ),
    Rule(_toward, lerp, exact=False, name="lerp", when=_is_weighted),
    Rule(_gelu_grad_graph, gelu_grad, exact=False, name="gelu", when=_same_floats, shared=True),
    Rule(
        _layer_norm_grad_graph,
        lambda g, x, mean, spread, scale: layer_norm_grad(g, x, mean, spread, scale),
        exact=False,
        name="layer norm",
        when=_is_trailing,
        shared=True,
    ),
    Rule(
        _layer_norm_grad_graph,
        lambda g, x, mean, spread, scale: batch_norm_grad(g, x, mean, spread, scale),
        exact=False,
        name="batch norm",
        when=_is_channel,
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


def fuse_subgraphs(graph: Graph) -> Graph:
    """Replace each subgraph that has a PyTorch kernel by one private operation."""
    rectified = {
        v for node in graph.nodes if "relu" in (node.op.name, node.attributes.get("activation")) for v in node.results
    }
    graph = rewrite(graph, [r.restricted(lambda g, y: y in rectified) for r in RELU]) if rectified else graph
    return rewrite(graph, RULES)


# -- lowering -----------------------------------------------------------------------------------------------------
def add_rows(table: Lowerings) -> None:
    """Add the lowering rows of the private operations to ``table``."""
    table.row(sigmoid_grad, "torch.ops.aten.sigmoid_backward({g}, {y})")
    table.row(tanh_grad, "torch.ops.aten.tanh_backward({g}, {y})")
    table.row(lerp, "torch.lerp({a}, {b}, {weight})")
    table.row(relu_grad, "torch.ops.aten.threshold_backward({g}, {y}, 0)")
    table.row(gelu_grad, "torch.ops.aten.gelu_backward({g}, {x})")
    table.function(layer_norm_grad)(_layer_norm_grad)
    table.function(conv_bias, conv_bias_relu)(_conv)


def _layer_norm_grad(call: Call) -> str:
    shape = call.literal(call.operand_type("scale").shape)
    arguments = f"{call.g}, {call.x}, {shape}, {call.mean}, {call.spread}, {call.scale}, None"
    return f"torch.ops.aten.native_layer_norm_backward({arguments}, [True, False, False])[0]"


def _conv(call: Call) -> str:
    from mithril_torch import helpers

    rest = ", ".join(call.literal(call.attributes[n]) for n in SETTINGS)
    relu = ", relu=True" if call.node.op is conv_bias_relu else ""
    return f"{call.helper(helpers.conv)}({call.x}, {call.w}, {rest}, {call.b}{relu})"
