"""Sharding constraints of ``parallelism="sequence"`` for compilers that partition a graph together with its gradients.

Between products with split weights activations are split along the sequence, in the backward pass, too: sums of partial
products become reduce-scatters, and products with split weights gather their operands.
"""

from __future__ import annotations

from collections.abc import Mapping

from mithril.graph import Graph, Node, Value, is_addition, is_layout
from mithril_parallel.mesh import BLOCKS, DATA, MODEL, Mesh, Split, replicated
from mithril_parallel.placing.fully_sharded import is_update
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.rules import OpSharding
from mithril_parallel.sharding.model_layout import ModelLayout


def with_sequences_in_parts(graph: Graph, axes: Mapping[str, int], splits: Mapping[str, Split]) -> Graph:
    """Return the graph with constraints on activations, for arguments in these splits."""
    return _SequenceConstraints(graph, Mesh(axes), splits).run()


class _SequenceConstraints(ModelLayout):
    """Layouts of values whose sums the compiler inserts: a sum is constrained where it is first read."""

    def __init__(self, graph: Graph, mesh: Mesh, splits: Mapping[str, Split]) -> None:
        super().__init__(graph, _along(MODEL, splits), mesh.size(MODEL), sequences=True)
        self.rows = propagate(graph, Mesh({DATA: mesh.size(DATA)}), _along(DATA, splits)).splits
        self.partial: set[Value] = set()  # results that are sums over parts, without a constraint yet

    def _add(self, node: Node) -> None:
        if is_update(node):  # works on parts of parameters and of their gradients
            self.nodes.append(node)
            self.splits |= {v: replicated(v.ndim) for v in node.results}
            return
        operands = [v for v in node.operands if v is not None]
        if (is_layout(node) or is_addition(node)) and operands and self.partial.issuperset(operands):
            self.nodes.append(node)
            self.splits[node.result] = replicated(node.result.ndim)
            self.partial.add(node.result)
            return
        for v in self.partial.intersection(operands):
            self._constrain_sum(v, node)
        super()._add(node)

    def _add_sum(self, v: Value, node: Node) -> None:
        if v in self.graph.outputs:
            super()._add_sum(v, node)
        else:
            self.partial.add(v)

    def _constrain_sum(self, v: Value, reader: Node) -> None:
        self.partial.remove(v)
        super()._add_sum(v, reader)

    def _reduces_classes(self, node: Node) -> bool:
        return False  # the compiler divides losses by itself

    def _keeps(self, node: Node, sharding: OpSharding) -> bool:
        """Whether a node works on parts of sequences; the compiler sums results over them."""
        for v, need in zip(node.operands, sharding.operand_splits, strict=True):
            if v is not None and (need != self.splits[v] if v in self.in_parts else MODEL in self.splits[v]):
                return False
        return MODEL in sharding.sums or all(MODEL in split for split in sharding.result_splits)

    def _constrained(self, v: Value, split: Split, neighbor: Node) -> Value:
        rows = self.rows.get(v) or replicated(v.ndim)
        layout = tuple(a or b for a, b in zip(rows, split, strict=True))
        if any(a is not None and BLOCKS in a for a in layout):
            return v  # constraints cannot express such a split
        return super()._constrained(v, layout, neighbor)


def _along(axis: str, splits: Mapping[str, Split]) -> dict[str, Split]:
    """Return the splits over one axis of the mesh alone."""
    return {name: tuple(a if a == axis else None for a in split) for name, split in splits.items()}
