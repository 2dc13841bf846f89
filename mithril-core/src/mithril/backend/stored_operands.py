"""Comparison of a value with its own elements, as in the gradient of ``max``, where both must be the same numbers.

A compiler that fuses (XLA, inductor) may compute a cheap value again in each fused kernel that reads it, with other
rounding: fused multiply-adds, or functions of vectors and of single elements. The maximum over elements of one
computation then equals no element of the other, and a mask of maxima is empty.
"""

from __future__ import annotations

from mithril import ops
from mithril.graph import Graph, Node, Op, Value, types_of

COMPARISONS = frozenset({ops.equal, ops.not_equal, ops.less, ops.less_equal, ops.greater, ops.greater_equal})
SELECTIONS = frozenset({ops.max, ops.min, ops.maximum, ops.minimum, ops.max_pool, ops.where, ops.abs, ops.neg})
COMPARES_INSIDE = frozenset({ops.max_pool_positions})  # the helper compares elements with the maximum of their window


def with_stored_operands(graph: Graph, own_comparisons: frozenset[Op] = frozenset()) -> Graph:
    """Return the graph with a barrier behind each value that is compared with its own elements: it is stored once.

    ``own_comparisons`` are operations with an operand ``x`` that compare its elements in the framework, or whose
    gradients there do.
    """
    changed = [
        node.replaced(regions=tuple(with_stored_operands(r, own_comparisons) for r in node.regions))
        for node in graph.nodes
    ]
    if any(new.regions != old.regions for new, old in zip(changed, graph.nodes, strict=True)):
        graph = graph.replaced(nodes=tuple(changed))
    stored = compared_with_itself(graph, COMPARES_INSIDE | own_comparisons)
    if not stored:
        return graph
    replacements: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        operands = tuple(None if v is None else replacements.get(v, v) for v in node.operands)
        nodes.append(node if operands == node.operands else node.replaced(operands=operands))
        for value in node.results:
            if value in stored:
                replacements[value] = Value(f"{value.name}_stored", value.type)
                nodes.append(Node(ops.barrier, (value,), {}, (replacements[value],), (), node.origin, node.tags))
    return graph.replaced(nodes=tuple(nodes), outputs=tuple(replacements.get(v, v) for v in graph.outputs))


def compared_with_itself(graph: Graph, comparing: frozenset[Op] = COMPARES_INSIDE) -> set[Value]:
    """Return the computed values of which elements are compared with each other, or differences with a number."""
    stored: set[Value] = set()
    for node in graph.nodes:
        if node.op in COMPARISONS and any(v is not None and v.dtype.is_float for v in node.operands):
            stored |= _sources_read_twice(graph, node)
        if node.op in comparing:
            value = node.operands[node.op.operands.index("x")]
            stored |= _computed(graph, {value} if value is not None and value.dtype.is_float else set())
    return stored


def _sources_read_twice(graph: Graph, comparison: Node) -> set[Value]:
    """Return the computed values that reach a comparison on two ways through selections and differences."""
    pending = [v for v in dict.fromkeys(comparison.operands) if v is not None]
    followed, twice = set(pending), set()
    while pending:
        node = graph.producers.get(pending.pop())
        if node is None or not (node.op is ops.sub or selects(node)):
            continue
        for value in node.operands:
            if value is None or not value.dtype.is_float:
                continue
            if value in followed:
                twice.add(value)
            else:
                followed.add(value)
                pending.append(value)
    return _computed(graph, twice)


def _computed(graph: Graph, values: set[Value]) -> set[Value]:
    """Return the values that selections begin with, without inputs, which are stored in any case."""
    computed, pending, followed = set(), list(values), set(values)
    while pending:
        value = pending.pop()
        node = graph.producers.get(value)
        if node is None or not node.operands:
            continue
        if not selects(node):
            computed.add(value)
            continue
        new = {v for v in node.operands if v is not None and v.dtype.is_float} - followed
        followed |= new
        pending.extend(new)
    return computed


def selects(node: Node) -> bool:
    """Whether all elements of the result are unrounded elements of the operands, up to the sign."""
    if node.op is ops.barrier:
        return False
    if node.op.composite and node.op not in SELECTIONS:
        body = node.op.decompose(types_of(node.operands), node.attributes)
        return not node.regions and all(selects(inner) or not inner.operands for inner in body.nodes)
    return node.op.moves or node.op in SELECTIONS
