"""Sharding propagation: the split of every value of a graph from those of its inputs, and the implied collectives.

A pending sum is delayed through operations that are linear in it: two partial values are added before they are
reduced over devices, not after, which halves the traffic. The first non-linear consumer triggers the reduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from mithril.graph import Graph, Node, Value, axes_of, is_addition, is_permutation, is_source
from mithril.ops import scan_op
from mithril_parallel.mesh import Mesh, Split, replicated
from mithril_parallel.placing.rules import OpSharding, broadcast_split, op_sharding, sizes

_FAR = 100  # length of the longest path, in operations, after which XLA gathers a value again


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective. ``bytes`` is the size of its result on one device, ``times`` its trip count in a loop.

    ``gathered_value`` is the operand of an all-gather.
    """

    kind: str
    axis: str
    bytes: int
    node: Node
    times: int = 1
    gathered_value: Value | None = None


@dataclass
class GraphSharding:
    """The splits of all values of a graph on a mesh, and the collectives between them."""

    mesh: Mesh
    splits: dict[Value, Split] = field(default_factory=dict)
    exchanges: list[Collective] = field(default_factory=list)
    pending: dict[Value, frozenset[str]] = field(default_factory=dict)  # mesh axes over which a value is a partial sum
    summed: set[tuple[Value, str]] = field(default_factory=set)  # values reduced by an all-reduce, with its mesh axis
    reshard_depths: dict[tuple[Value, Split], int] = field(default_factory=dict)  # depth of the last resharding
    roots: dict[Value, Value] = field(default_factory=dict)  # sources of transposed and reshaped values
    gather_depths: dict[tuple[Value, str], int] = field(default_factory=dict)  # depth of the last all-gather
    depths: dict[Value, int] = field(default_factory=dict)  # length of the longest path to a value, in operations
    operand_splits: dict[Node, tuple[Split | None, ...]] = field(default_factory=dict)
    op_shardings: dict[Node, tuple[tuple[Split | None, ...], OpSharding]] = field(default_factory=dict)
    stored: dict[Value, Split] = field(default_factory=dict)  # fsdp: parameters between their gathers

    def op_sharding(self, node: Node) -> OpSharding:
        """Return the sharding of a node for its operands' current splits; unknown operands count as replicated."""
        operand_splits = tuple(None if v is None else self.splits.get(v) or replicated(v.ndim) for v in node.operands)
        cached = self.op_shardings.get(node)
        if cached is None or cached[0] != operand_splits:
            cached = self.op_shardings[node] = operand_splits, op_sharding(node, operand_splits, self.mesh)
        return cached[1]

    def local(self, v: Value) -> tuple[int, ...]:
        """Return the shape of one device's part of a value."""
        return self.mesh.local(sizes(v), self.stored.get(v) or self.splits.get(v) or replicated(v.ndim))

    def bytes(self, v: Value) -> int:
        """Return the bytes of one device's part of a value."""
        return prod(self.local(v)) * v.dtype.itemsize


def propagate(graph: Graph, mesh: Mesh, input_splits: Mapping[str, Split], carries: int = 0) -> GraphSharding:
    """Propagate splits through the graph in one pass; inputs without an entry in ``input_splits`` are replicated.

    With ``carries`` the graph is a loop body whose first outputs are its first inputs in the next iteration.
    """
    sharding = GraphSharding(mesh)
    for i in graph.inputs:
        sharding.splits[i.value] = input_splits.get(i.name, replicated(i.value.ndim))
    readers = _count_readers(graph)
    sums = {node for v in _accumulated_carries(graph, carries) if (node := graph.producers.get(v)) is not None}
    for node in graph.nodes:
        propagate_node(sharding, node, readers, accumulates=node in sums)
    accumulated = _accumulated_carries(graph, carries)
    for v in graph.outputs:
        if v not in accumulated:
            _reduce_pending(sharding, v, graph.producers.get(v))
    _propagate_backward(sharding, graph)
    return sharding


def _propagate_backward(sharding: GraphSharding, graph: Graph) -> None:
    """Shard values further, the way all their consumers require.

    These are values that no input splits (random numbers of dropout), and complete sums of partial results that are
    combined with values split over the same axis.
    """
    requests: dict[Value, set[Split]] = {v: {sharding.splits[v]} for v in graph.outputs}
    for node in reversed(graph.nodes):
        operand_splits = sharding.operand_splits.get(
            node, tuple(None if v is None else sharding.splits[v] for v in node.operands)
        )
        if _can_compute_any_part(node) and len(node.results) == 1:
            requested = requests.get(node.result, set())
            if len(requested) == 1 and _refines(split := next(iter(requested)), sharding.splits[node.result]):
                sharding.splits[node.result] = split
                shape = sizes(node.result)
                operand_splits = tuple(
                    None if v is None else broadcast_split(sizes(v), split, shape) for v in node.operands
                )
                if node.op.random:
                    operand_splits = (None,) * len(node.operands)
                sharding.operand_splits[node] = operand_splits
        for v, need in zip(node.operands, operand_splits, strict=True):
            if v is not None:
                requests.setdefault(v, set()).add(need or replicated(v.ndim))


def _refines(split: Split, current: Split) -> bool:
    """Whether a split divides further axes than the current one, and does not change the others."""
    return split != current and all(old in (None, new) for old, new in zip(current, split, strict=True))


def _can_compute_any_part(node: Node) -> bool:
    """Whether any part of a result can be computed separately: a source, random numbers, or an element-wise result."""
    if is_source(node) or node.op.random or node.op.elementwise:
        return True
    axes = axes_of(node) if not node.regions else None
    return axes is not None and not axes.roles and all(f.startswith("...") for f in axes.sizes)


def _accumulated_carries(graph: Graph, carries: int) -> set[Value]:
    """Return the carries that the body only adds to: their reduction can be delayed until the loop has ended."""
    out = set()
    for entering, leaving in zip(graph.inputs[:carries], graph.outputs[:carries], strict=True):
        node = graph.producers.get(leaving)
        if node is not None and is_addition(node) and graph.users.get(entering.value) == (node,):
            out.add(leaving)
    return out


def _count_readers(graph: Graph) -> dict[Value, int]:
    """Return the number of consumers of each value; being an output counts as one more."""
    counts = {v: len(nodes) for v, nodes in graph.users.items()}
    for v in graph.outputs:
        counts[v] = counts.get(v, 0) + 1
    return counts


def propagate_node(
    sharding: GraphSharding, node: Node, readers: Mapping[Value, int] | None = None, *, accumulates: bool = False
) -> None:
    """Compute the splits of a node's results; an operand already resharded for an earlier consumer is reused."""
    depth = 1 + max((sharding.depths.get(v, 0) for v in node.operands if v is not None), default=0)
    sharding.depths.update(dict.fromkeys(node.results, depth))
    if node.op is scan_op:
        _propagate_scan(sharding, node)
        return
    current_splits = [None if v is None else sharding.splits[v] for v in node.operands]
    node_sharding = sharding.op_sharding(node)
    sharding.operand_splits[node] = node_sharding.operand_splits
    delayed = _delayed_sums(sharding, node, node_sharding, readers or {}, accumulates)
    if not delayed:
        for v in node.operands:
            if v is not None:
                _reduce_pending(sharding, v, node)
    for v, split, need in zip(node.operands, current_splits, node_sharding.operand_splits, strict=True):
        if v is None or split is None or need is None:
            continue
        if depth - sharding.reshard_depths.get((v, need), -_FAR - 1) > _FAR:
            _reshard(sharding, node, v, split, need)
            sharding.reshard_depths[v, need] = depth
    if is_permutation(node) and node.operands[0] is not None:
        sharding.roots[node.result] = sharding.roots.get(node.operands[0], node.operands[0])
    for v, split in zip(node.results, node_sharding.result_splits, strict=True):
        sharding.splits[v] = split
        sums = frozenset(axis for axis in node_sharding.sums if sharding.mesh.size(axis) > 1) | delayed
        if sums:
            sharding.pending[v] = sums
            if node_sharding.at_once:
                _reduce_pending(sharding, v, node)


def _delayed_sums(
    sharding: GraphSharding, node: Node, node_sharding: OpSharding, readers: Mapping[Value, int], accumulates: bool
) -> frozenset[str]:
    """Return the mesh axes of the operands' pending sums that can be delayed until after the node."""
    operands = [v for v in node.operands if v is not None]
    if accumulates:
        operands = [v for v in operands if v in sharding.pending] or operands
    sums = [sharding.pending.get(v, frozenset()) for v in operands]
    if not sums or not sums[0] or any(s != sums[0] for s in sums) or any(readers.get(v, 2) > 1 for v in operands):
        return frozenset()
    adds = is_addition(node) and len({v.type for v in operands}) == 1
    return sums[0] if (adds or is_permutation(node)) and not node_sharding.sums else frozenset()


def _reduce_pending(sharding: GraphSharding, v: Value, node: Node | None) -> None:
    """Reduce a partial value over its pending mesh axes."""
    for axis in sorted(sharding.pending.pop(v, frozenset())):
        if node is not None:
            # XLA upcasts 16-bit floats to 32 bits for reductions over devices.
            size = sharding.bytes(v) * (2 if v.dtype.is_float and v.dtype.bits == 16 else 1)
            sharding.exchanges.append(Collective("all-reduce", axis, size, node))
            sharding.summed.add((v, axis))


def _reshard(sharding: GraphSharding, node: Node, v: Value, current: Split, target: Split) -> None:
    """Record the collectives of a resharding: dropping a split is an all-gather, adding one is a local slice.

    A value and its transpose are gathered once, unless a consumer is much further down the graph.
    """
    mesh = sharding.mesh
    for k, axis in enumerate(current):
        if axis is None or target[k] == axis or mesh.size(axis) == 1:
            continue
        kind = "all-to-all" if axis in target else "all-gather"
        root = sharding.roots.get(v, v)
        if kind == "all-gather":
            depth = sharding.depths[node.results[0]]
            if depth - sharding.gather_depths.get((root, axis), -_FAR - 1) <= _FAR:
                continue
            sharding.gather_depths[root, axis] = depth
        size = prod(mesh.local(sizes(v), target)) * v.dtype.itemsize
        sharding.exchanges.append(
            Collective(kind, axis, size, node, gathered_value=v if kind == "all-gather" else None)
        )


# -- loops ----------------------------------------------------------------------------------------------------------
def _propagate_scan(sharding: GraphSharding, node: Node) -> None:
    """Propagate through a loop: carries have the splits of the body's outputs, sequences all but the step axis."""
    body = node.regions[0]
    carries, sequences = node.attributes["carries"], node.attributes["sequences"]
    operand_splits = [sharding.splits[v] if v is not None else () for v in node.operands]
    for v in node.operands:
        if v is not None:
            _reduce_pending(sharding, v, node)
    entering = [
        *operand_splits[:carries],
        *(split[1:] for split in operand_splits[carries : carries + sequences]),
        *operand_splits[carries + sequences :],
    ]
    inner = sharding
    for _ in range(2):  # initial zeros are replicated, the carries of later iterations split
        names = {i.name: split for i, split in zip(body.inputs, entering, strict=True)}
        inner = propagate(body, sharding.mesh, names, carries)
        entering[:carries] = [inner.splits[v] for v in body.outputs[:carries]]
    length = node.attributes.get("length", 1)
    times = length if isinstance(length, int) else 1
    sharding.exchanges += [Collective(e.kind, e.axis, e.bytes, e.node, e.times * times) for e in inner.exchanges]
    sharding.splits.update(inner.splits)
    leaving = [inner.splits[v] for v in body.outputs]
    for k, v in enumerate(node.results):
        if k < carries and body.outputs[k] in inner.pending:
            sharding.pending[v] = inner.pending[body.outputs[k]]
        sharding.splits[v] = leaving[k] if k < carries else (None, *leaving[k])
