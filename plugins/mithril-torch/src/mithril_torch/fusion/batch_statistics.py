"""Batch normalization in training, which PyTorch computes and differentiates by one kernel each.

Its kernel has no gradient with respect to the statistics, so only nodes whose statistics become states alone use it.
"""

from __future__ import annotations

from mithril import ops
from mithril.backend import Call, Lowerings
from mithril.graph import Graph, Node, Value
from mithril_torch.fusion.subgraph_fusion import kernel_for

KERNELS = ("float32", "float64")


batch_norm_for_state = kernel_for(ops.batch_norm_training, "batch_norm_for_state")


def with_native_statistics(graph: Graph) -> Graph:
    """Replace batch normalization by PyTorch's kernel in programs that PyTorch differentiates."""
    if graph.results_of("gradient") or not any(node.op is ops.batch_norm_training for node in graph.nodes):
        return graph
    differentiated = _read_by_results(graph)
    nodes = []
    for node in graph.nodes:
        if node.op is ops.batch_norm_training and _has_kernel(node) and differentiated.isdisjoint(node.results[1:]):
            node = node.replaced(op=batch_norm_for_state)
        nodes.append(node)
    return graph.replaced(nodes=tuple(nodes))


def _has_kernel(node: Node) -> bool:
    dtypes = {v.dtype.name for v in node.operands if v is not None}
    return len(dtypes) == 1 and dtypes <= set(KERNELS)


def _read_by_results(graph: Graph) -> set[Value]:
    """Return the values from which results other than states are computed."""
    read = {r.value for r in graph.results if r.role != "state"}
    for node in reversed(graph.nodes):
        if not read.isdisjoint(node.results):
            read.update(v for v in node.operands if v is not None)
    return read


def add_rows(table: Lowerings) -> None:
    """Add the lowering row of the private operation to ``table``."""
    table.function(batch_norm_for_state)(_batch_norm)


def _batch_norm(call: Call) -> str:
    from mithril_torch import helpers

    return f"{call.helper(helpers.batch_norm_for_state)}({call.x}, {call.scale}, {call.bias}, {call.literal(call.eps)})"
