"""Gradients of attention on a CPU: one kernel for all cotangents, which reads the log sums of the forward kernel.

The graph of the gradient computes the weights again: ``p = softmax(scores)``, ``s = p * (g v^T - sum(g y))`` and the
products ``s k``, ``s^T q`` and ``p^T g``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mithril import ops
from mithril.backend import Call, Lowerings
from mithril.derivatives import live_nodes
from mithril.graph import Dim, Graph, Node, Op, TensorType, Value
from mithril_torch.fusion.subgraph_fusion import backend_op

DTYPES = ("float32", "float64")
SWAPPED = (0, 1, 3, 2)


def _saving_types(types: Sequence[Any], attributes: Any) -> Any:
    return types[0], TensorType(types[0].dtype, types[0].shape[:3])


SETTINGS = {"causal": "bool", "scale": "float"}
attention_saving = backend_op("attention_saving", "q", "k", "v", infer=_saving_types, **SETTINGS)
attention_grads = backend_op(
    "attention_grads", "g", "y", "sums", "q", "k", "v", infer=lambda types, given: types[3:6], **SETTINGS
)


class Attention(NamedTuple):
    """An attention, and the nodes that compute the cotangents of its operands."""

    forward: Node
    g: Value
    scale: float
    cotangents: tuple[Node, Node, Node]


def join_attentions(graph: Graph) -> Graph:
    """Return the graph with the cotangents of each attention from one call of PyTorch's kernel for CPUs."""
    matches = [a for node in graph.nodes if node.op is ops.mul and (a := _match(graph, node)) is not None]
    if not matches:
        return graph
    position = {v: k for k, node in enumerate(graph.nodes) for v in node.results}
    changed: dict[Node, Node | None] = {}
    sums: dict[Node, Value] = {}
    for forward, g, scale, cotangents in matches:
        first = min(cotangents, key=lambda n: position[n.result])
        y = forward.result
        # The kernel computes all three cotangents where the first one was; an operand that is computed
        # later is not there yet.
        if any(position.get(v, -1) > position[first.result] for v in (g, y, *forward.operands[:3]) if v is not None):
            continue
        if forward not in sums:
            sums[forward] = Value(f"{y.name}_sums", TensorType(y.dtype, y.shape[:3]))
            settings = {"causal": forward.attributes["causal"], "scale": scale}
            changed[forward] = forward.replaced(
                op=attention_saving, operands=forward.operands[:3], attributes=settings, results=(y, sums[forward])
            )
        changed.update(dict.fromkeys(cotangents))
        changed[first] = first.replaced(
            op=attention_grads,
            operands=(g, y, sums[forward], *forward.operands[:3]),
            attributes={"causal": forward.attributes["causal"], "scale": scale},
            results=tuple(n.result for n in cotangents),
        )
    nodes = [n for n in (changed.get(node, node) for node in graph.nodes) if n is not None]
    return graph.replaced(nodes=tuple(live_nodes(nodes, graph.outputs)))


# -- matching ---------------------------------------------------------------------------------------------------------
class _Reader:
    """Look-ups in a graph that return None if it differs from the expectation."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def operands(self, value: Value | None, op: Op, **attributes: Any) -> tuple[Any, ...]:
        """Return the operands of the producer of a value, or a tuple of None."""
        node = self.graph.producers.get(value) if value is not None else None
        if node is None or node.op is not op or any(node.attributes[n] != x for n, x in attributes.items()):
            return (None,) * len(op.operands)
        return node.operands

    def scaled(self, value: Value | None) -> tuple[Value | None, float | None]:
        """Return x and the constant c of ``x * c``."""
        x, constant = self.operands(value, ops.mul)
        node = self.graph.producers.get(constant) if constant is not None else None
        return (x, node.attributes["value"]) if node is not None and node.is_constant else (None, None)

    def user(self, value: Value, op: Op, *operands: Any, **attributes: Any) -> Node | None:
        """Return the first user that applies ``op`` to the operands."""
        for node in self.graph.users.get(value, ()):
            has_attributes = node.op is op and all(node.attributes[n] == x for n, x in attributes.items())
            if has_attributes and node.operands == operands:
                return node
        return None

    def product(self, a: Value, b: Value, swapped: bool = False) -> Node | None:
        """Return the product of a, with its last axes swapped or not, and b."""
        if not swapped:
            return self.user(a, ops.matmul, a, b)
        permuted = self.user(a, ops.transpose, a, perm=SWAPPED)
        return None if permuted is None else self.user(permuted.result, ops.matmul, permuted.result, b)


def _match(graph: Graph, node: Node) -> Attention | None:
    """Return the attention of which ``node`` computes the cotangent of the scores."""
    read = _Reader(graph)
    # Multiplication is commutative, and passes may have changed the order.
    for p, difference in (node.operands, node.operands[::-1]):
        if p is None or p.ndim != 4 or p.dtype.name not in DTYPES:
            continue
        (scores,) = read.operands(p, ops.softmax, axis=3)
        product, total = read.operands(difference, ops.sub)
        if scores is None or product is None:
            continue
        (rows,) = read.operands(total, ops.sum, axis=(3,), keepdims=True)
        g, y = read.operands(rows, ops.mul)
        for cotangent, result in ((g, y), (y, g)):
            forward = graph.producers.get(result)
            if forward is not None and forward.op is ops.attention and _has_kernel(forward):
                attention = _attention(read, forward, cotangent, node.result, p, scores, product)
                if attention is not None:
                    return attention
    return None


def _has_kernel(forward: Node) -> bool:
    q, k, v, mask = forward.operands
    assert q is not None
    assert k is not None
    assert v is not None
    shapes = (q.shape, k.shape, v.shape)
    if mask is not None or any(isinstance(n, Dim) or n == 0 for shape in shapes for n in shape):
        return False
    # The kernel aligns the causal mask at the first key, the operation at the last one; they agree
    # for equal lengths only.
    is_square = q.shape[2] == k.shape[2] or not forward.attributes["causal"]
    return is_square and q.shape[1] == k.shape[1] and q.shape[3] == v.shape[3]


def _attention(
    read: _Reader, forward: Node, g: Value, s: Value, p: Value, scores: Value, product: Value
) -> Attention | None:
    """Return the match if the values are those of the gradient of ``forward``."""
    q, k, v, _ = forward.operands
    assert q is not None
    assert k is not None
    assert v is not None
    if forward.attributes["causal"]:
        scores = _unmasked(read, scores)
    shared, keys = read.operands(scores, ops.matmul)
    scaled, factor = read.scaled(shared)
    scale = forward.attributes["scale"]
    expected = scale if scale is not None else 1.0 / math.sqrt(q.shape[3])
    left, values = read.operands(product, ops.matmul)
    permuted = [read.operands(x, ops.transpose, perm=SWAPPED) for x in (keys, values)]
    if scaled is not q or factor != expected or left is not g or permuted != [(k,), (v,)]:
        return None
    of_shared, of_k, of_v = read.product(s, k), read.product(s, shared, True), read.product(p, g, True)
    if of_shared is None or of_k is None or of_v is None:
        return None
    for user in read.graph.users.get(of_shared.result, ()):
        if read.scaled(user.result) == (of_shared.result, factor):
            return Attention(forward, g, expected, (user, of_k, of_v))
    return None


def _unmasked(read: _Reader, scores: Value) -> Any:
    """Return the scores before the causal mask, or None."""
    visible, raw, hidden = read.operands(scores, ops.where)
    rows, columns = read.operands(visible, ops.greater_equal)
    axes = []
    for index in (rows, columns):
        node = read.graph.producers.get(index) if index is not None else None
        axes.append(node.attributes["axis"] if node is not None and node.op is ops.iota else None)
    constant = read.graph.producers.get(hidden) if hidden is not None else None
    is_hidden = constant is not None and constant.is_constant and constant.attributes["value"] == -math.inf
    return raw if axes == [0, 1] and is_hidden else None


# -- lowering -----------------------------------------------------------------------------------------------------
def add_rows(table: Lowerings) -> None:
    """Add the lowering rows of the joined operations to ``table``."""
    table.function(attention_saving)(_attention_saving)
    table.function(attention_grads)(_attention_grads)


def _attention_saving(call: Call) -> str:
    from mithril_torch import helpers

    settings = f"{call.causal}, {call.literal(call.scale)}"
    return f"{call.helper(helpers.attention_saving)}({call.q}, {call.k}, {call.v}, {settings})"


def _attention_grads(call: Call) -> str:
    from mithril_torch import helpers

    operands = ", ".join(str(o) for o in call.operands)
    return f"{call.helper(helpers.attention_grads)}({operands}, {call.causal}, {call.literal(call.scale)})"
