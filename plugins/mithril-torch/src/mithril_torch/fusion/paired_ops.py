"""Pairs of operations that PyTorch computes in one call: both cotangents of a convolution, a max pool and its indices.

Like the subgraphs in ``subgraph_fusion``, they are matched just before the source is generated, and become operations
private to this backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mithril import ops
from mithril.backend import Call, Lowerings
from mithril.graph import Graph, Node, TensorType, Value, int64
from mithril_torch import helpers
from mithril_torch.fusion.subgraph_fusion import SETTINGS, backend_op

WINDOW = {"kernel": "Ints", "stride": "Ints", "padding": "Pairs", "dilation": "Ints"}


def _pool_types(types: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[TensorType, ...]:
    from mithril.graph import operation

    (result,) = operation("max_pool").infer(types, attributes)
    return result, TensorType(int64, result.shape)


conv_grads = backend_op("conv_grads", "g", "x", "w", infer=lambda types, given: types[1:], **SETTINGS)
max_pool_with_indices = backend_op("max_pool_with_indices", "x", infer=_pool_types, **WINDOW)
max_unpool = backend_op("max_unpool", "g", "x", "at", infer=lambda types, given: types[1:2], **WINDOW)


def pair_operations(graph: Graph) -> Graph:
    """Replace each pair by operations that share one call."""
    position = {v: k for k, node in enumerate(graph.nodes) for v in node.results}
    changed: dict[Node, Node | None] = {}
    for first, second in _pairs(graph):
        if first.op is ops.max_pool:
            indices = Value(f"{first.result.name}_at", TensorType(int64, first.result.type.shape))
            changed[first] = first.replaced(op=max_pool_with_indices, results=(first.result, indices))
            changed[second] = second.replaced(op=max_unpool, operands=(*second.operands, indices))
            continue
        (g, w), x = first.operands, second.operands[0]
        early, late = sorted((first, second), key=lambda n: position[n.result])
        if all(position.get(v, -1) < position[early.result] for v in (x, w) if v is not None):
            settings = {name: first.attributes[name] for name in SETTINGS}
            results = (first.result, second.result)
            changed[early] = early.replaced(op=conv_grads, operands=(g, x, w), attributes=settings, results=results)
            changed[late] = None
    if not changed:
        return graph
    nodes = (changed.get(node, node) for node in graph.nodes)
    return graph.replaced(nodes=tuple(n for n in nodes if n is not None))


def _pairs(graph: Graph) -> list[tuple[Node, Node]]:
    """Return the pairs (gradient of the input, gradient of the kernel) and (max pool, its gradient)."""
    waiting: dict[Any, Node] = {}
    pairs = []
    for node in graph.nodes:
        key = _key(node)
        if key is None:
            continue
        other = waiting.pop(key, None)
        if other is None or other.op is node.op:
            waiting[key] = node
        else:
            pairs.append((node, other) if node.op is ops.conv_input_grad else (other, node))
    return pairs


def _key(node: Node) -> Any:
    """Return a key that is equal for the two operations of a pair, or None."""
    name, attributes = node.op.name, node.attributes
    if name in ("conv_input_grad", "conv_weight_grad"):
        if any(a != b for a, b in attributes["padding"]):
            return None
        g, other = node.operands if name == "conv_input_grad" else reversed(node.operands)
        shapes = (attributes["shape"], other.type.shape if other is not None else None)
        ordered = shapes if name == "conv_input_grad" else shapes[::-1]
        return "conv", g, ordered, *(attributes[n] for n in SETTINGS)
    if name in ("max_pool", "max_pool_grad") and node.result.dtype.is_float and len(attributes["kernel"]) == 2:
        x = node.operands[-1]
        fits = all(a == b and 2 * a <= k for (a, b), k in zip(attributes["padding"], attributes["kernel"], strict=True))
        return ("pool", x, *(attributes[n] for n in WINDOW)) if fits else None
    return None


# -- lowering -----------------------------------------------------------------------------------------------------
def add_rows(table: Lowerings) -> None:
    """Add the lowering rows of the paired operations to ``table``."""
    table.function(conv_grads)(_conv_grads)
    table.function(max_pool_with_indices)(_max_pool_with_indices)
    table.function(max_unpool)(_max_unpool)


def _settings(call: Call, names: Mapping[str, str]) -> str:
    return ", ".join(call.literal(call.attributes[n]) for n in names)


def _conv_grads(call: Call) -> str:
    return f"{call.helper(helpers.conv_grads)}({call.g}, {call.x}, {call.w}, {_settings(call, SETTINGS)})"


def _max_pool_with_indices(call: Call) -> str:
    return f"{call.helper(helpers.max_pool_with_indices)}({call.x}, {_settings(call, WINDOW)})"


def _max_unpool(call: Call) -> str:
    return f"{call.helper(helpers.max_unpool)}({call.g}, {call.x}, {call.at}, {_settings(call, WINDOW)})"
