"""Layouts over the axis ``model`` for engines that split weights: of activations between products, and of classes.

An engine such as DTensor derives the layout of most values from those of its operands. Without a layout of the
activations between products it also splits rows, of which there may be too few. Their layout is therefore fixed where
an operation with split weights begins and where it ends, with the exchanges of Megatron: a sum over the processes of
its result, and in the backward pass of the gradient of its operand. Reductions over classes work on parts of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril import ops
from mithril.graph import Graph, Node, Value
from mithril_parallel.mesh import MODEL, Mesh, Split, replicated
from mithril_parallel.placing.rules import OpSharding, op_sharding, sizes
from mithril_parallel.sharding.collectives import constrain, split_text

CLASSES = "classes"  # tag of operations along an axis that is split: the axis of the mesh
SEQUENCE = 1  # the axis of a sequence in activations


def with_model_layout(graph: Graph, splits: Mapping[str, Split], parts: int, *, sequences: bool = False) -> Graph:
    """Return the graph with layouts of activations, for weights in these splits, and tags on operations over classes.

    Activations between products are complete. With ``sequences`` they are split along the sequence, if it can be
    divided: the sum of a product becomes a reduce-scatter, and a product whose weight is split by columns gathers its
    operand. Operations in between, such as normalization, work on parts.
    """
    return ModelLayout(graph, splits, parts, sequences).run()


class ModelLayout:
    """One pass over the nodes of a graph."""

    def __init__(self, graph: Graph, splits: Mapping[str, Split], parts: int, sequences: bool) -> None:
        self.graph, self.mesh, self.sequences = graph, Mesh({MODEL: parts}), sequences
        self.splits: dict[Value, Split] = {i.value: splits.get(i.name, replicated(i.value.ndim)) for i in graph.inputs}
        self.in_parts: dict[Value, Value] = {}  # values that are split along the sequence, and how the graph reads them
        self.complete: dict[Value, Value] = {}  # values as operations with split operands read them
        self.sums: dict[Value, Value] = {}  # partial results, and their sums
        self.parameters = {i.value for i in graph.with_role("param")}
        self.nodes: list[Node] = []

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._add(node)
        read = self.in_parts | self.sums
        outputs = self.graph.carrying([read.get(v, v) for v in self.graph.outputs])
        return self.graph.replaced(nodes=tuple(self.nodes), results=outputs)

    def _add(self, node: Node) -> None:
        if self._reduces_classes(node):
            return
        in_parts = [v in self.in_parts for v in node.operands]
        sharding = self._sharding(node)
        keeps = any(in_parts) and self._keeps(node, sharding)
        operands: list[Value | None] = []
        for v in node.operands:
            if keeps and v is not None and v in self.in_parts:
                operands.append(self.in_parts[v])
            else:
                operands.append(self._operand(v, node))
        self.nodes.append(node.replaced(operands=tuple(operands)))
        if keeps:
            for v, split in zip(node.results, sharding.result_splits, strict=True):
                self.splits[v] = split
                if MODEL in split:
                    self.in_parts[v] = v
            return
        sharding = self._sharding(node, complete=True)
        for v, split in zip(node.results, sharding.result_splits, strict=True):
            self.splits[v] = split
            if self._reads_split(node) and MODEL not in split and v.dtype.is_float:
                self._add_sum(v, node)

    def _add_sum(self, v: Value, node: Node) -> None:
        """Add the layout of a result that is a sum over parts."""
        if self.sequences and self._is_sequence(v):
            self.splits[v] = tuple(MODEL if k == SEQUENCE else None for k in range(v.ndim))
            self.in_parts[v] = self._constrained(v, self.splits[v], node)
        else:
            self.sums[v] = self._constrained(v, self.splits[v], node)

    def _reads_split(self, node: Node) -> bool:
        return any(v is not None and v not in self.in_parts and MODEL in self.splits[v] for v in node.operands)

    def _operand(self, v: Value | None, reader: Node) -> Value | None:
        """Return a value as a node reads it that does not keep parts of sequences."""
        if v is None:
            return v
        source = self.in_parts[v] if v in self.in_parts else self.sums.get(v, v)
        enters = v not in self.parameters and v.dtype.is_float and MODEL not in self.splits[v]
        if v not in self.in_parts and not (enters and self._reads_split(reader)):
            return source
        if v not in self.complete:
            self.complete[v] = self._constrained(source, replicated(v.ndim), reader)
        return self.complete[v]

    def _sharding(self, node: Node, *, complete: bool = False) -> OpSharding:
        splits = [
            None if v is None else replicated(v.ndim) if complete and v in self.in_parts else self.splits[v]
            for v in node.operands
        ]
        return op_sharding(node, splits, self.mesh)

    def _keeps(self, node: Node, sharding: OpSharding) -> bool:
        """Whether a node computes parts of its results from parts of sequences, and reads nothing split otherwise."""
        for v, need in zip(node.operands, sharding.operand_splits, strict=True):
            if v is None:
                continue
            if v in self.in_parts and need != self.splits[v]:
                return False
            if v not in self.in_parts and MODEL in self.splits[v]:
                return False
        along = all(len(s) > SEQUENCE and s[SEQUENCE] == MODEL for s in sharding.result_splits)
        return along and MODEL not in sharding.sums

    def _is_sequence(self, v: Value) -> bool:
        return v.ndim > 2 and self.mesh.divides(MODEL, sizes(v)[SEQUENCE])

    def _constrained(self, v: Value, split: Split, neighbor: Node) -> Value:
        result = Value(f"{v.name}_{'parts' if any(split) else 'complete'}", v.type)
        attributes = {"split": split_text(split)}
        self.nodes.append(Node(constrain, (v,), attributes, (result,), (), neighbor.origin, neighbor.tags))
        return result

    # -- classes ------------------------------------------------------------------------------------------------------
    def _reduces_classes(self, node: Node) -> bool:
        """Add an operation along an axis of classes that is split, with a tag; return whether it is one."""
        if node.op not in (ops.log_softmax, ops.take_along_axis) or node.operands[0] in self.in_parts:
            return False
        x = node.operands[0]
        assert x is not None
        axis: Any = node.attributes["axis"]
        if self.splits[x][axis] != MODEL:
            return False
        operands = tuple(None if v is None else self.sums.get(v, v) for v in node.operands)
        self.nodes.append(node.replaced(operands=operands, tags={**node.tags, CLASSES: MODEL}))
        is_lookup = node.op is ops.take_along_axis
        self.splits[node.result] = replicated(node.result.ndim) if is_lookup else self.splits[x]
        return True
