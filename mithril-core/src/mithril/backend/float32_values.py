"""Programs of 16-bit floats whose values are float32 between operations, for engines that are slower otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mithril import ops
from mithril.graph import (
    Builder,
    Graph,
    Node,
    TensorType,
    Value,
    bfloat16,
    collect_guards,
    float16,
    float32,
    types_of,
)

HALF = (float16, bfloat16)
READS_IN_PART = frozenset({ops.expert_matmul, ops.expert_weight_grad})  # conversions would read all of the weights
Computes = Callable[[Node, bool], bool]


def in_float32(graph: Graph, computes: Computes) -> Graph:
    """Return the graph with nodes that compute in float32 instead of a 16-bit float; the same object if there are none.

    ``computes(node, follows)`` selects them; ``follows`` tells that an operand is float32 already. Operations that only
    move elements follow their first operand; those that read a part of their operands, such as attention to a cache,
    are unchanged. Values are rounded where a result or another node needs them.
    """
    return _Rewriter(graph, computes).run()


class _Rewriter:
    """Rewriter of a graph that keeps the 16-bit form of each value, the float32 form, or both if both are needed."""

    def __init__(self, graph: Graph, computes: Computes) -> None:
        self.graph = graph
        self.computes = computes
        self.builder = Builder(graph.name)
        self.builder.inputs = list(graph.inputs)
        self.builder.guards = dict.fromkeys(graph.guards)
        for i in graph.inputs:
            self.builder.unique(i.name)
        self.data = {i.value: i.data for i in graph.with_role("constant")}
        self.single: dict[Value, Value] = {}  # in float32
        self.computed: set[Value] = set()  # that exist in float32 only, until they are rounded
        self.narrow: dict[Value, Value] = {}
        self.changed = False

    def run(self) -> Graph:
        with self.builder:
            for node in self.graph.nodes:
                with self.builder.at(node.origin, node.tags):
                    self._node(node)
            outputs = tuple(self._rounded(v) for v in self.graph.outputs)
        if not self.changed:
            return self.graph
        return self.graph.replaced(inputs=tuple(self.builder.inputs), nodes=tuple(self.builder.nodes), outputs=outputs)

    def _node(self, node: Node) -> None:
        regions = tuple(in_float32(r, self.computes) for r in node.regions)
        if any(a is not b for a, b in zip(regions, node.regions, strict=True)):
            node, self.changed = node.replaced(regions=regions), True
        source = node.operands[0] if node.op is ops.cast else None
        if source in self.single and node.result.dtype is float32:
            self.narrow[node.result] = self.single[source]
            return
        if not self._is_selected(node):
            operands = tuple(None if v is None else self._rounded(v) for v in node.operands)
            self.builder.nodes.append(node.replaced(operands=operands))
            return
        operands = tuple(None if v is None else self._widened(v) for v in node.operands)
        with collect_guards():  # the graph has them already
            types = node.op.infer(types_of(operands), node.attributes, ())
        results = tuple(
            v if v.dtype is t.dtype else Value(v.name, TensorType(t.dtype, v.type.shape))
            for v, t in zip(node.results, types, strict=True)
        )
        self.builder.nodes.append(node.replaced(operands=operands, results=results))
        changed = {old: new for old, new in zip(node.results, results, strict=True) if old is not new}
        self.single.update(changed)
        self.computed.update(changed)
        self.changed = True

    def _is_selected(self, node: Node) -> bool:
        narrow = [v for v in node.operands if v is not None and v.dtype in HALF]
        if not narrow or node.regions or node.op is ops.cast or node.op in READS_IN_PART or node.tags.get("cached"):
            return False
        follows = [v in self.single for v in narrow]
        return follows[0] if node.op.moves else self.computes(node, any(follows))

    def _widened(self, value: Value) -> Value:
        """Return the float32 form of a 16-bit value, and other values unchanged."""
        if value.dtype not in HALF:
            return self._rounded(value)
        if value not in self.single:
            producer, data = self.graph.producers.get(value), self.data.get(value)
            if producer is not None and producer.is_constant:
                self.single[value] = self.builder.constant(producer.attributes["value"], float32)
            elif data is not None:
                self.single[value] = self.builder.constant(np.asarray(data).astype(np.float32), name=value.name)
            else:
                self.single[value] = ops.cast(value, dtype=float32)
        return self.single[value]

    def _rounded(self, value: Value) -> Value:
        """Return a value in its dtype; one that was computed in float32 is rounded at its first use."""
        if value in self.computed and value not in self.narrow:
            self.narrow[value] = ops.cast(self.single[value], dtype=value.dtype)
        return self.narrow.get(value, value)
