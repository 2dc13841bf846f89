"""Programs of 16-bit floats whose values are float32 between operations, for engines that are slower otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mithril import ops
from mithril.graph import Graph, Node, TensorType, Value, bfloat16, collect_guards, float16, float32, types_of
from mithril.passes import TwoDtypes

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


class _Rewriter(TwoDtypes):
    """Rewriter of 16-bit values, which are converted to float32."""

    def __init__(self, graph: Graph, computes: Computes) -> None:
        super().__init__(graph)
        self.computes = computes
        self.data = {i.value: i.data for i in graph.with_role("constant")}

    def visit(self, node: Node) -> None:
        regions = tuple(in_float32(r, self.computes) for r in node.regions)
        if any(a is not b for a, b in zip(regions, node.regions, strict=True)):
            node, self.changed = node.replaced(regions=regions), True
        source = node.operands[0] if node.op is ops.cast else None
        if source in self.converted and node.result.dtype is float32:
            self.original[node.result] = self.converted[source]
            return
        if not self._is_selected(node):
            operands = tuple(None if v is None else self.in_original(v) for v in node.operands)
            self.builder.nodes.append(node.replaced(operands=operands))
            self.original.update((v, v) for v in node.results)
            return
        operands = tuple(None if v is None else self._widened(v) for v in node.operands)
        with collect_guards():  # the graph has them already
            types = node.op.infer(types_of(operands), node.attributes, ())
        results = tuple(
            v if v.dtype is t.dtype else Value(v.name, TensorType(t.dtype, v.type.shape))
            for v, t in zip(node.results, types, strict=True)
        )
        self.builder.nodes.append(node.replaced(operands=operands, results=results))
        for old, new in zip(node.results, results, strict=True):
            (self.original if old is new else self.converted)[old] = new
        self.changed = True

    def _is_selected(self, node: Node) -> bool:
        narrow = [v for v in node.operands if v is not None and v.dtype in HALF]
        if not narrow or node.regions or node.op is ops.cast or node.op in READS_IN_PART or node.tags.get("cached"):
            return False
        follows = [v in self.converted for v in narrow]
        return follows[0] if node.op.moves else self.computes(node, any(follows))

    def _widened(self, value: Value) -> Value:
        """Return the float32 form of a 16-bit value, and other values unchanged."""
        if value.dtype not in HALF:
            return self.in_original(value)
        if value not in self.converted:
            producer, data = self.graph.producers.get(value), self.data.get(value)
            if producer is not None and producer.is_constant:
                self.converted[value] = self.builder.constant(producer.attributes["value"], float32)
            elif data is not None:
                self.converted[value] = self.builder.constant(np.asarray(data).astype(np.float32), name=value.name)
            else:
                self.converted[value] = ops.cast(value, dtype=float32)
        return self.converted[value]
