"""Gradients of layer and batch normalization: one kernel for all cotangents, with the statistics of the forward pass.

The graph of a gradient computes the statistics again, and the cotangents of scale and bias as sums of their own. The
kernels of PyTorch return the statistics with the normalization, and all cotangents at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mithril import ops
from mithril.backend import Call, Lowerings
from mithril.derivatives import live_nodes
from mithril.graph import Graph, Node, Op, TensorType, Value
from mithril_torch.fusion.batch_statistics import batch_norm_for_state
from mithril_torch.fusion.subgraph_fusion import backend_op, batch_norm_grad, layer_norm_grad

DTYPES = ("float32", "float64")


def _cotangents(types: Sequence[Any], attributes: Any) -> Any:
    return types[0], types[4], types[4]


def _layer_norm_types(types: Sequence[Any], attributes: Any) -> Any:
    x, axes = types[0], attributes["axes"]
    statistics = TensorType(x.dtype, tuple(1 if k in axes else n for k, n in enumerate(x.shape)))
    return x, statistics, statistics


def _batch_norm_types(types: Sequence[Any], attributes: Any) -> Any:
    x = types[0]
    statistics = TensorType(x.dtype, tuple(n if k == 1 else 1 for k, n in enumerate(x.shape)))
    return *ops.batch_norm_training.infer(types, attributes), statistics, statistics


MASK = {"has_scale": "bool", "has_bias": "bool"}
OPERANDS = ("g", "x", "mean", "spread", "scale")
layer_norm_grads = backend_op("layer_norm_grads", *OPERANDS, infer=_cotangents, **MASK)
batch_norm_grads = backend_op("batch_norm_grads", *OPERANDS, infer=_cotangents, **MASK)
layer_norm_saving = backend_op(
    "layer_norm_saving", "x", "scale", "bias", infer=_layer_norm_types, axes="Axes", eps="float"
)
batch_norm_saving = backend_op("batch_norm_saving", "x", "scale", "bias", infer=_batch_norm_types, eps="float")

ALL_COTANGENTS = {layer_norm_grad: layer_norm_grads, batch_norm_grad: batch_norm_grads}
SAVING = {ops.layer_norm: layer_norm_saving, batch_norm_for_state: batch_norm_saving}


def join_norms(graph: Graph) -> Graph:
    """Return the graph with the cotangents of each normalization from one call, and its statistics computed once."""
    if not any(node.op in ALL_COTANGENTS for node in graph.nodes):
        return graph
    position = {v: k for k, node in enumerate(graph.nodes) for v in node.results}
    changed: dict[Node, Node | None] = {}
    for node in graph.nodes:
        if node.op in ALL_COTANGENTS:
            changed.update(_with_statistics(graph, node, position, changed))
            changed.update(_with_sums(graph, node, position, changed))
    nodes = [n for n in (changed.get(node, node) for node in graph.nodes) if n is not None]
    return graph.replaced(nodes=tuple(live_nodes(nodes, graph.outputs)))


def _statistic_axes(node: Node) -> tuple[int, ...]:
    """Return the axes over which a normalization computes its statistics."""
    mean = node.operands[2]
    assert mean is not None
    x = node.operands[1]
    assert x is not None
    if node.op is batch_norm_grad:
        return tuple(k for k in range(x.ndim) if k != 1)
    scale = node.operands[4]
    assert scale is not None
    return tuple(range(x.ndim - scale.ndim, x.ndim))


def _sum_over(axes: tuple[int, ...], nodes: Iterable[Node], changed: Mapping[Node, Node | None]) -> Node | None:
    """Return the first of the nodes that is a sum over the axes and has not joined another gradient."""
    for node in nodes:
        is_sum = node.op is ops.sum and node.attributes["axis"] == axes and not node.attributes["keepdims"]
        if is_sum and axes and node not in changed:
            return node
    return None


def _with_sums(
    graph: Graph, node: Node, position: dict[Value, int], changed: dict[Node, Node | None]
) -> dict[Node, Node | None]:
    """Join the cotangent of the operand with those of scale and bias; return the changed nodes."""
    g, x, mean, spread, scale = node.operands
    assert g is not None
    assert x is not None
    assert scale is not None
    axes = _statistic_axes(node)
    if node.op is layer_norm_grad:
        axes = tuple(k for k in range(x.ndim) if k not in axes)
    else:
        scale = _flat(graph, scale)
    users = graph.users.get(g, ())
    products = [n for n in users if n.op is ops.mul and _is_normal(graph, n, g, x, mean, spread)]
    bias_sum = _sum_over(axes, users, changed)
    scale_sum = _sum_over(axes, [n for p in products for n in graph.users.get(p.result, ())], changed)
    parts = [n for n in (node, scale_sum, bias_sum) if n is not None]
    first = min(parts, key=lambda n: position[n.result])
    operands = (g, x, mean, spread, scale)
    if scale.ndim != x.ndim - len(axes) or any(
        position.get(v, -1) > position[first.result] for v in operands if v is not None
    ):
        return {}
    results = tuple(
        Value(f"{node.result.name}_{k}", scale.type) if n is None else n.result
        for k, n in enumerate((node, scale_sum, bias_sum))
    )
    attributes = {"has_scale": scale_sum is not None, "has_bias": bias_sum is not None}
    combined = node.replaced(op=ALL_COTANGENTS[node.op], operands=operands, attributes=attributes, results=results)
    return {**dict.fromkeys(parts), first: combined}


def _flat(graph: Graph, scale: Value) -> Value:
    """Return the scale with one entry per channel that was reshaped to broadcast, or the argument."""
    node = graph.producers.get(scale)
    source = node.operands[0] if node is not None and node.op is ops.reshape else None
    return scale if source is None or source.ndim != 1 else source


def _is_normal(graph: Graph, product: Node, g: Any, x: Any, mean: Any, spread: Any) -> bool:
    """Whether ``product`` multiplies g by (x - mean) * spread."""
    other = next((v for v in product.operands if v is not g), None)
    normal = graph.producers.get(other) if other is not None else None
    if normal is None or normal.op is not ops.mul or spread not in normal.operands:
        return False
    centered = next((v for v in normal.operands if v is not spread), None)
    center = graph.producers.get(centered) if centered is not None else None
    return center is not None and center.op is ops.sub and center.operands == (x, mean)


def _with_statistics(
    graph: Graph, node: Node, position: dict[Value, int], changed: dict[Node, Node | None]
) -> dict[Node, Node | None]:
    """Let the normalization return the mean and spread that the gradient reads; return the changed nodes."""
    _, x, mean, spread, _ = node.operands
    assert x is not None
    assert mean is not None
    assert spread is not None
    axes = _statistic_axes(node)
    eps = _epsilon(graph, x, mean, spread, axes)
    if eps is None or x.dtype.name not in DTYPES:
        return {}
    op = ops.layer_norm if node.op is layer_norm_grad else batch_norm_for_state
    for forward in graph.users.get(x, ()):
        matches = forward.op is op and forward.operands[0] is x and forward.attributes["eps"] == eps
        if matches and forward.attributes.get("axes", axes) == axes and forward not in changed:
            early = min(position[mean], position[spread])
            if all(v is None or v.dtype is x.dtype for v in forward.operands) and position[forward.result] < early:
                position.update(dict.fromkeys((mean, spread), position[forward.result]))
                saving = forward.replaced(op=SAVING[forward.op], results=(*forward.results, mean, spread))
                return {forward: saving, graph.producers[mean]: None, graph.producers[spread]: None}
    return {}


def _epsilon(graph: Graph, x: Value, mean: Value, spread: Value, axes: tuple[int, ...]) -> float | None:
    """Return eps if the values are the mean of x and rsqrt(variance + eps), else None."""

    def operand_of(value: Value | None, op: Op) -> Any:
        node = graph.producers.get(value) if value is not None else None
        if node is None or node.op is not op:
            return None
        if op is ops.mean and (node.attributes["axis"] != axes or not node.attributes["keepdims"]):
            return None
        return node.operands if len(node.operands) > 1 else node.operands[0]

    if operand_of(mean, ops.mean) is not x:
        return None
    shifted = operand_of(operand_of(spread, ops.rsqrt), ops.add)
    if shifted is None or operand_of(operand_of(operand_of(shifted[0], ops.mean), ops.square), ops.sub) != (x, mean):
        return None
    constant = graph.producers.get(shifted[1])
    return constant.attributes["value"] if constant is not None and constant.is_constant else None


# -- lowering -----------------------------------------------------------------------------------------------------
def add_rows(table: Lowerings) -> None:
    """Add the lowering rows of the joined operations to ``table``."""
    table.function(layer_norm_grads)(_layer_norm_grads)
    table.function(batch_norm_grad, batch_norm_grads)(_batch_norm_grads)
    table.function(layer_norm_saving)(_layer_norm_saving)
    table.function(batch_norm_saving)(_batch_norm_saving)


def _layer_norm_grads(call: Call) -> str:
    shape = call.literal(call.operand_type("scale").shape)
    mask = f"[True, {call.has_scale}, {call.has_bias}]"
    # The kernel computes the cotangent of a bias only where there is one, of which it reads the shape alone.
    arguments = f"{call.g}, {call.x}, {shape}, {call.mean}, {call.spread}, {call.scale}, {call.scale}"
    return f"torch.ops.aten.native_layer_norm_backward({arguments}, {mask})"


def _batch_norm_grads(call: Call) -> str:
    from mithril_torch import helpers

    operands = f"{call.g}, {call.x}, {call.mean}, {call.spread}, {call.scale}"
    if call.node.op is batch_norm_grad:
        return f"{call.helper(helpers.batch_norm_grads)}({operands}, False, False)[0]"
    return f"{call.helper(helpers.batch_norm_grads)}({operands}, {call.has_scale}, {call.has_bias})"


def _layer_norm_saving(call: Call) -> str:
    shape = call.literal(tuple(call.operand_type("x").shape[k] for k in call.attributes["axes"]))
    return f"torch.native_layer_norm({call.x}, {shape}, {call.scale}, {call.bias}, {call.literal(call.eps)})"


def _batch_norm_saving(call: Call) -> str:
    from mithril_torch import helpers

    operands = f"{call.x}, {call.scale}, {call.bias}, {call.literal(call.eps)}"
    return f"{call.helper(helpers.batch_norm_saving)}({operands})"
