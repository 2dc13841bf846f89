"""Products of experts in graphs with gradients: rows travel to their experts once, and results stay there.

Element-wise operations between the products of a mixture compute where the rows are, in the backward pass, too. Only
what another operation reads returns to the device of its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.graph import Node, Value, operation
from mithril_parallel.mesh import BLOCKS, Split
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.local_graph import LocalGraphBuilder


@dataclass(eq=False)
class Route:
    """The way of rows to the devices of their experts."""

    experts: Value  # of the complete graph, [..., active]
    axis: str
    split: Split  # of the rows
    numbers: Value  # of experts of this device's rows
    places: Mapping[str, Any]  # attributes of the exchanges
    received: Value | None = None  # numbers among the experts of this device, of the rows that it has received
    counts: Value | None = None


def shard_routed(local: LocalGraphBuilder, node: Node) -> bool:
    """Partition a node whose rows are at their experts, or can be sent there; return whether this was possible."""
    if not local.exchanges_rows:
        return False
    if node.op is ops.expert_matmul and _multiply(local, node):
        return True
    if node.op is ops.expert_weight_grad and _weight_gradient(local, node):
        return True
    if node.op.elementwise and _element_wise(local, node):
        return True
    for v in node.operands:
        if v in local.routed:
            come_back(local, v)
    return False


def come_back(local: LocalGraphBuilder, v: Value) -> None:
    """Return the rows of a value from their experts."""
    if v in local.local_values:
        return
    rows, route = local.routed[v]
    assert route.counts is not None
    local.local_values[v] = operation("mesh.from_experts")(rows, route.numbers, route.counts, **route.places)
    local.splits[v] = (*route.split, None)


def _multiply(local: LocalGraphBuilder, node: Node) -> bool:
    x, weight, experts = node.operands
    assert x is not None
    assert weight is not None
    assert experts is not None
    axis = local.splits[weight][0]
    route = None if axis is None or BLOCKS in axis else _route(local, experts, axis, sizes(weight)[0])
    rows = None if route is None else _send(local, x, route)
    if rows is None or route is None:
        return False
    part = local.reshard(weight, (axis, None, None))
    local.routed[node.result] = node.op(rows, part, route.received, **node.attributes), route
    return True


def _weight_gradient(local: LocalGraphBuilder, node: Node) -> bool:
    x, g, experts = node.operands
    assert x is not None
    assert g is not None
    assert experts is not None
    route = local.routes.get(experts)
    if route is None or node.attributes["count"] != route.places["parts"] * route.places["count"]:
        return False
    rows, cotangents = _send(local, x, route), _send(local, g, route)
    if rows is None or cotangents is None:
        return False
    local.local_values[node.result] = node.op(rows, cotangents, route.received, count=route.places["count"])
    local.splits[node.result] = (route.axis, None, None)
    return True


def _element_wise(local: LocalGraphBuilder, node: Node) -> bool:
    routes = {local.routed[v][1] for v in node.operands if v in local.routed}
    is_there = all(v is None or v in local.routed or not v.ndim for v in node.operands)
    if len(routes) != 1 or not is_there:
        return False
    (route,) = routes
    operands = [
        v if v is None else local.routed[v][0] if v in local.routed else local.reshard(v, ()) for v in node.operands
    ]
    local.routed[node.result] = node.op(*operands, **node.attributes), route
    return True


def _route(local: LocalGraphBuilder, experts: Value, axis: str, count: int) -> Route | None:
    """Return the route of rows, if they are divided over the devices that divide the experts."""
    if experts not in local.routes:
        split = local.splits[experts]
        if not split or axis not in split[:-1] or any(a is not None and BLOCKS in a for a in split):
            return None
        parts = local.mesh.size(axis)
        split = (*split[:-1], None)
        places = {"mesh": axis, "parts": parts, "count": count // parts}
        local.routes[experts] = Route(experts, axis, split, local.reshard(experts, split), places)
    route: Route = local.routes[experts]
    return route


def _send(local: LocalGraphBuilder, v: Value, route: Route) -> Value | None:
    """Return the rows of a value at their experts, or None if it has a different shape."""
    if v in local.routed and local.routed[v][1] is route:
        return local.routed[v][0]
    lead, features = sizes(route.experts), v.shape[-1]
    single = (*lead[:-1], 1, features)
    producer = local.graph.producers.get(v)
    if producer is not None and producer.op is ops.broadcast_to:
        repeated = producer.operands[0]
        v = repeated if repeated is not None and repeated.shape == single else v
    if v.shape not in (single, (*lead, features)):
        return None
    if (v, route) not in local.arrivals:
        if v in local.routed:
            come_back(local, v)
        x = local.reshard(v, (*(a if n > 1 else None for a, n in zip(route.split, sizes(v), strict=False)), None))
        numbers = route.numbers
        if v.shape == single:
            x = operation("reshape")(x, shape=(*x.shape[:-2], features))
        else:
            numbers = operation("unsqueeze")(numbers, axis=(-1,))
        rows, received, counts = operation("mesh.to_experts")(x, numbers, **route.places)
        if route.counts is None:
            route.received, route.counts = received, counts
        local.arrivals[v, route] = rows
    return local.arrivals[v, route]
