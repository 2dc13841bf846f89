"""Operations that PyTorch computes two at a time: both cotangents of a convolution, a maximum and where it was.

Like the parts in ``joining`` they are found just before the source is written, and known to this backend alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mithril import ops
from mithril.backend import Call, Lowerings
from mithril.base import TensorType, int64
from mithril.ir import Graph, Node, Value
from mithril_torch import helpers
from mithril_torch.fusion.subgraph_fusion import SETTINGS, private

WINDOW = {"kernel": "Ints", "stride": "Ints", "padding": "Pairs", "dilation": "Ints"}


def _found(types: Sequence[Any], given: Mapping[str, Any]) -> tuple[TensorType, ...]:
    from mithril.base import operation

    (made,) = operation("max_pool").infer(types, given)
    return made, TensorType(int64, made.shape)


conv_grads = private("conv_grads", "g", "x", "w", like=lambda types, given: types[1:], **SETTINGS)
max_found = private("max_found", "x", like=_found, **WINDOW)
max_spread = private("max_spread", "g", "x", "at", like=lambda types, given: types[1:2], **WINDOW)


def paired(graph: Graph) -> Graph:
    """The graph with those pairs as one operation each."""
    place = {v: k for k, node in enumerate(graph.nodes) for v in node.results}
    changed: dict[Node, Node | None] = {}
    for first, second in _pairs(graph):
        if first.op is ops.max_pool:
            at = Value(f"{first.result.name}_at", TensorType(int64, first.result.type.shape))
            changed[first] = first.replaced(op=max_found, results=(first.result, at))
            changed[second] = second.replaced(op=max_spread, operands=(*second.operands, at))
            continue
        (g, w), x = first.operands, second.operands[0]
        early, late = sorted((first, second), key=lambda n: place[n.result])
        if all(place.get(v, -1) < place[early.result] for v in (x, w) if v is not None):
            settings = {name: first.attributes[name] for name in SETTINGS}
            results = (first.result, second.result)
            changed[early] = early.replaced(op=conv_grads, operands=(g, x, w), attributes=settings, results=results)
            changed[late] = None
    if not changed:
        return graph
    nodes = (changed.get(node, node) for node in graph.nodes)
    return graph.replaced(nodes=tuple(n for n in nodes if n is not None))


def _pairs(graph: Graph) -> list[tuple[Node, Node]]:
    """Of each pair the one whose first operand is shared last: (input's, kernel's gradient), (pool, its gradient)."""
    waiting: dict[Any, Node] = {}
    found = []
    for node in graph.nodes:
        key = _key(node)
        if key is None:
            continue
        other = waiting.pop(key, None)
        if other is None or other.op is node.op:
            waiting[key] = node
        else:
            found.append((node, other) if node.op is ops.conv_input_grad else (other, node))
    return found


def _key(node: Node) -> Any:
    """Equal for the two operations of a pair."""
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


# -- how they are written -----------------------------------------------------------------------------------------
def add_rows(table: Lowerings) -> None:
    """The rows of a table that these operations need."""
    table.function(conv_grads)(_conv_grads)
    table.function(max_found)(_max_found)
    table.function(max_spread)(_max_spread)


def _settings(call: Call, names: Mapping[str, str]) -> str:
    return ", ".join(call.literal(call.attributes[n]) for n in names)


def _conv_grads(call: Call) -> str:
    return f"{call.helper(helpers.conv_grads)}({call.g}, {call.x}, {call.w}, {_settings(call, SETTINGS)})"


def _max_found(call: Call) -> str:
    return f"{call.helper(helpers.max_found)}({call.x}, {_settings(call, WINDOW)})"


def _max_spread(call: Call) -> str:
    return f"{call.helper(helpers.max_spread)}({call.g}, {call.x}, {call.at}, {_settings(call, WINDOW)})"
