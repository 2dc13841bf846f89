"""Sharding constraints for compilers that partition a whole graph: the splits of values are written into the graph.

Without them such a compiler knows the splits of the arguments only and decides the rest by itself. With parameters
split over ``data`` (fsdp) XLA moves that split into the activations, which takes more memory and more traffic than
no fsdp at all. The constraints are those of ``propagate``, for products, reductions and lookups; element-wise values
stay free, so that the compiler can fuse them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril.graph import Graph, Node, Op, Value, axes_of, is_product, operation
from mithril_parallel.mesh import BLOCKS, DATA, Mesh, Split, replicated
from mithril_parallel.placing.fully_sharded import is_update, pairs_in_parts, weights_in_place
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.stationary import split_before, transposed_from
from mithril_parallel.sharding.collectives import constrain, split_text


def constrained(
    graph: Graph,
    axes: Mapping[str, int],
    splits: Mapping[str, Split],
    stored: Mapping[str, Split],
    *,
    reshard: bool = True,
    over: str = DATA,
) -> Graph:
    """Return the graph with the splits of products, reductions, lookups and parameters as operations.

    ``splits`` are those of the arguments without fsdp: a parameter that is ``stored`` in more parts is gathered where
    it is first read. With ``reshard`` the backward pass gathers it again, so that it need not be stored in between.
    Pairs of weights whose activations are smaller stay in parts. Updates of parameters work on the parts. In the
    constraints ``data`` is called ``over``.
    """
    return _Constraints(graph, Mesh(axes), splits, stored, reshard, over).run()


class _Constraints:
    """One pass over the nodes of a graph."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        splits: Mapping[str, Split],
        stored: Mapping[str, Split],
        reshard: bool,
        over: str,
    ) -> None:
        self.graph, self.reshard, self.over = graph, reshard, over
        pairs = pairs_in_parts(graph, mesh, splits, stored, reshard=reshard)
        sharding = propagate(graph, mesh, splits)
        weights = weights_in_place(graph, sharding, stored, reshard=reshard)
        results = {n.result: product.result_split for n, product in weights.products.items()}
        self.splits = {**sharding.splits, **pairs.splits, **results, **weights.splits}
        self.in_parts = set(pairs.splits)
        self.products = weights.products  # of weights that stay in place
        self.in_place = set(weights.splits)
        self.exchanged: dict[tuple[Value, Split], Value] = {}  # operands of these products, split as they require
        self.full_operands: dict[Value, Value] = {}  # values split along the batch, for products with weights in parts
        self.parameters = {i.value for i in graph.with_role("param") if i.value not in pairs.splits | weights.splits}
        self.replacements: dict[Value, Value] = {}
        self.nodes: list[Node] = []

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._add(node)
            if _is_free(node) or is_update(node):
                continue
            for v in node.results:
                if any(self.splits[v]) and not any(axis is not None and BLOCKS in axis for axis in self.splits[v]):
                    self.replacements[v] = self._constrain(v, v, node)
        return self.graph.replaced(nodes=tuple(self.nodes))

    def _add(self, node: Node) -> None:
        if node in self.products:
            required = zip(node.operands, self.products[node].operand_splits, strict=True)
            operands = tuple(None if v is None else self._exchange(v, split, node) for v, split in required)
            self.nodes.append(node.replaced(operands=operands))
            return
        operands = tuple(None if v is None else self._operand(v, node) for v in node.operands)
        self.nodes.append(node if operands == node.operands else node.replaced(operands=operands))

    def _operand(self, v: Value, reader: Node) -> Value:
        if v not in self.parameters or not v.ndim or is_update(reader):
            return self._gather(v, reader) if self._enters(v, reader) else self.replacements.get(v, v)
        if self.reshard and reader.tags.get("phase") == "backward":
            return self._constrain(v, self._behind_barrier(v, reader), reader)
        if v not in self.replacements:
            self.replacements[v] = self._constrain(v, v, reader)
        return self.replacements[v]

    def _exchange(self, v: Value, split: Split | None, reader: Node) -> Value:
        """Return an operand of a product with a weight in place: not split along the batch, once for all transposes."""
        root, transposes = transposed_from(self.graph, v)
        if v in self.in_place or split is None:
            return self.replacements.get(v, v)
        before = split_before(transposes, split)
        if (root, before) not in self.exchanged:
            stored = self.replacements.get(root, root)
            self.exchanged[root, before] = self._split(stored, before, reader)
        x = self.exchanged[root, before]
        for node in transposes:
            copy = node.replaced(operands=(x,), results=(Value(f"{node.result.name}_split", node.result.type),))
            self.nodes.append(copy)
            x = copy.result
        return x

    def _enters(self, v: Value, reader: Node) -> bool:
        """Whether a value split along the batch is read by a product of values split along features."""
        values = (*reader.operands, *reader.results)
        return (
            is_product(reader)
            and any(self.splits.get(v, ()))
            and v not in self.in_parts
            and bool(self.in_parts.intersection(values))
        )

    def _gather(self, v: Value, reader: Node) -> Value:
        if v not in self.full_operands:
            stored = self.replacements.get(v, v)
            self.full_operands[v] = self._split(stored, replicated(v.ndim), reader)
        return self.full_operands[v]

    def _behind_barrier(self, parameter: Value, reader: Node) -> Value:
        """Return the parameter behind a barrier with another operand, so that no earlier gather is used again."""
        other = next((x for x in reader.operands if x is not None and x not in self.parameters), None)
        if other is None:
            return parameter
        operands = (parameter, self.replacements.get(other, other))
        return self._emit(operation("barrier"), operands, {}, reader)[0]

    def _constrain(self, v: Value, stored: Value, neighbor: Node) -> Value:
        return self._split(stored, self.splits.get(v) or replicated(v.ndim), neighbor)

    def _split(self, v: Value, split: Split, neighbor: Node) -> Value:
        text = split_text(tuple(self.over if axis == DATA else axis for axis in split))
        return self._emit(constrain, (v,), {"split": text}, neighbor)[0]

    def _emit(
        self, op: Op, operands: tuple[Value, ...], attributes: Mapping[str, Any], neighbor: Node
    ) -> tuple[Value, ...]:
        results = tuple(Value(f"{v.name}_split", v.type) for v in operands)
        self.nodes.append(Node(op, operands, attributes, results, (), neighbor.origin, neighbor.tags))
        return results


def _is_free(node: Node) -> bool:
    """Whether the compiler chooses the split of the results: element-wise operations, layouts and loops."""
    return bool(node.regions) or node.op.elementwise or not axes_of(node).roles
