"""Detection of losses that broadcast predictions against targets, such as [N, 1] with [N], which gives [N, N]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mithril import ops
from mithril.base import shape_text
from mithril.ir import Graph, Node


def broadcasts(graph: Graph) -> Iterator[tuple[str, Node]]:
    """Yield a description of each operation in losses and metrics that broadcasts two values against each other.

    Only values that keep their shape since the model or the batch count: after a reshape, a slice or a reduction,
    broadcasting is intended.
    """
    written = [node for node in graph.nodes if node.tags.get("phase") == "loss"]
    constants = {i.value for i in graph.with_role("constant")}
    computed = {v for node in written for v in node.results}
    unchanged: set[Any] = {v for node in written for v in node.operands if v not in computed and v not in constants}
    for node in written:
        values = [v for v in node.operands if v is not None and v in unchanged]
        if not values or not (node.op.elementwise or node.op is ops.cast):
            continue
        shape = node.result.shape
        if any(v.shape == shape for v in values):
            unchanged.add(node.result)
        elif len(values) > 1:
            shapes = " and ".join(shape_text(v.shape) for v in values)
            yield f"'{node.op.name}' in a loss or metric broadcasts {shapes} to {shape_text(shape)}", node
