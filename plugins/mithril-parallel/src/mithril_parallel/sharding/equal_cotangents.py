"""Sums over devices whose cotangents are equal on all devices, such as that of a loss: they need no exchange.

The transpose of a sum over devices is a sum of the cotangents of all devices. If every operation after it reads values
that all devices have, these cotangents are equal.
"""

from __future__ import annotations

from collections.abc import Iterable

from mithril.ir import Graph, Node
from mithril_parallel.sharding.collectives import all_gather, all_reduce, cotangent


def with_equal_cotangents(graph: Graph, differing: Iterable[str], axis: str) -> Graph:
    """Mark the sums of a device's graph along an axis; the inputs ``differing`` are not equal on its devices."""
    sums = [n for n in graph.nodes if n.op is all_reduce and n.attributes["mesh"] == axis]
    if not sums:
        return graph
    names = set(differing)
    different = {i.value for i in graph.inputs if i.name in names}
    for node in graph.nodes:
        reads_different = any(v in different for v in node.operands)
        if node.op is not cotangent and node.attributes.get("mesh") == axis:
            reads_different = node.op not in (all_reduce, all_gather)
        if reads_different:
            different.update(node.results)
    private = different & set(graph.outputs)  # their cotangents differ, as those of all values that they are made of
    for node in reversed(graph.nodes):
        if any(v in different for v in node.operands) or any(v in private for v in node.results):
            private.update(v for v in node.operands if v is not None)
    marked = {n for n in sums if n.attributes["kind"] == "sum" and n.result not in private}
    return graph.replaced(nodes=tuple(_marked(n) if n in marked else n for n in graph.nodes))


def _marked(node: Node) -> Node:
    return node.replaced(attributes={**node.attributes, "kind": "total"})
