"""Exchanges in buckets: many small ones cost far more than one of the same bytes, laid side by side in flat memory.

Sums wait until somebody reads one of them, or a bucket is full. Parts of arguments are gathered right before the first
is read, with those read next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from mithril.base import operation
from mithril.ir import Builder, Graph, Node, Value
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.collectives import all_gather, all_reduce, reduce_scatter

BYTES = 25 * 2**20  # of a full bucket
Key = tuple[object, ...]


def bucketed(graph: Graph, limit: int = BYTES) -> Graph:
    """The graph with its exchanges together where they can be, none of them moved behind what reads it."""
    if sum(1 for node in graph.nodes if node.op in _TOGETHER) < 2:
        return graph
    return _Buckets(graph, limit).run()


def _key(node: Node) -> Key | None:
    """Sums of one key go together; None for what is no sum."""
    if node.op not in (reduce_scatter, all_reduce) or node.attributes.get("kind", "sum") != "sum":
        return None
    return (node.op, node.attributes["mesh"], node.result.dtype)


def _bytes(node: Node) -> int:
    """Of the larger side of an exchange."""
    return max(prod(sizes(v)) * v.dtype.itemsize for v in (node.result, *node.operands) if v is not None)


class _Buckets:
    """``made`` maps results of exchanges to what takes their place; ``late`` nodes of an update wait too."""

    def __init__(self, graph: Graph, limit: int) -> None:
        self.graph, self.limit = graph, limit
        self.builder = Builder(graph.name)
        self.builder.inputs = list(graph.inputs)
        for v in (*(i.value for i in graph.inputs), *(v for node in graph.nodes for v in node.results)):
            self.builder.unique(v.name)
        self.made: dict[Value, Value] = {}
        self.waiting: dict[Key, list[Node]] = {}
        self.of: dict[Value, Key] = {}  # results that wait, and in which bucket
        self.gathers = self._gathers()
        self.late: list[Node] = []
        self.after: set[Value] = set()  # what late nodes make

    def _gathers(self) -> dict[Node, list[Node]]:
        """The bucket of each argument's parts; of others there is no telling when they are there."""
        found: dict[Node, list[Node]] = {}
        filling: dict[Key, list[Node]] = {}
        for node in self.graph.nodes:
            if node.op is all_gather and node.operands[0] in self.graph.input_of:
                key = (node.attributes["mesh"], node.result.dtype)
                if sum(map(_bytes, (*filling.get(key, ()), node))) > self.limit:
                    filling.pop(key, None)
                found[node] = filling.setdefault(key, [])
                found[node].append(node)
        return found

    def run(self) -> Graph:
        with self.builder:
            nodes: Sequence[Node] = self.graph.nodes
            while nodes:
                for node in nodes:
                    self._node(node)
                for key in list(self.waiting):
                    self._flush(key)
                nodes, self.late, self.after = self.late, [], set()
        outputs = tuple(self.made.get(v, v) for v in self.graph.outputs)
        return self.graph.replaced(nodes=tuple(self.builder.nodes), outputs=outputs)

    def _node(self, node: Node) -> None:
        read = [v for v in node.operands if v is not None]
        sums = dict.fromkeys(self.of[v] for v in read if v in self.of)
        if any(v in self.after for v in read) or (sums and node.tags.get("phase") == "update"):
            self.late.append(node)
            self.after.update(node.results)
            return
        for key in sums:
            self._flush(key)
        if node in self.gathers:
            if node.result not in self.made:
                self._together(self.gathers[node])
            return
        own = _key(node)
        if own is None:
            self.builder.nodes.append(self._reading(node))
            return
        if sum(map(_bytes, (*self.waiting.get(own, ()), node))) > self.limit:
            self._flush(own)
        self.waiting.setdefault(own, []).append(node)
        self.of[node.result] = own

    def _reading(self, node: Node) -> Node:
        operands = tuple(v if v is None else self.made.get(v, v) for v in node.operands)
        return node if operands == node.operands else node.replaced(operands=operands)

    def _flush(self, key: Key) -> None:
        nodes = self.waiting.pop(key, [])
        for node in nodes:
            del self.of[node.result]
        self._together(nodes)

    def _together(self, nodes: Sequence[Node]) -> None:
        nodes = [self._reading(node) for node in nodes]
        if len(nodes) == 1:
            self.builder.nodes += nodes
            self.made[nodes[0].result] = nodes[0].result
        elif nodes:
            with self.builder.at(nodes[-1].origin, nodes[-1].tags):
                found = _TOGETHER[nodes[0].op](nodes)
            self.made.update(zip((node.result for node in nodes), found, strict=True))


# -- side by side -----------------------------------------------------------------------------------------------------
def _reduced(nodes: Sequence[Node]) -> list[Value]:
    flat = _side_by_side([_shaped(_operand(n), (-1,)) for n in nodes], 0)
    whole = _exchange(nodes[0], flat)
    return [_shaped(x, n.result.shape) for x, n in zip(_apart(whole, nodes, 0), nodes, strict=True)]


def _gathered(nodes: Sequence[Node]) -> list[Value]:
    """The parts of each device are a row; those of one tensor are then put side by side along its axis."""
    flat = _side_by_side([_shaped(_operand(n), (1, -1)) for n in nodes], 1)
    rows = _exchange(nodes[0], flat, axis=0)
    found = []
    for x, n in zip(_apart(rows, nodes, 1, result=False), nodes, strict=True):
        axis, parts, shape = n.attributes["axis"], n.attributes["parts"], sizes(_operand(n))
        x = _moved(_shaped(x, (parts, *shape)), 0, axis)
        found.append(_shaped(x, n.result.shape))
    return found


def _scattered(nodes: Sequence[Node]) -> list[Value]:
    """What each device is to keep is a row of its own."""
    rows = []
    for n in nodes:
        axis, parts, shape = n.attributes["axis"], n.attributes["parts"], sizes(n.result)
        x = _shaped(_operand(n), (*shape[:axis], parts, *shape[axis:]))
        rows.append(_shaped(_moved(x, axis, 0), (parts, -1)))
    mine = _exchange(nodes[0], _side_by_side(rows, 1), axis=0)
    return [_shaped(x, n.result.shape) for x, n in zip(_apart(mine, nodes, 1), nodes, strict=True)]


def _operand(node: Node) -> Value:
    (x,) = node.operands
    assert x is not None
    return x


def _exchange(like: Node, x: Value, **changes: int) -> Value:
    made: Value = Builder.current().emit(like.op, (x,), {**like.attributes, **changes})[0]
    return made


def _side_by_side(xs: Iterable[Value], axis: int) -> Value:
    made: Value = operation("concat")(*xs, axis=axis)
    return made


def _apart(x: Value, nodes: Sequence[Node], axis: int, *, result: bool = True) -> list[Value]:
    found, start = [], 0
    for n in nodes:
        stop = start + prod(sizes(n.result if result else _operand(n)))
        found.append(operation("slice")(x, starts=(start,), stops=(stop,), steps=(1,), axes=(axis,)))
        start = stop
    return found


def _shaped(x: Value, shape: Sequence[object]) -> Value:
    made: Value = x if tuple(shape) == x.shape else operation("reshape")(x, shape=tuple(shape))
    return made


def _moved(x: Value, source: int, to: int) -> Value:
    order = [k for k in range(x.ndim) if k != source]
    order.insert(to, source)
    made: Value = x if source == to else operation("transpose")(x, perm=tuple(order))
    return made


_TOGETHER = {all_reduce: _reduced, all_gather: _gathered, reduce_scatter: _scattered}
