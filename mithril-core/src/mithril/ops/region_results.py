"""Control flow without the results that nothing reads, and without the operands that only those need."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mithril.graph import Graph, Node, Value
from mithril.ops.control_flow import if_op, scan_op, while_op

CARRIED = {while_op: "states", scan_op: "carries"}  # attribute with the number of results that the next step reads


def _live_nodes(graph: Graph, outputs: Iterable[Value]) -> tuple[list[Node], set[Value | None]]:
    """Return the nodes that these outputs depend on, without unread results, and all operands that are read."""
    read, nodes = set[Value | None](outputs), list[Node]()
    for node in reversed(graph.nodes):
        if not read.isdisjoint(node.results):
            live = with_read_results(node, read) if node.regions else node
            nodes.append(live)
            read.update(live.operands)
    return nodes[::-1], read


def without_unread_parts(graph: Graph) -> Graph:
    """Return the graph without the nodes, constants and results of control flow that its results do not need."""
    nodes, read = _live_nodes(graph, graph.outputs)
    inputs = tuple([i for i in graph.inputs if i.role != "constant" or i.value in read])
    if nodes == [*graph.nodes] and len(inputs) == len(graph.inputs):  # nodes are equal to themselves only
        return graph
    return graph.replaced(nodes=tuple(nodes), inputs=inputs)


def with_read_results(node: Node, read: Collection[Value | None]) -> Node:
    """Return a node of control flow with the results in ``read``, and those that these need in the next step."""
    if node.op not in CARRIED and node.op is not if_op:
        return node
    carried = node.attributes[CARRIED[node.op]] if node.op in CARRIED else 0
    needed = {k for k, v in enumerate(node.results) if v in read}
    while True:
        regions = [_live_region(region, needed) for region in node.regions]
        if node.op is while_op:
            # The condition has one result, which every step reads.
            regions[0] = _live_region(node.regions[0], {0})
        places = {k for region in regions for k in _arguments_read(region)}
        if needed.issuperset(previous := {k for k in places if k < carried}):
            break
        needed |= previous
    if len(needed) == len(node.results) and all(a is b for a, b in zip(regions, node.regions, strict=True)):
        return node
    return _narrowed(node, regions, sorted(needed), places | {k for k in needed if k < carried}, carried)


def _live_region(region: Graph, needed: Collection[int]) -> Graph:
    """Return the region with these results and all that they depend on; its arguments stay."""
    results = tuple(r for k, r in enumerate(region.results) if k in needed)
    return without_unread_parts(region.replaced(results=results) if len(results) < len(region.results) else region)


def _arguments_read(region: Graph) -> set[int]:
    read = {*region.outputs, *(v for node in region.nodes for v in node.operands)}
    return {k for k, i in enumerate(region.arguments) if i.value in read}


def _narrowed(node: Node, regions: list[Graph], needed: list[int], places: Collection[int], carried: int) -> Node:
    """Return the node with the results ``needed``, and with the operands and arguments at ``places``."""
    first = len(node.operands) - len(regions[0].arguments)  # behind the condition of an if
    operands = (*node.operands[:first], *(v for k, v in enumerate(node.operands[first:]) if k in places))
    attributes = dict(node.attributes)
    if node.op in CARRIED:
        attributes[CARRIED[node.op]] = sum(k < carried for k in needed)
    if node.op is scan_op:
        last = carried + attributes["sequences"]
        attributes["sequences"] = sum(carried <= k < last for k in places)
    narrowed = []
    for region in regions:
        removed = {i.value for k, i in enumerate(region.arguments) if k not in places}
        narrowed.append(region.replaced(inputs=tuple(i for i in region.inputs if i.value not in removed)))
    results = tuple(node.results[k] for k in needed)
    return node.replaced(operands=operands, attributes=attributes, regions=tuple(narrowed), results=results)
