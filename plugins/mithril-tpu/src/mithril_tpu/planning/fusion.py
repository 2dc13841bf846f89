"""Which values of a graph a fusing compiler keeps in memory, and until when: a model of XLA, not of one backend.

A value is *kept* where several kernels read it or where no kernel of its reader's can swallow it. Everything else is
computed inside the kernel that reads it: it takes no memory, and what it is made of lives until that kernel has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mithril.graph import Graph, Node, Value

_VIEWS = frozenset({"reshape", "squeeze", "unsqueeze", "stop_gradient", "barrier", "transpose", "broadcast_to"})
_MADE = frozenset({"constant", "full", "iota", "size_value", "eye"})  # cheaper to make again than to read
_POINTWISE = frozenset({"cast", "where", "clip", "slice", "pad", "concat", "tril", "triu"})
_REDUCTIONS = frozenset({"sum", "mean", "max", "min", "prod", "any", "all"})


@dataclass
class Kernel:
    """One kept value's node, with the nodes that are computed inside it."""

    node: Node
    inside: list[Node] = field(default_factory=list)
    reads: set[Value] = field(default_factory=set)


@dataclass
class Fused:
    """The kernels in order, and the last step at which each kept value is read; outputs live to the end."""

    graph: Graph
    kernels: list[Kernel]
    step: dict[Node, int]
    last: dict[Value, int]


def pointwise(node: Node) -> bool:
    """Whether a node's elements can be computed inside the kernel that reads them."""
    name = node.op.name
    return bool(getattr(node.op, "elementwise", False)) or name in _POINTWISE or name in _VIEWS or name in _MADE


def fuse(graph: Graph) -> Fused:
    """The kernels of a graph."""
    users, outputs = graph.users, frozenset(graph.outputs)
    step = {node: k for k, node in enumerate(graph.nodes)}
    end = len(graph.nodes)
    inner: set[Node] = set()
    last: dict[Value, int] = {}
    for node in reversed(graph.nodes):
        if _swallowed(node, users, outputs):
            inner.add(node)
        for v in node.results:
            reads = [last[user.result] if user in inner else step[user] for user in users.get(v, ())]
            last[v] = end if v in outputs else max(reads, default=step[node])
    return Fused(graph, _kernels(graph, inner), step, last)


def _swallowed(node: Node, users: dict[Value, tuple[Node, ...]], outputs: frozenset[Value]) -> bool:
    if len(node.results) != 1 or node.result in outputs:
        return False
    name, readers = node.op.name, users.get(node.result, ())
    if name in _MADE or name in _VIEWS or not readers:
        return True
    if len(readers) > 1:
        return False
    # The only reader: a product takes a pointwise operand in, a pointwise kernel takes in whatever there is.
    return pointwise(node) or pointwise(readers[0])


def _kernels(graph: Graph, inner: set[Node]) -> list[Kernel]:
    found: list[Kernel] = []
    claimed: set[Node] = set()
    producers = graph.producers
    for node in graph.nodes:
        if node in inner:
            continue
        kernel = Kernel(node)
        pending = [v for v in node.operands if v is not None]
        seen: set[Value] = set()
        while pending:
            v = pending.pop()
            if v in seen:
                continue
            seen.add(v)
            maker = producers.get(v)
            if maker is None or maker not in inner:
                kernel.reads.add(v)
                continue
            if maker not in claimed:  # its work is counted once, although several kernels may repeat it
                claimed.add(maker)
                kernel.inside.append(maker)
            pending += [o for o in maker.operands if o is not None]
        found.append(kernel)
    return found


def trips(node: Node) -> int:
    """How often the regions of a node run: the steps of a scan, once where nobody knows."""
    length = node.attributes.get("length", 1)
    return length if isinstance(length, int) else 1


def walk(node: Node, visit: Callable[[Node, int], None], times: int = 1) -> None:
    """Visit a node and all nodes of its regions, with the number of times each runs."""
    visit(node, times)
    for region in node.regions:
        for inside in region.nodes:
            walk(inside, visit, times * trips(node))
