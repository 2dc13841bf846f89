"""Fully sharded weights that stay where they are on a mesh with ``model``: their products exchange activations.

Such a weight has one axis split over ``data`` and often another over ``model``. If it is not gathered, its products
read the complete batch, split along features: a product that sums along the axis over ``data`` computes a partial sum,
any other a part of its columns. The gradient of the weight needs no exchange of its own. With few rows these are fewer
bytes than the weight in both directions and its gradient. Between two such products values stay split along features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from mithril.graph import Graph, Node, Value, axes_of, is_permutation, is_product, is_windowed_product
from mithril_parallel.mesh import DATA, Split, base, replicated
from mithril_parallel.placing.propagate import Collective, GraphSharding
from mithril_parallel.placing.rules import op_sharding, sizes


@dataclass(frozen=True)
class StationaryProduct:
    """A product that reads or computes a part of a weight: the splits of its operands and of its result."""

    operand_splits: tuple[Split | None, ...]
    result_split: Split
    sums: frozenset[str]


@dataclass
class StationaryWeights:
    """The splits of weights that are not gathered and of their gradients, and the products that read or compute them.

    ``activations`` are the splits of the values between these products, ``exchanges`` those at their borders.
    """

    splits: dict[Value, Split] = field(default_factory=dict)
    products: dict[Node, StationaryProduct] = field(default_factory=dict)
    activations: dict[Value, Split] = field(default_factory=dict)
    exchanges: list[Collective] = field(default_factory=list)


def stationary_weights(
    graph: Graph, sharding: GraphSharding, stored: Mapping[str, Split], gathered_bytes: Mapping[str, int]
) -> StationaryWeights:
    """Return the weights whose products exchange fewer bytes of activations than gathering the weight would.

    ``sharding`` is that without fsdp, ``stored`` are the splits of parameters between steps, ``gathered_bytes`` those
    that are exchanged if a parameter is gathered.
    """
    result = StationaryWeights()
    for i in graph.with_role("param"):
        split = stored.get(i.name, ())
        if DATA not in split or split == sharding.splits[i.value]:
            continue
        weight = _Weight(graph, sharding, i.value, split)
        if not weight.run():
            continue
        single = _with_exchanges(graph, sharding, StationaryWeights(weight.splits, weight.products))
        if sum(e.bytes for e in single.exchanges) < gathered_bytes[i.name]:
            result.splits.update(weight.splits)
            result.products.update(weight.products)
    return _with_exchanges(graph, sharding, result)


def _with_exchanges(graph: Graph, sharding: GraphSharding, weights: StationaryWeights) -> StationaryWeights:
    """Add the activations of the products, which element-wise operations preserve, and their exchanges."""
    exchanged: set[tuple[Value, Split]] = set()
    splits = weights.activations
    for node in graph.nodes if weights.products else ():
        product = weights.products.get(node)
        operands = [v for v in node.operands if v is not None and v not in weights.splits]
        if product is None:
            if (split := _preserved(node, operands, splits, sharding)) is not None:
                splits[node.result] = split
            continue
        for v, split in zip(node.operands, product.operand_splits, strict=True):
            if v not in operands or split is None or split == splits.get(v, sharding.splits[v]):
                continue
            root, chain = transposed_from(graph, v)
            key = root, split_before(chain, split)
            if key not in exchanged:
                exchanged.add(key)
                kind = "all-to-all" if _over_data(split) else "all-gather"
                weights.exchanges.append(Collective(kind, DATA, _bytes(v, split, sharding), node, gathered_value=v))
        if node.result not in weights.splits:
            splits[node.result] = product.result_split
            if DATA in product.sums:
                nbytes = _bytes(node.result, product.result_split, sharding)
                weights.exchanges.append(Collective("all-reduce", DATA, nbytes, node))
    return weights


def _preserved(
    node: Node, operands: list[Value], splits: Mapping[Value, Split], sharding: GraphSharding
) -> Split | None:
    """Return the split along features that a node other than such a product preserves, or None."""
    operand_splits = {splits[v] for v in operands if v in splits}
    if len(operand_splits) != 1 or len(node.results) != 1:
        return None
    if is_transpose(node):
        return op_sharding(node, list(operand_splits), sharding.mesh).result_splits[0]
    batch_values = [
        v for v in operands if v not in splits and v.shape == node.result.shape and _over_data(sharding.splits[v])
    ]
    (split,) = operand_splits
    return split if node.op.elementwise and not batch_values and len(split) == node.result.ndim else None


def _bytes(v: Value, split: Split, sharding: GraphSharding) -> int:
    return prod(sharding.mesh.local(sizes(v), split)) * v.dtype.itemsize


def transposed_from(graph: Graph, v: Value) -> tuple[Value, list[Node]]:
    """Return the value of which ``v`` is a transpose, and the transposes from it to ``v``."""
    chain: list[Node] = []
    while (node := graph.producers.get(v)) is not None and is_transpose(node) and node.operands[0] is not None:
        chain.insert(0, node)
        v = node.operands[0]
    return v, chain


def is_transpose(node: Node) -> bool:
    """Whether the result has the axes of the operand, in any order."""
    if not is_permutation(node):
        return False
    (operand,), (result,) = axes_of(node).operands, axes_of(node).results
    return operand is not None and sorted(operand) == sorted(result) and len(set(operand)) == len(operand)


def split_before(transposes: list[Node], split: Split) -> Split:
    """Return the split of the operand of transposes whose last result has this split."""
    for node in reversed(transposes):
        (operand,), (result,) = axes_of(node).operands, axes_of(node).results
        entries = dict(zip(result, split, strict=True))
        split = tuple(entries[factors] for factors in operand or ())
    return split


class _Weight:
    """The products of one weight, if all of them can work on its part."""

    def __init__(self, graph: Graph, sharding: GraphSharding, value: Value, split: Split) -> None:
        self.graph, self.sharding, self.mesh = graph, sharding, sharding.mesh
        self.value = value
        self.splits: dict[Value, Split] = {value: split}
        self.products: dict[Node, StationaryProduct] = {}

    def run(self) -> bool:
        """Return whether all readers and the gradient are products that can preserve the split."""
        return self._follow_readers() and self._follow_gradient()

    def _follow_readers(self) -> bool:
        pending = [self.value]
        while pending:
            v = pending.pop()
            for node in self.graph.users.get(v, ()):
                if node.tags.get("phase") == "update":
                    continue
                if is_transpose(node):
                    self.splits[node.result] = op_sharding(node, [self.splits[v]], self.mesh).result_splits[0]
                    pending.append(node.result)
                elif not self._add(node, v):
                    return False
        return bool(self.products)

    def _follow_gradient(self) -> bool:
        name = self.graph.input_of[self.value].name
        for result in self.graph.results:
            if result.role != "gradient" or result.of != name:
                continue
            root, chain = transposed_from(self.graph, result.value)
            values = [root, *(node.result for node in chain)]
            self.splits |= {v: split_before(chain[k:], self.splits[self.value]) for k, v in enumerate(values)}
            producer = self.graph.producers.get(root)
            if producer is None or not self._add(producer, root):
                return False
        return True

    def _add(self, node: Node, part: Value) -> bool:
        """Add a product that reads or computes ``part``; return whether it preserves the split."""
        if not is_product(node) or is_windowed_product(node) or node.op.composite or node in self.products:
            return False
        axes = axes_of(node)
        values = dict(zip(node.operands, axes.operands, strict=True)) | dict(
            zip(node.results, axes.results, strict=True)
        )
        cut = [f for f, entry in zip(values[part] or (), self.splits[part], strict=True) if entry == DATA]
        factor = next((f for f in cut[0] if axes.sizes[f] != 1), None) if len(cut) == 1 else None
        if factor is None:
            return False
        splits = [
            None if v is None else self.splits[v] if v is part else self._required(v, factors or (), factor)
            for v, factors in zip(node.operands, axes.operands, strict=True)
        ]
        node_sharding = op_sharding(node, splits, self.mesh)
        if list(node_sharding.operand_splits) != splits or (
            part is node.result and node_sharding.result_splits[0] != self.splits[part]
        ):
            return False
        self.products[node] = StationaryProduct(
            node_sharding.operand_splits, node_sharding.result_splits[0], node_sharding.sums
        )
        return True

    def _required(self, v: Value, axes: tuple[tuple[str, ...], ...], factor: str) -> Split:
        """Return the split of the other operand: the factor over ``data`` instead of the batch."""
        normal = self.sharding.splits.get(v) or replicated(v.ndim)
        return tuple(
            DATA if factor in factors else None if entry is not None and base(entry) == DATA else entry
            for factors, entry in zip(axes, normal, strict=True)
        )


def _over_data(split: Split) -> bool:
    return any(entry is not None and base(entry) == DATA for entry in split)
