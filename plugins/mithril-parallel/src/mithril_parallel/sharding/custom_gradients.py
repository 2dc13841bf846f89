"""Operations with a custom gradient in the graph of one device, for frameworks that differentiate it.

A framework calls the gradient of an operation on the parts of one device. That is exact only if it computes the parts
of the gradient of the whole; otherwise each device runs the whole operation. Engines average gradients over devices:
cotangents are scaled, and those of values that all devices hold are terms of a sum. Gradients that are not linear
receive the true cotangent, by ``mesh.cotangent``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mithril import ops
from mithril.derivatives import operation_gradient
from mithril.graph import Graph, Node, TensorType, Value, operation
from mithril_parallel.mesh import BLOCKS, Split, replicated
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.local_graph import INDEX, DeviceGraph, LocalGraphBuilder
from mithril_parallel.sharding.local_rules import LocalRule, is_zero, local_rule


def shard_custom_gradient(local: LocalGraphBuilder, node: Node) -> bool:
    """Partition an operation with a custom gradient, if a framework differentiates; return whether it is one."""
    if not (local.differentiated and node.op.surrogate):
        return False
    for v in node.operands:
        if v is not None:
            local.reduce_pending(v)
    gradient = operation_gradient(node)
    rule = _rule_on_parts(local, node, gradient)
    if rule is None:
        complete = tuple(None if v is None else replicated(v.ndim) for v in node.operands)
        rule = LocalRule(complete, tuple(replicated(v.ndim) for v in node.results))
    operands = [
        None if v is None or need is None else local.reshard(v, need)
        for v, need in zip(node.operands, rule.operand_splits, strict=True)
    ]
    if is_linear(gradient):
        local.emit(node, operands, rule)
        return True
    terms = iter(_partitioned(local, node, gradient, rule).outputs.values())
    operands = [
        _scaled(local, v, {*split, *next(terms).sums})
        if v is not None and split is not None and v.dtype.is_float
        else v
        for v, split in zip(operands, rule.operand_splits, strict=True)
    ]
    local.emit(node, operands, rule)
    for v, split in zip(node.results, rule.result_splits, strict=True):
        if v.dtype.is_float:
            local.local_values[v] = _true_cotangent(local, local.local_values[v], split)
    return True


def _rule_on_parts(local: LocalGraphBuilder, node: Node, gradient: Graph) -> LocalRule | None:
    """Return the rule of an operation whose gradient on parts consists of parts, or of terms of a sum."""
    splits = [None if v is None else local.splits[v] for v in node.operands]
    rule = local_rule(local.graph, node, splits, local.mesh)
    if rule is None or rule.sums or rule.joins or rule.scale != 1.0:
        return None
    entries = [a for s in (*rule.operand_splits, *rule.result_splits) for a in s or () if a is not None]
    if any(BLOCKS in a for a in entries):
        return None
    partitioned = _partitioned(local, node, gradient, rule)
    needs = [s for v, s in zip(node.operands, rule.operand_splits, strict=True) if v is not None and v.dtype.is_float]
    keeps_splits = [part.split for part in partitioned.outputs.values()] == needs
    return (
        rule if keeps_splits and _equal(partitioned.graph, operation_gradient(_on_parts(local, node, rule))) else None
    )


def _partitioned(local: LocalGraphBuilder, node: Node, gradient: Graph, rule: LocalRule) -> DeviceGraph:
    """Partition the gradient of an operation for operands and cotangents in the splits of a rule."""
    argument_splits: list[Split] = [s for s in rule.operand_splits if s is not None]
    argument_splits += [
        *rule.result_splits,
        *(s for v, s in zip(node.results, rule.result_splits, strict=True) if v.dtype.is_float),
    ]
    splits = {i.name: s for i, s in zip(gradient.arguments, argument_splits, strict=True)}
    return local.region(gradient, splits, {}, unreduced=gradient.output_names)


def _on_parts(local: LocalGraphBuilder, node: Node, rule: LocalRule) -> Node:
    """Return the operation that one device would run."""

    def part(v: Value, split: Split) -> Value:
        return Value(v.name, TensorType(v.dtype, local.mesh.local(sizes(v), split)))

    operands = tuple(
        None if v is None or s is None else part(v, s) for v, s in zip(node.operands, rule.operand_splits, strict=True)
    )
    results = tuple(part(v, s) for v, s in zip(node.results, rule.result_splits, strict=True))
    return node.replaced(operands=operands, results=results, attributes={**node.attributes, **rule.attributes})


def _equal(a: Graph, b: Graph) -> bool:
    """Whether two graphs consist of the same operations, on values of the same types."""
    if any(i.name.startswith(INDEX) for i in a.inputs) or len(a.nodes) != len(b.nodes):
        return False
    pairs = dict(zip((i.value for i in a.arguments), (i.value for i in b.arguments), strict=True))
    for left, right in zip(a.nodes, b.nodes, strict=True):
        operands = tuple(None if v is None else pairs.get(v) for v in left.operands)
        types = [v.type for v in left.results] == [v.type for v in right.results]
        is_equal = left.op is right.op and dict(left.attributes) == dict(right.attributes) and not left.regions
        if not (is_equal and types and _same(operands, right.operands)):
            return False
        pairs.update(zip(left.results, right.results, strict=True))
    return _same([pairs.get(v) for v in a.outputs], b.outputs)


def _same(a: Sequence[Value | None], b: Sequence[Value | None]) -> bool:
    """Whether two sequences hold the same values: ``==`` is an operation while a graph is built."""
    return len(a) == len(b) and all(v is w for v, w in zip(a, b, strict=True))


def is_linear(gradient: Graph) -> bool:
    """Whether the results of ``operation_gradient`` are linear in the cotangents."""
    dependent = {i.value for i in gradient.arguments if i.role == "cotangent"}
    for node in gradient.nodes:
        if any(v in dependent for v in node.operands):
            if not _is_linear_in(gradient, node, dependent):
                return False
            dependent.update(node.results)
    return True


def _is_linear_in(graph: Graph, node: Node, dependent: set[Value]) -> bool:
    if node.op is ops.cast:
        return bool(node.result.dtype.is_float)
    if node.op is ops.where:
        condition, *choices = node.operands
        return condition not in dependent and _are_terms(graph, choices, dependent)
    if node.op.variadic:
        return bool(node.op.linear) and _are_terms(graph, node.operands, dependent)
    for group in node.op.linear.split("|"):
        names = group.split()
        operands = list(zip(node.op.operands, node.operands, strict=False))
        joint = [v for n, v in operands if n in names]
        rest = [v for n, v in operands if n not in names]
        if joint and not any(v in dependent for v in rest) and _are_terms(graph, joint, dependent):
            return True
    return False


def _are_terms(graph: Graph, values: Sequence[Value | None], dependent: set[Value]) -> bool:
    return all(v in dependent or v is None or is_zero(graph, v) for v in values)


# -- gradients that are not linear ----------------------------------------------------------------------------------
def _scaled(local: LocalGraphBuilder, v: Value, axes: set[Any]) -> Value:
    """Return an operand; its gradient is multiplied by the number of devices that have parts or terms of it."""
    return _cotangent(v, "", 1, float(prod(local.mesh.size(a) for a in axes if a not in local.sequential_axes)))


def _true_cotangent(local: LocalGraphBuilder, v: Value, split: Split) -> Value:
    """Return a result whose gradient receives the cotangent that one device would have."""
    if any(a not in split for a in local.sequential_axes):
        raise local.mixed_examples_error()
    devices = [a for a in local.mesh.axes if a not in local.sequential_axes]
    v = _cotangent(v, "", 1, 1.0 / prod(map(local.mesh.size, devices)))
    for axis in devices:
        if axis not in split:
            v = _cotangent(v, axis, local.mesh.size(axis), 1.0)
    return v


def _cotangent(v: Value, mesh: str, parts: int, scale: float) -> Value:
    if parts == 1 and scale == 1.0:
        return v
    result: Value = operation("mesh.cotangent")(v, mesh=mesh, parts=parts, scale=scale)
    return result
