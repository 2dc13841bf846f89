"""Traits of nodes, derived from the declaration of their operation; passes query these instead of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mithril.graph.apply import emit
from mithril.graph.axes_notation import REDUCING, parse_axes
from mithril.graph.builder import Builder
from mithril.graph.core import Graph, Node, Op, types_of
from mithril.graph.node_axes import axes_of

NO_COSTS: Mapping[str, float] = MappingProxyType({})  # of a hardware target
EXPENSIVE = 4.0  # operations per element above which recomputing an element costs more than reading it


def body(node: Node) -> Graph:
    """Return the body of a composite for the operands of the node."""
    op = node.op
    return op.decompose(types_of(node.operands), node.attributes)


def sample_nodes(op: Op) -> list[Node]:
    """Return a node for each sample of an operation."""
    nodes = []
    for sample in op.samples:
        with Builder() as builder:
            operands = [
                None if arr is None else builder.input(f"x{k}", arr.shape, arr.dtype)
                for k, arr in enumerate(sample.operands)
            ]
            emit(op, operands, sample.attributes)
        nodes += [node for node in builder.nodes if node.op is op]
    return nodes


def _holds_for_all(node: Node, holds: Callable[[Node], bool]) -> bool:
    """Whether a predicate holds for a primitive, or for all nodes in the body of a composite."""
    op = node.op
    if op.composite and op.declared_axes is None:
        graph = body(node)
        read = all(i.data is None for i in graph.inputs)
        return read and not op.elementwise and all(_holds_for_all(inner, holds) for inner in graph.nodes)
    return holds(node)


def is_product(node: Node) -> bool:
    """Whether the node, or for a composite a node of its body, sums over a factor shared by two operands."""
    op = node.op
    if op.elementwise or node.regions:
        return False
    if op.composite and op.declared_axes is None:
        return any(is_product(inner) for inner in body(node).nodes)
    return len(node.operands) > 1 and bool(axes_of(node).is_product)


def is_windowed_product(node: Node) -> bool:
    """Whether a node is a convolution, or a gradient of one: a product that reads through windows."""
    op = node.op
    if op.elementwise or op.composite or len(node.operands) < 2:
        return False
    return bool(axes_of(node).is_product) and any(r.kind == "window" for r in axes_of(node).roles.values())


def is_layout(node: Node) -> bool:
    """Whether elements are only moved or repeated: reshapes, transposes, broadcasts, barriers."""
    op = node.op
    if not node.operands or node.regions or op.elementwise or not (op.moves or op.composite):
        return False
    return _holds_for_all(node, lambda inner: bool(inner.op.moves and axes_of(inner).is_layout))


def is_recomputed(node: Node) -> bool:
    """Whether a node repeats a part of the forward pass for the backward pass, to save memory."""
    return node.tags.get("phase") == "recomputed"


def is_view(node: Node) -> bool:
    """Whether the result has the operand's elements in the same row-major order, so that both can share a buffer."""
    op = node.op
    if len(node.operands) != 1 or node.regions or op.elementwise or op.opaque or not (op.moves or op.composite):
        return False
    return _holds_for_all(node, lambda inner: bool(inner.op.moves and axes_of(inner).is_view))


def is_permutation(node: Node) -> bool:
    """Whether the result contains each element of the operand once: a reshape or a transpose."""
    op = node.op
    if op.opaque or len(node.operands) != 1 or len(node.results) != 1 or not is_layout(node):
        return False
    axes = axes_of(node)
    read, written = (
        {f for factors in places or () for f in factors if f not in axes.roles}
        for places in (axes.operands[0], axes.results[0])
    )
    return read == written


def is_source(node: Node) -> bool:
    """Whether a node has no operands: constants, ranges, filled arrays."""
    return not node.operands


def is_cheap(node: Node) -> bool:
    """Whether recomputing the result is cheaper than storing it: a source, or a mere change of layout."""
    return is_source(node) or (len(node.operands) == 1 and is_layout(node))


def is_fold(node: Node) -> bool:
    """Whether a node reduces its one operand: sum, mean, product, min, max."""
    op = node.op
    if len(node.operands) != 1 or op.elementwise or op.composite or op.declared_axes is None:
        return False
    return bool(axes_of(node).reduced) or _reduces(op)


def _reduces(op: Op) -> bool:
    """Whether the operation is a reduction, even if a call names no axes."""
    text = op.declared_axes
    return isinstance(text, str) and any(c.kind in REDUCING for c in parse_axes(text).clauses)


def is_expensive(node: Node, flops: float = EXPENSIVE, costs: Mapping[str, float] = NO_COSTS) -> bool:
    """Whether the cost per element is at least ``flops``: by its name in ``costs``, or as declared."""
    cost = costs.get(node.op.name, node.op.cost)
    return not callable(cost) and (cost or 0.0) >= flops


def reads_rows(node: Node, operand: int) -> str | None:
    """Return "rows" or "columns", whichever of a matrix operand a sum or look-up reads, or None if neither."""
    op = node.op
    if op.elementwise or node.regions or node.operands[operand] is None:
        return None
    if not op.composite or op.declared_axes is not None:
        answer: str | None = axes_of(node).reads_rows(operand)
        return answer
    graph = body(node)
    inputs = iter([i.value for i in graph.inputs if i.data is None])
    value = [None if v is None else next(inputs) for v in node.operands][operand]
    is_transposed = False
    while value is not None and not any(v is value for v in graph.outputs):
        readers = graph.users.get(value, ())
        places = [k for k, v in enumerate(readers[0].operands) if v is value] if len(readers) == 1 else []
        if len(places) != 1:
            return None
        if not is_matrix_transpose(readers[0]):
            answer = reads_rows(readers[0], places[0])
            return {"rows": "columns", "columns": "rows"}.get(answer or "") if is_transposed else answer
        value, is_transposed = readers[0].result, not is_transposed
    return None


def is_matrix_transpose(node: Node) -> bool:
    """Whether a node swaps the two axes of a matrix."""
    if len(node.operands) != 1 or node.result.ndim != 2 or not is_layout(node):
        return False
    axes = axes_of(node)
    (x,), (y,) = axes.operands, axes.results
    return bool(x is not None and y == x[::-1] and x[0] != x[1])


def linear_in(node: Node, operand: int) -> bool:
    """Whether an operation is linear in one operand, with the others fixed."""
    op = node.op
    groups = [part.split() for part in op.linear.split("|")]
    return not op.variadic and [op.operands[operand]] in groups


def is_addition(node: Node) -> bool:
    """Whether operands are added or subtracted: an element-wise operation, linear in all of them together."""
    op = node.op
    return op.elementwise and len(op.operands) > 1 and op.linear == " ".join(op.operands)


def precision(node: Node) -> str:
    """Return how a node runs under mixed precision: "low", "full", or "follow" for the dtype of its operands.

    By default products are "low"; moves of elements and arithmetic of one operation per element are "follow".
    """
    op = node.op
    if op.precision is not None:
        return str(op.precision)
    if node.regions or op.random:
        return "full"
    if op.composite and not op.elementwise and op.declared_axes is None:
        inner = {precision(n) for n in body(node).nodes}
        return "follow" if inner <= {"follow"} else "full"
    if op.moves or (op.elementwise and not callable(op.cost) and (op.cost or 0.0) <= 1):
        return "follow"
    return "low" if is_product(node) else "full"


def is_unchanged(node: Node) -> bool:
    """Whether the node only moves, repeats or casts elements."""
    return node.op.name == "cast" or is_layout(node)
