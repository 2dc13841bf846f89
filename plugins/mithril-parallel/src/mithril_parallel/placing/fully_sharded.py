"""Fully sharded programs: where parameters are gathered, and where activations are exchanged instead.

A pair of weights with a wide value in between, split as in Megatron, can stay in parts: the batch is gathered before
the first product, and the result of the second is summed over the devices and scattered. With few rows these are fewer
bytes than the weights in both directions and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from mithril.graph import Graph, Input, Node, Value
from mithril_parallel.mesh import DATA, MODEL, Mesh, Split, base, replicated
from mithril_parallel.placing.propagate import Collective, GraphSharding, propagate
from mithril_parallel.placing.rules import sizes
from mithril_parallel.placing.stationary import StationaryWeights, stationary_weights
from mithril_parallel.placing.strategy import choose


def propagate_fully_sharded(
    graph: Graph, mesh: Mesh, splits: Mapping[str, Split], stored: Mapping[str, Split], *, reshard: bool
) -> GraphSharding:
    """Propagate the splits without fsdp, and add the gathers of parameters that are stored in more parts.

    A parameter is gathered at its first use and, with ``reshard``, at each use in the backward pass. Pairs of weights
    for which it is cheaper stay in parts: their values are split along features over ``data``.
    """
    sharding = propagate(graph, mesh, splits)
    pairs = pairs_in_parts(graph, mesh, splits, stored, reshard=reshard)
    weights = weights_in_place(graph, sharding, stored, reshard=reshard)
    in_parts = pairs.splits | weights.splits
    local = {graph.producers.get(v) for v, axis in sharding.summed if axis == DATA and v in in_parts}
    exchanges = [e for e in sharding.exchanges if e.axis != DATA or e.node not in local]
    sharding.exchanges = exchanges + pairs.exchanges + weights.exchanges
    sharding.summed = {(v, axis) for v, axis in sharding.summed if axis != DATA or v not in in_parts}
    sharding.splits.update({**weights.activations, **in_parts})
    for i in graph.with_role("param"):
        parts = stored.get(i.name, sharding.splits[i.value])
        if parts == sharding.splits[i.value]:
            continue
        nbytes = sharding.bytes(i.value)
        sharding.stored[i.value] = parts
        for node in gathering_nodes(graph, i.value, reshard=reshard):
            sharding.exchanges.append(Collective("all-gather", DATA, nbytes, node, gathered_value=i.value))
    return sharding


def weights_in_place(
    graph: Graph, sharding: GraphSharding, stored: Mapping[str, Split], *, reshard: bool
) -> StationaryWeights:
    """Return the weights of a mesh with ``model`` that are not gathered; ``sharding`` is that without fsdp."""
    mesh = sharding.mesh
    if mesh.size(DATA) == 1 or mesh.devices == mesh.size(DATA):
        return StationaryWeights()
    parts = {i.name: mesh.local(sizes(i.value), sharding.splits[i.value]) for i in graph.with_role("param")}
    gathered_bytes = {
        i.name: prod(parts[i.name]) * i.value.dtype.itemsize * _exchange_count(graph, i.value, reshard)
        for i in graph.with_role("param")
    }
    return stationary_weights(graph, sharding, stored, gathered_bytes)


def gathering_nodes(graph: Graph, parameter: Value, *, reshard: bool) -> list[Node]:
    """Return the nodes before which a fully sharded parameter is gathered; its update works on the parts."""
    readers = [n for n in graph.users.get(parameter, ()) if not is_update(n)]
    again = [n for n in readers if reshard and n.tags.get("phase") == "backward"]
    return [n for n in readers if n not in again][:1] + again


def is_update(node: Node) -> bool:
    """Whether a node updates parameters or the values of an optimizer, element by element."""
    return node.tags.get("phase") == "update"


@dataclass
class PairsInParts:
    """The parameters that are not gathered, the splits of their values, and the exchanges of activations."""

    splits: dict[Value, Split] = field(default_factory=dict)
    exchanges: list[Collective] = field(default_factory=list)


def pairs_in_parts(
    graph: Graph, mesh: Mesh, splits: Mapping[str, Split], stored: Mapping[str, Split], *, reshard: bool
) -> PairsInParts:
    """Return the pairs of weights whose activations are cheaper to exchange than the weights.

    ``splits`` are those of the arguments without fsdp, ``stored`` those of the parameters between steps, which do not
    change: pairs that would have to be stored otherwise are gathered.
    """
    if mesh.size(DATA) == 1 or mesh.devices > mesh.size(DATA):
        return PairsInParts()
    # An axis of the same devices under a second name: values split along features, and those split along the batch.
    aliased = Mesh({DATA: mesh.size(DATA), MODEL: mesh.size(DATA)})
    weights = choose(graph, Mesh({MODEL: mesh.size(DATA)})).splits
    weights = {i.name: weights[i.name] for i in graph.with_role("param") if MODEL in weights.get(i.name, ())}
    if not weights:
        return PairsInParts()
    groups = _Groups(graph, propagate(graph, aliased, {**splits, **weights}))
    cheaper = {
        i.name: weights[i.name]
        for group in groups.members()
        if all(_over_data(weights[i.name]) == stored.get(i.name) for i in group.parameters)
        and sum(e.bytes for e in group.exchanges)
        < sum(_gathered_bytes(graph, i.value, reshard) for i in group.parameters)
        for i in group.parameters
    }
    if not cheaper:
        return PairsInParts()
    groups = _Groups(graph, propagate(graph, aliased, {**splits, **cheaper}))
    by_features = {v: _over_data(split) for v, split in groups.sharding.splits.items() if MODEL in map(_axis, split)}
    return PairsInParts(by_features, [e for group in groups.members() for e in group.exchanges])


def _axis(entry: str | None) -> str | None:
    return entry and base(entry)


def _over_data(split: Split) -> Split:
    """Return a split along the batch and features as one along features only, over the same devices."""
    return tuple(DATA + entry.removeprefix(MODEL) if _axis(entry) == MODEL else None for entry in map(str, split))


def _bytes(v: Value) -> int:
    return prod(sizes(v)) * v.dtype.itemsize


def _gathered_bytes(graph: Graph, parameter: Value, reshard: bool) -> int:
    """Return the bytes that are exchanged if a parameter is gathered and its gradient scattered."""
    return _bytes(parameter) * _exchange_count(graph, parameter, reshard)


def _exchange_count(graph: Graph, parameter: Value, reshard: bool) -> int:
    """Return how often a parameter is gathered, plus one if its gradient is scattered."""
    trains = any(n.tags.get("phase") == "backward" for n in graph.nodes)
    return len(gathering_nodes(graph, parameter, reshard=reshard)) + trains


@dataclass
class _Group:
    """Parameters whose values are split along features together, and the exchanges at the borders of these values."""

    parameters: list[Input] = field(default_factory=list)
    exchanges: list[Collective] = field(default_factory=list)


class _Groups:
    """The values that are split along ``MODEL``, in groups that are connected by the nodes that read them."""

    def __init__(self, graph: Graph, sharding: GraphSharding) -> None:
        self.graph, self.sharding = graph, sharding
        self.parents: dict[Value, Value] = {}
        self.nodes = [(n, values) for n in graph.nodes if not is_update(n) and (values := self._split_values(n))]
        for _, values in self.nodes:
            for v in values[1:]:
                if (root := self._root(v)) != (first := self._root(values[0])):
                    self.parents[root] = first

    def members(self) -> Iterator[_Group]:
        """Yield the groups that end in sums, not in a value that another split would have to replace."""
        groups: dict[Value, _Group] = {}
        for i in self.graph.with_role("param"):
            if self._is_split(i.value):
                groups.setdefault(self._root(i.value), _Group()).parameters.append(i)
        ends = {r.value for r in self.graph.results if r.role not in ("gradient", "state") and self._is_split(r.value)}
        rejected = {self._root(v) for v in ends}
        seen: set[tuple[Value, Value]] = set()
        for node, values in self.nodes:
            root = self._root(values[0])
            if self._loses_split(node):
                rejected.add(root)
            if root in groups:
                groups[root].exchanges += self._entering(node, root, seen)
                groups[root].exchanges += self._leaving(node)
        yield from (group for root, group in groups.items() if root not in rejected)

    def _split_values(self, node: Node) -> list[Value]:
        return [v for v in (*node.operands, *node.results) if v is not None and self._is_split(v)]

    def _is_split(self, v: Value) -> bool:
        return MODEL in map(_axis, self.sharding.splits.get(v) or ())

    def _root(self, v: Value) -> Value:
        while v in self.parents:
            v = self.parents[v]
        return v

    def _loses_split(self, node: Node) -> bool:
        needs = self.sharding.operand_splits.get(node, (None,) * len(node.operands))
        return any(
            v is not None and self._is_split(v) and MODEL not in map(_axis, need or replicated(v.ndim))
            for v, need in zip(node.operands, needs, strict=True)
        )

    def _entering(self, node: Node, root: Value, seen: set[tuple[Value, Value]]) -> Iterator[Collective]:
        """Yield the gathers of operands that are split along the batch, one for each value."""
        for v in node.operands:
            if v is None or self._is_split(v) or DATA not in map(_axis, self.sharding.splits[v]):
                continue
            key = root, self.sharding.roots.get(v, v)
            if key not in seen:
                seen.add(key)
                yield Collective("all-gather", DATA, _bytes(v), node, gathered_value=v)

    def _leaving(self, node: Node) -> Iterator[Collective]:
        """Yield the exchanges that sum a result over the devices and leave each its rows."""
        if MODEL in self.sharding.op_sharding(node).sums:
            for v in node.results:
                yield Collective("reduce-scatter", DATA, _bytes(v), node)
