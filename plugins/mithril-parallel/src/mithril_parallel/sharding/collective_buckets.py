"""Collectives combined in buckets: many small ones cost far more than one with the same bytes in a flat buffer.

Reductions are delayed until one result is read or a bucket is full. Sharded arguments are gathered right before the
first one is read, together with those that are read next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from mithril.base import operation
from mithril.ir import Builder, Graph, Node, Value
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.collectives import all_gather, all_reduce, reduce_scatter

BYTES = 25 * 2**20  # capacity of a bucket
Key = tuple[object, ...]


def bucketed(graph: Graph, limit: int = BYTES) -> Graph:
    """Combine the collectives of a graph in buckets, each before the first consumer of its results."""
    if sum(1 for node in graph.nodes if node.op in _EMITTERS) < 2:
        return graph
    return _Buckets(graph, limit).run()


def _key(node: Node) -> Key | None:
    """Return the bucket key of a reduction; None for other nodes."""
    if node.op not in (reduce_scatter, all_reduce) or node.attributes.get("kind", "sum") != "sum":
        return None
    return (node.op, node.attributes["mesh"], node.result.dtype)


def _bytes(node: Node) -> int:
    """Return the bytes of a collective: those of its operand or result, whichever is larger."""
    return max(prod(sizes(v)) * v.dtype.itemsize for v in (node.result, *node.operands) if v is not None)


class _Buckets:
    """One pass over a graph that fills and emits buckets.

    ``replacements`` maps results of collectives to slices of buckets. Nodes of an optimizer's update that read a
    waiting result are postponed (``late``), so that they do not empty its bucket early.
    """

    def __init__(self, graph: Graph, limit: int) -> None:
        self.graph, self.limit = graph, limit
        self.builder = Builder(graph.name)
        self.builder.inputs = list(graph.inputs)
        for v in (*(i.value for i in graph.inputs), *(v for node in graph.nodes for v in node.results)):
            self.builder.unique(v.name)
        self.replacements: dict[Value, Value] = {}
        self.pending: dict[Key, list[Node]] = {}
        self.bucket_of: dict[Value, Key] = {}  # buckets of waiting results
        self.gathers = self._gather_buckets()
        self.late: list[Node] = []
        self.late_values: set[Value] = set()  # results of late nodes

    def _gather_buckets(self) -> dict[Node, list[Node]]:
        """Return the bucket of each all-gather of an argument; other gathers stay single, their operands come later."""
        buckets: dict[Node, list[Node]] = {}
        filling: dict[Key, list[Node]] = {}
        for node in self.graph.nodes:
            if node.op is all_gather and node.operands[0] in self.graph.input_of:
                key = (node.attributes["mesh"], node.result.dtype)
                if sum(map(_bytes, (*filling.get(key, ()), node))) > self.limit:
                    filling.pop(key, None)
                buckets[node] = filling.setdefault(key, [])
                buckets[node].append(node)
        return buckets

    def run(self) -> Graph:
        with self.builder:
            nodes: Sequence[Node] = self.graph.nodes
            while nodes:
                for node in nodes:
                    self._node(node)
                for key in list(self.pending):
                    self._flush(key)
                nodes, self.late, self.late_values = self.late, [], set()
        outputs = tuple(self.replacements.get(v, v) for v in self.graph.outputs)
        return self.graph.replaced(nodes=tuple(self.builder.nodes), outputs=outputs)

    def _node(self, node: Node) -> None:
        read = [v for v in node.operands if v is not None]
        sums = dict.fromkeys(self.bucket_of[v] for v in read if v in self.bucket_of)
        if any(v in self.late_values for v in read) or (sums and node.tags.get("phase") == "update"):
            self.late.append(node)
            self.late_values.update(node.results)
            return
        for key in sums:
            self._flush(key)
        if node in self.gathers:
            if node.result not in self.replacements:
                self._emit_bucket(self.gathers[node])
            return
        bucket_key = _key(node)
        if bucket_key is None:
            self.builder.nodes.append(self._with_replacements(node))
            return
        if sum(map(_bytes, (*self.pending.get(bucket_key, ()), node))) > self.limit:
            self._flush(bucket_key)
        self.pending.setdefault(bucket_key, []).append(node)
        self.bucket_of[node.result] = bucket_key

    def _with_replacements(self, node: Node) -> Node:
        operands = tuple(v if v is None else self.replacements.get(v, v) for v in node.operands)
        return node if operands == node.operands else node.replaced(operands=operands)

    def _flush(self, key: Key) -> None:
        nodes = self.pending.pop(key, [])
        for node in nodes:
            del self.bucket_of[node.result]
        self._emit_bucket(nodes)

    def _emit_bucket(self, nodes: Sequence[Node]) -> None:
        nodes = [self._with_replacements(node) for node in nodes]
        if len(nodes) == 1:
            self.builder.nodes += nodes
            self.replacements[nodes[0].result] = nodes[0].result
        elif nodes:
            with self.builder.at(nodes[-1].origin, nodes[-1].tags):
                results = _EMITTERS[nodes[0].op](nodes)
            self.replacements.update(zip((node.result for node in nodes), results, strict=True))


# -- emission of a bucket ---------------------------------------------------------------------------------------------
def _all_reduce_bucket(nodes: Sequence[Node]) -> list[Value]:
    flat = _concat([_reshape(_operand(n), (-1,)) for n in nodes], 0)
    total = _exchange(nodes[0], flat)
    return [_reshape(x, n.result.shape) for x, n in zip(_slices(total, nodes, 0), nodes, strict=True)]


def _all_gather_bucket(nodes: Sequence[Node]) -> list[Value]:
    """Gather the parts as one row per device; then concatenate the parts of each tensor along its axis."""
    flat = _concat([_reshape(_operand(n), (1, -1)) for n in nodes], 1)
    rows = _exchange(nodes[0], flat, axis=0)
    results = []
    for x, n in zip(_slices(rows, nodes, 1, result=False), nodes, strict=True):
        axis, parts, shape = n.attributes["axis"], n.attributes["parts"], sizes(_operand(n))
        x = _move_axis(_reshape(x, (parts, *shape)), 0, axis)
        results.append(_reshape(x, n.result.shape))
    return results


def _reduce_scatter_bucket(nodes: Sequence[Node]) -> list[Value]:
    """Reduce a matrix with one row per device, and scatter its rows."""
    rows = []
    for n in nodes:
        axis, parts, shape = n.attributes["axis"], n.attributes["parts"], sizes(n.result)
        x = _reshape(_operand(n), (*shape[:axis], parts, *shape[axis:]))
        rows.append(_reshape(_move_axis(x, axis, 0), (parts, -1)))
    scattered = _exchange(nodes[0], _concat(rows, 1), axis=0)
    return [_reshape(x, n.result.shape) for x, n in zip(_slices(scattered, nodes, 1), nodes, strict=True)]


def _operand(node: Node) -> Value:
    (x,) = node.operands
    assert x is not None
    return x


def _exchange(like: Node, x: Value, **changes: int) -> Value:
    result: Value = Builder.current().emit(like.op, (x,), {**like.attributes, **changes})[0]
    return result


def _concat(xs: Iterable[Value], axis: int) -> Value:
    result: Value = operation("concat")(*xs, axis=axis)
    return result


def _slices(x: Value, nodes: Sequence[Node], axis: int, *, result: bool = True) -> list[Value]:
    slices, start = [], 0
    for n in nodes:
        stop = start + prod(sizes(n.result if result else _operand(n)))
        slices.append(operation("slice")(x, starts=(start,), stops=(stop,), steps=(1,), axes=(axis,)))
        start = stop
    return slices


def _reshape(x: Value, shape: Sequence[object]) -> Value:
    result: Value = x if tuple(shape) == x.shape else operation("reshape")(x, shape=tuple(shape))
    return result


def _move_axis(x: Value, source: int, target: int) -> Value:
    order = [k for k in range(x.ndim) if k != source]
    order.insert(target, source)
    result: Value = x if source == target else operation("transpose")(x, perm=tuple(order))
    return result


_EMITTERS = {all_reduce: _all_reduce_bucket, all_gather: _all_gather_bucket, reduce_scatter: _reduce_scatter_bucket}
