"""Products of bfloat16 rows with a transposed weight, in the form that XLA for CPUs passes to oneDNN.

XLA converts the operands of any other such product to float32 in memory: for a weight of 8 MB that took six to nine
times as long.
"""

from __future__ import annotations

from mithril import ops
from mithril.graph import Graph, Node, Value, bfloat16, iterate

SWAPPED = (1, 0)


def with_contracted_rows(graph: Graph) -> Graph:
    """Return the graph with ``x @ transpose(w)`` as a contraction of both last axes."""
    weights = {
        node.result: node.operands[0]
        for node in graph.nodes
        if node.op is ops.transpose and tuple(node.attributes["perm"]) == SWAPPED
    }
    nodes = [_contracted(node, weights) for node in graph.nodes]
    changed = graph.replaced(nodes=tuple(nodes))
    if nodes == list(graph.nodes):
        return graph
    used = {v for node, _ in iterate(changed) for v in node.operands} | set(graph.outputs)
    return graph.replaced(nodes=tuple(n for n in nodes if n.result not in weights or n.result in used))


def _contracted(node: Node, weights: dict[Value, Value | None]) -> Node:
    if node.op is not ops.matmul or node.result.dtype is not bfloat16:
        return node
    x, transposed = node.operands
    assert x is not None
    assert transposed is not None
    weight = weights.get(transposed)
    if weight is None or x.ndim < 2:
        return node
    attributes = ops.dot.complete({"contract_a": (x.ndim - 1,), "contract_b": (1,)})
    return Node(ops.dot, (x, weight), attributes, node.results, (), node.origin, node.tags)
