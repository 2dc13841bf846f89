"""Partitioning of branches and loops: their regions are partitioned for the splits of the operands."""

from __future__ import annotations

from collections.abc import Sequence

from mithril.graph import Graph, Input, Node, Output, TensorType, Value, int32, is_addition
from mithril_parallel.mesh import Split, replicated
from mithril_parallel.sharding.local_graph import INDEX, DeviceGraph, LocalGraphBuilder
from mithril_parallel.sharding.local_rules import LocalRule, is_zero


def shard_if(local: LocalGraphBuilder, node: Node) -> None:
    """Partition both branches for the splits of the operands; results have the splits common to both branches."""
    condition, *read = [v for v in node.operands if v is not None]
    for v in read:
        local.reduce_pending(v)
    operand_splits = [local.splits[v] for v in read]
    branches = [_shard_branch(local, region, operand_splits, ()) for region in node.regions]
    leaving = [[p.split for p in branch.outputs.values()] for branch in branches]
    result_splits = [
        tuple(a if a == b else None for a, b in zip(*pair, strict=True)) for pair in zip(*leaving, strict=True)
    ]
    if leaving != [result_splits, result_splits]:
        branches = [_shard_branch(local, region, operand_splits, result_splits) for region in node.regions]
    axes = sorted({axis for branch in branches for axis in branch.indices.values()})
    regions = tuple(_with_index_inputs(branch.graph, axes) for branch in branches)
    target_splits = [replicated(condition.ndim), *operand_splits]
    operands = [local.reshard(v, need) for v, need in zip((condition, *read), target_splits, strict=True)]
    indices = [local.device_index(axis) for axis in axes]
    local.emit(
        node.replaced(regions=regions), [*operands, *indices], LocalRule(tuple(target_splits), tuple(result_splits))
    )


def _shard_branch(
    local: LocalGraphBuilder, region: Graph, operand_splits: Sequence[Split], result_splits: Sequence[Split]
) -> DeviceGraph:
    numbered = _with_numbered_outputs(region)
    names = {i.name: s for i, s in zip(region.arguments, operand_splits, strict=True)}
    requested = {str(k): s for k, s in enumerate(result_splits)}
    return local.region(numbered, names, requested)


def shard_scan(local: LocalGraphBuilder, node: Node) -> None:
    """Partition a loop: carries have the splits of the body's outputs, sequences keep all but the step axis.

    A carry that starts as zeros and is only added to is a pending sum over devices after the loop.
    """
    carries, sequences = node.attributes["carries"], node.attributes["sequences"]
    body, last = node.regions[0], carries + sequences
    operand_splits = [local.splits[v] for v in node.operands if v is not None]
    steps = [(None, *s[1:]) for s in operand_splits[carries:last]]
    accumulated = {
        k
        for k in _accumulated_carries(body, carries)
        if (v := node.operands[k]) is not None and is_zero(local.graph, v)
    }
    entering = list(operand_splits[:carries])
    sharded_body = _shard_body(local, body, entering, steps, operand_splits[last:], accumulated)
    for _ in range(2 * len(local.mesh.axes) + 1):  # initial zeros are replicated, later carries split
        leaving = [sharded_body.outputs[str(k)].split for k in range(carries)]
        if leaving == entering:
            break
        entering = leaving
        sharded_body = _shard_body(local, body, entering, steps, operand_splits[last:], accumulated)
    else:
        entering = [replicated(len(s)) for s in entering]
        sharded_body = _shard_body(local, body, entering, steps, operand_splits[last:], accumulated, entering)
    result_splits = [sharded_body.outputs[str(k)].split for k in range(len(body.outputs))]
    indices = [local.device_index(axis) for axis in sharded_body.indices.values()]
    target_splits = [*entering, *steps, *operand_splits[last:]]
    operands = [local.reshard(v, need) for v, need in zip(node.operands, target_splits, strict=True) if v is not None]
    rule = LocalRule(tuple(target_splits), (*result_splits[:carries], *((None, *s) for s in result_splits[carries:])))
    local.emit(node.replaced(regions=(sharded_body.graph,)), [*operands, *indices], rule)
    for k in accumulated:
        if sums := sharded_body.outputs[str(k)].sums:
            local.pending[node.results[k]] = sums


def _shard_body(
    local: LocalGraphBuilder,
    body: Graph,
    entering: Sequence[Split],
    steps: Sequence[Split],
    rest: Sequence[Split],
    accumulated: set[int],
    leaving: Sequence[Split] = (),
) -> DeviceGraph:
    numbered = _with_numbered_outputs(body)
    input_splits = [*entering, *(s[1:] for s in steps), *rest]
    names = {i.name: s for i, s in zip(body.arguments, input_splits, strict=True)}
    requested = {str(k): s for k, s in enumerate(leaving) if k not in accumulated}
    accumulating = {body.arguments[k].value for k in accumulated}
    return local.region(numbered, names, requested, accumulating=accumulating, unreduced={str(k) for k in accumulated})


def _with_index_inputs(branch: Graph, axes: Sequence[str]) -> Graph:
    """Return a branch whose last inputs are the device's indices along these axes, read or not."""
    names = [INDEX + axis for axis in axes]
    existing = {i.name: i for i in branch.inputs if i.name in names}
    indices = [existing.get(name) or Input(Value(name, TensorType(int32, ()))) for name in names]
    rest = [i for i in branch.inputs if i.name not in existing]
    return branch.replaced(inputs=(*rest, *indices))


def _accumulated_carries(body: Graph, carries: int) -> set[int]:
    """Return the carries that the body only adds to."""
    accumulated = set()
    for k, (entering, leaving) in enumerate(zip(body.arguments[:carries], body.outputs[:carries], strict=True)):
        node = body.producers.get(leaving)
        if node is not None and is_addition(node) and body.users.get(entering.value) == (node,):
            accumulated.add(k)
    return accumulated


def _with_numbered_outputs(region: Graph) -> Graph:
    """Return a region whose results are named by their positions."""
    return region.replaced(results=tuple(Output(v, str(k)) for k, v in enumerate(region.outputs)))
