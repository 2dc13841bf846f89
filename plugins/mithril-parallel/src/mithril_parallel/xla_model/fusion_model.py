"""Which values of a graph a fusing compiler materializes, and their lifetimes: a model of XLA, not of one backend.

A value is materialized if several kernels read it or if it cannot be fused into the kernel of its consumer. All other
values are computed inside the kernel that reads them: they take no memory, and their operands stay live until that
kernel has run. A cheap value whose operands are live anyway is recomputed by each consumer. So is an expensive value
read by products on a TPU, which compute their operands inside their own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from mithril import ops
from mithril.graph import (
    Graph,
    Node,
    Value,
    axes_of,
    is_expensive,
    is_fold,
    is_layout,
    is_product,
    is_source,
    is_unchanged,
)
from mithril_parallel.placing.rules import sizes
from mithril_parallel.xla_model.convolutions import is_kernel_gradient, is_pool

SLOW = frozenset({ops.sin, ops.cos, ops.tan})  # a TPU has no instruction for them: never computed again
_OFTEN = 2  # products that recompute a value; for more of them (queries, keys, values) it is materialized


@dataclass
class Kernel:
    """The node of a materialized value, with the nodes fused into it."""

    node: Node
    fused: list[Node] = field(default_factory=list)
    reads: set[Value] = field(default_factory=set)


@dataclass
class FusedGraph:
    """The kernels in order, and the last step at which each materialized value is read; outputs live to the end."""

    graph: Graph
    kernels: list[Kernel]
    step: dict[Node, int]
    last: dict[Value, int]
    upcast: frozenset[Value]  # 16-bit values that are stored in 32 bits, like the arithmetic around them
    strips: frozenset[Value]  # images that are cut into strips


def pointwise(node: Node) -> bool:
    """Whether a node's elements can be computed inside the kernel that reads them."""
    if node.op.elementwise or is_unchanged(node) or is_source(node):
        return True
    # slices, pads and concatenations, but not sorts or gathers
    return node.op.moves and not node.op.cost and not axes_of(node).lookups


def fuse(graph: Graph, *, tpu: bool, strips: frozenset[Value] = frozenset()) -> FusedGraph:
    """Group the nodes of a graph into kernels, on a TPU or elsewhere.

    Images in ``strips`` are not fused into convolutions, since their margins have to be written; and gradients of
    kernels are computed after all others.
    """
    graph = _simplified(graph)
    users, outputs = graph.users, frozenset(graph.outputs)
    step = {node: k for k, node in enumerate(graph.nodes)}
    end = len(graph.nodes)
    inner: set[Node] = set()
    kernel_of: dict[Node, Node | None] = {}  # the only kernel that computes a node; None if several do
    product_kernels: set[Node] = set()  # those that compute a product, with pointwise nodes before and after it
    last: dict[Value, int] = {}
    # From last to first: whether a value is stored depends on the kernels of its readers.
    for node in reversed(graph.nodes):
        for v in node.results:
            readers = users.get(v, ())
            reads = [last[user.result] if user in inner else step[user] for user in readers]
            waits = v in strips and any(is_kernel_gradient(user) for user in readers)
            last[v] = end if v in outputs or waits else max(reads, default=step[node])
        kernel_of[node] = node
        if _is_fused(node, users, outputs, kernel_of, strips) or _should_recompute(
            node, graph, outputs, last, inner, step, tpu, strips, product_kernels
        ):
            inner.add(node)
            consumers = {kernel_of[user] for v in node.results for user in users.get(v, ())}
            kernel_of[node] = consumers.pop() if len(consumers) == 1 else None
        kernel = kernel_of[node]
        if is_product(node) and kernel is not None:
            product_kernels.add(kernel)
    kernels = _kernels(graph, inner)
    upcast = {
        k.node.result
        for k in kernels
        if pointwise(k.node)
        and k.node.result not in outputs
        and k.node.result.dtype.is_float
        and k.node.result.dtype.bits == 16
        and not any(is_product(r) for r in _through_views(k.node.result, users))
    }
    return FusedGraph(graph, kernels, step, last, frozenset(upcast), strips)


def _simplified(graph: Graph) -> Graph:
    """Return the graph as XLA simplifies it.

    ``maximum(x, c) > c`` is ``x > c``: a ReLU's operand stays live. A concatenation of concatenations reads their
    operands: each part stays live until the last of them.
    """
    producers = graph.producers
    replaced: dict[Value, Node] = {}

    def simplified(node: Node) -> Node:
        if node.op is ops.concat:
            parts = [_parts_of(v, node, replaced) for v in node.operands]
            node = node.replaced(operands=tuple(v for values in parts for v in values))
            replaced[node.result] = node
            return node
        if node.op is not ops.greater:
            return node
        inner = producers.get(node.operands[0]) if node.operands[0] is not None else None
        if inner is None or inner.op is not ops.maximum or node.operands[1] not in inner.operands:
            return node
        x = next(v for v in inner.operands if v is not node.operands[1])
        return node.replaced(operands=(x, node.operands[1]))

    return graph.replaced(nodes=tuple(simplified(node) for node in graph.nodes))


def _parts_of(v: Value | None, node: Node, concatenations: Mapping[Value, Node]) -> tuple[Value | None, ...]:
    """Return the operands of the concatenation along the same axis that computes ``v``, or ``v`` itself."""
    inner = concatenations.get(v) if v is not None else None
    return inner.operands if inner is not None and inner.attributes == node.attributes else (v,)


def _is_fused(
    node: Node,
    users: Mapping[Value, tuple[Node, ...]],
    outputs: frozenset[Value],
    kernel_of: Mapping[Node, Node | None],
    strips: frozenset[Value],
) -> bool:
    if len(node.results) != 1 or node.result in outputs:
        return False
    if is_source(node) or is_layout(node):
        return True
    readers = users.get(node.result, ())
    if len(readers) != 1:
        return not readers
    (reader,) = readers
    if is_product(reader):
        return pointwise(node) and node.result not in strips
    if pointwise(node):
        return True
    if is_product(node):  # fused into a pointwise consumer, unless that is fused into another product
        kernel = kernel_of[reader]
        return pointwise(reader) and kernel is not None and not is_product(kernel)
    return pointwise(reader)


def _should_recompute(
    node: Node,
    graph: Graph,
    outputs: frozenset[Value],
    last: Mapping[Value, int],
    inner: set[Node],
    step: Mapping[Node, int],
    tpu: bool,
    strips: frozenset[Value],
    product_kernels: set[Node],
) -> bool:
    """Whether XLA recomputes a value in each consumer instead of materializing it: cheap, and no memory is added."""
    if len(node.results) != 1 or node.result in outputs or not pointwise(node):
        return False
    v = node.result
    readers = graph.users.get(v, ())
    products = sum(1 for r in _through_views(v, graph.users) if is_product(r))
    into_products = tpu and v not in strips and products <= _OFTEN
    if any(r.op is ops.concat for r in readers):  # it is read from where it is stored
        return False
    can_recompute = all(
        pointwise(r)
        or is_fold(r)
        or (into_products and is_product(r))
        or (tpu and is_pool(r) and _reads_product(node, graph))
        for r in readers
    )
    # A value that the next kernel reads lives no longer if it is stored.
    if not can_recompute or last[v] - step[node] < 2:
        return False
    pending, chain, extended_bytes = [node], {node}, 0
    # Several arrays, or several shifted copies of one: each element comes from as many places.
    joins_parts = False
    shifted: dict[Value, Node] = {}
    while pending:
        current = pending.pop()
        if current.op in SLOW:
            return False
        joins_parts = joins_parts or (current.op is ops.concat and len(current.operands) > 1)
        if is_expensive(current) and not products and not (tpu and _only_in(product_kernels, v, graph, inner)):
            return False
        for o in current.operands:
            # Inputs are alive in any case, and a smaller operand is cheaper to keep than the value.
            if o is None or o in graph.input_of or prod(sizes(o)) < prod(sizes(v)):
                continue
            producer = graph.producers[o]
            if producer.op in (ops.slice, ops.pad) and (source := producer.operands[0]) is not None:
                joins_parts = joins_parts or shifted.setdefault(source, producer) is not producer
            other_readers = [r for r in graph.users[o] if r not in chain]
            # Another reader keeps this operand alive as long as the value is needed: recomputing adds
            # nothing.
            if max((last[r.result] if r in inner else step[r] for r in other_readers), default=-1) >= last[v]:
                continue
            if is_expensive(producer) and other_readers and not products:
                # It is stored for the other readers in any case.
                extended_bytes += _bytes(o)
                if extended_bytes > _bytes(v):
                    return False
                continue
            if not pointwise(producer):
                # This operand stays live instead, for instance the bfloat16 operand of an upcast. For equal sizes
                # the result of a convolution is materialized, not its normalization.
                extended_bytes += _bytes(o)
                if extended_bytes > _bytes(v) or (extended_bytes == _bytes(v) and producer.op is not ops.conv):
                    return False
                continue
            chain.add(producer)
            pending.append(producer)
    return not joins_parts or all(is_product(r) for r in readers)


def _reads_product(node: Node, graph: Graph) -> bool:
    """Whether a node reads a stored product: its result, with the operations that it alone feeds.

    A pool computes such a node for each window; it does not repeat a normalization that often.
    """
    v = node.operands[0]
    while v is not None and (producer := graph.producers.get(v)) is not None:
        if is_product(producer):
            return True
        v = producer.operands[0] if pointwise(producer) and producer.operands else None
        if v is not None and len(graph.users[v]) > 1:
            return False
    return False


def _only_in(kernels: set[Node], v: Value, graph: Graph, inner: set[Node]) -> bool:
    """Whether a value is read in these kernels only, if it is computed where it is read.

    A sum of the same values, such as the gradient of a bias, is a kernel of its own here: XLA makes it a second result
    of a product in some programs only, and stores the value in the others.
    """
    pending = [v]
    while pending:
        for reader in graph.users.get(pending.pop(), ()):
            if reader in inner:
                pending += reader.results
            elif reader not in kernels:
                return False
    return True


def _bytes(v: Value) -> int:
    return prod(sizes(v)) * v.dtype.itemsize


def _through_views(v: Value, users: Mapping[Value, tuple[Node, ...]]) -> Iterator[Node]:
    """Yield the nodes that read a value or a view of it."""
    pending = list(users.get(v, ()))
    while pending:
        node = pending.pop()
        if is_layout(node):
            pending += users.get(node.result, ())
        else:
            yield node


def _kernels(graph: Graph, inner: set[Node]) -> list[Kernel]:
    kernels: list[Kernel] = []
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
            producer = producers.get(v)
            if producer is None or producer not in inner:
                kernel.reads.add(v)
                continue
            if producer not in claimed:  # work is counted once, although several kernels may repeat it
                claimed.add(producer)
                kernel.fused.append(producer)
            pending += [o for o in producer.operands if o is not None]
        kernels.append(kernel)
    return kernels


def trip_count(node: Node) -> int:
    """Return the trip count of a node's regions: the length of a scan, otherwise 1."""
    length = node.attributes.get("length", 1)
    return length if isinstance(length, int) else 1


def walk(node: Node, visit: Callable[[Node, int], None], times: int = 1) -> None:
    """Visit a node and all nodes of its regions, with the number of times each runs."""
    visit(node, times)
    for region in node.regions:
        for inner in region.nodes:
            walk(inner, visit, times * trip_count(node))
