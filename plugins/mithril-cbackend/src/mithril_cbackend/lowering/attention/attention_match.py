"""Attention in a graph of primitives: a matmul, elementwise ops, softmax and a second matmul.

The match depends on the computation, not on names of layers. Values in between must have no other users, so that the
kernel need not store them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mithril import ops
from mithril.graph import Graph, Node, Op, Value, float32, int32
from mithril_cbackend.lowering.element.element_reader import is_uniform, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.vectorization import is_plain
from mithril_cbackend.lowering.element.views import view_strides

COMPARISONS = {  # operand with the key position, offset from the other operand to the visible keys
    ops.greater_equal: (1, 1),
    ops.less_equal: (0, 1),
    ops.greater: (1, 0),
    ops.less: (0, 0),
}
POSITION_OPS = (*COMPARISONS, ops.iota, ops.size_value, ops.add, ops.logical_and, ops.reshape, ops.broadcast_to)


@dataclass(frozen=True)
class Attention:
    """Nodes of ``softmax(scores) @ values``, where ``scores`` is an elementwise function of ``queries @ keys``."""

    first: Node  # queries @ keys
    between: tuple[Node, ...]  # from ``first`` to the scores
    scores: Value
    softmax: tuple[Node, ...]
    guard: tuple[Node, ...]  # ``where(isnan(weights), 0, weights)`` of torch's exporter: rows without a key become 0
    second: Node  # weights @ values

    @property
    def inner(self) -> tuple[Node, ...]:
        """Nodes whose results must have no other users."""
        return (self.first, *self.between, *self.softmax, *self.guard)


def attention_of(producers: Mapping[Value, Node], second: Node) -> Attention | None:
    """Return the attention that ends with the product ``second``, or None if there is none."""
    shape = shape_of(operand(second))
    if second.result.dtype is not float32 or len(shape) < 2 or len(shape_of(operand(second, 1))) < 2:
        return None
    guard = _guard(producers, operand(second))
    softmax = _softmax(producers, operand(guard[-1], 2) if guard else operand(second))
    if softmax is None:
        return None
    scores = operand(softmax[0])
    first, between = _score_product(producers, scores)
    if first is None or len(shape_of(operand(first))) < 2 or len(shape_of(operand(first, 1))) < 2:
        return None
    sizes = (*shape, shape_of(operand(first))[-1], *shape_of(operand(second, 1)))
    if shape_of(second.result)[:-2] != shape[:-2] or 0 in sizes:
        return None
    return Attention(first, between, scores, softmax, guard, second)


def _guard(producers: Mapping[Value, Node], weights: Value) -> tuple[Node, ...]:
    """Return the nodes that replace weights that are nan by 0, if there are any.

    One of a row's weights is nan exactly where their sum is, so that the kernel can test the sum.
    """
    selection = producers.get(weights)
    if selection is None or selection.op is not ops.where:
        return ()
    condition, zero = (producers.get(operand(selection, k)) for k in (0, 1))
    if condition is None or condition.op is not ops.isnan or operand(condition) is not operand(selection, 2):
        return ()
    if zero is None or not is_uniform(zero) or zero.attributes["value"] != 0:
        return ()
    return (condition, selection) if shape_of(operand(selection, 2)) == shape_of(weights) else ()


def _softmax(producers: Mapping[Value, Node], weights: Value) -> tuple[Node, ...] | None:
    """Return max, sub, exp, sum and div over the last axis in this order, or None if they do not match."""

    def producer(value: Value, op: Op) -> Node | None:
        node = producers.get(value)
        return node if node is not None and node.op is op else None

    div = producer(weights, ops.div)
    exp = div and producer(operand(div), ops.exp)
    total = div and producer(operand(div, 1), ops.sum)
    sub = exp and producer(operand(exp), ops.sub)
    row_max = sub and producer(operand(sub, 1), ops.max)
    if not (div and exp and total and sub and row_max) or weights.dtype is not float32:
        return None
    last = (len(weights.shape) - 1,)
    reductions = ((total, exp.result), (row_max, operand(sub)))
    for node, source in reductions:
        if operand(node) is not source or node.attributes["axis"] != last or not node.attributes["keepdims"]:
            return None
    return (row_max, sub, exp, total, div) if shape_of(operand(sub)) == shape_of(weights) else None


def _score_product(producers: Mapping[Value, Node], scores: Value) -> tuple[Node | None, tuple[Node, ...]]:
    """Return the only matmul of the scores' shape that they depend on, and the elementwise nodes in between."""
    shape = shape_of(scores)
    products: dict[Node, None] = {}
    chain: dict[Node, None] = {}
    pending = [scores]
    while pending:
        node = producers.get(pending.pop())
        if node is None or node in chain or shape_of(node.result) != shape:
            continue
        if node.op is ops.matmul:
            products[node] = None
        elif is_plain(node) and not is_uniform(node):
            chain[node] = None
            pending += [v for v in node.operands if v is not None]
    if len(products) != 1 or next(iter(products)).result.dtype is not float32:
        return None, ()
    (first,) = products
    depends = {first.result}
    while more := {n.result for n in chain if depends.intersection(n.operands)} - depends:
        depends |= more
    return first, tuple(n for n in chain if n.result in depends)


def trailing_layout_ops(graph: Graph, attention: Attention) -> tuple[Node, ...] | None:
    """Return transposes and reshapes that only change the result's layout, or None if the weights are used."""
    inner = set(attention.inner)
    results = {n.result for n in inner}
    readers = {*inner, attention.second}
    if results.intersection(graph.outputs) or any(not readers.issuperset(graph.users[v]) for v in results):
        return None
    if sum(v in results for v in attention.second.operands) != 1:
        return None
    chain: list[Node] = []
    value, last = attention.second.result, 0
    while value not in graph.outputs and len(graph.users.get(value, ())) == 1:
        (node,) = graph.users[value]
        if node.op not in (ops.reshape, ops.transpose) or view_strides([*chain, node], attention.second.result) is None:
            break
        chain.append(node)
        value = node.result
        if node.op is ops.transpose:
            last = len(chain)
    return tuple(chain[:last])


def roles(kernel: Kernel, attention: Attention, value: Value) -> set[str]:
    """Return the roles of a value in a kernel: 'matrix' (packed), 'query' or 'score'."""
    uses: set[str] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        for node in kernel.nodes:
            for k, v in enumerate(node.operands):
                if v is not value:
                    continue
                if node in (attention.first, attention.second):
                    uses.add("query" if node is attention.first and k == 0 else "matrix")
                elif node in attention.between:
                    uses.add("score")
                else:
                    pending.append(node.result)
    return uses


# -- keys that are not seen ---------------------------------------------------------------------------------------
def conditions(producers: Mapping[Value, Node], attention: Attention) -> list[Value]:
    """Return the masks of the scores; where one is false, the score is minus infinity."""
    masks: list[Value] = []
    node = producers.get(attention.scores)
    while node in attention.between and node.op is ops.where and _is_minus_infinity(producers, operand(node, 2)):
        pending = [operand(node)]
        while pending:
            value = pending.pop()
            producer = producers.get(value)
            if producer is not None and producer.op is ops.logical_and:
                pending += [operand(producer), operand(producer, 1)]
            elif producer is not None and producer.op in (ops.reshape, ops.broadcast_to) and _aligned(producer):
                pending.append(operand(producer))
            else:
                masks.append(value)
        node = producers.get(operand(node, 1))
    return masks


def _aligned(node: Node) -> bool:
    """Whether only leading axes are added, so that positions in a matrix are unchanged."""
    source_shape, result_shape = shape_of(operand(node)), shape_of(node.result)
    if node.op is ops.broadcast_to:
        return True
    return result_shape[len(result_shape) - len(source_shape) :] == source_shape and len(result_shape) >= len(
        source_shape
    )


def _is_minus_infinity(producers: Mapping[Value, Node], value: Value) -> bool:
    node = producers.get(value)
    return node is not None and is_uniform(node) and node.attributes["value"] == -float("inf")


def position_nodes(producers: Mapping[Value, Node], values: list[Value]) -> list[Node]:
    """Return the nodes of masks that depend on positions only: cheap enough to recompute in every kernel."""
    nodes: dict[Node, None] = {}
    pending = list(values)
    while pending:
        node = producers.get(pending.pop())
        if node is not None and (node.op in POSITION_OPS or is_uniform(node)) and not node.result.dtype.is_float:
            nodes[node] = None
            pending += [v for v in node.operands if v is not None]
    return list(nodes)


def causal_limits(producers: Mapping[Value, Node], attention: Attention) -> list[tuple[Value, int]]:
    """Return limits on the visible keys of each query, as (value, offset to add).

    Limits do not decrease from query to query, so the last query of a block sees all keys that the others see.
    """
    limits = []
    for value in conditions(producers, attention):
        node = producers.get(value)
        if node is not None and node.op in COMPARISONS:
            key, offset = COMPARISONS[node.op]
            keys, limit = operand(node, key), operand(node, 1 - key)
            count = shape_of(attention.scores)[-1]
            if _counts_keys(producers, keys, count) and _is_nondecreasing(producers, limit):
                limits.append((limit, offset))
    return limits


def _counts_keys(producers: Mapping[Value, Node], value: Value, count: int) -> bool:
    node, shape = producers.get(value), shape_of(value)
    if node is None or node.op is not ops.iota:
        return False
    return bool(node.attributes["axis"] == len(shape) - 1 and shape[-1] == count)


def _is_nondecreasing(producers: Mapping[Value, Node], value: Value) -> bool:
    """Whether a value is the same for all keys and does not decrease from query to query."""
    if value.dtype is not int32:
        return False
    pending = [value]
    while pending:
        value = pending.pop()
        shape, node = shape_of(value), producers.get(value)
        if all(n == 1 for n in shape[-2:]):
            continue  # the same for all queries
        if node is None or not (is_uniform(node) or node.op in (ops.iota, ops.add)):
            return False
        if node.op is ops.iota and node.attributes["axis"] == len(shape) - 1:
            return False
        pending += [v for v in node.operands if v is not None]
    return True
