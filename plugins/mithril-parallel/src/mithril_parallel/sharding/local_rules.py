"""Exact rules for running operations on parts of their operands, derived from the operations' declared axes.

``placing.rules`` predicts how a compiler partitions an operation. These rules are for execution without a compiler: a
split is preserved only if the operation on parts, with attributes adapted to the local sizes, computes parts of the
result. The results then equal those of one device bit for bit, except for the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mithril import ops
from mithril.graph import Graph, Node, Role, Value, axes_of, is_source, is_unchanged
from mithril_parallel.mesh import Mesh, Split
from mithril_parallel.placing.factors import Splits, divide, requested_cuts
from mithril_parallel.placing.rules import sizes

RENAMING = (ops.reshape, ops.cast)  # allowed between an iota and the indices computed from it
REDUCTIONS = ("sum", "mean", "max", "min")  # reductions with a collective


@dataclass(frozen=True)
class LocalRule:
    """How a node runs on parts; ``joins`` maps mesh axes to the reduction that follows the node immediately."""

    operand_splits: tuple[Split | None, ...]
    result_splits: tuple[Split, ...]
    sums: frozenset[str] = frozenset()
    attributes: Mapping[str, Any] = field(default_factory=dict)  # attributes that change
    scale: float = 1.0  # factor on sums that represent means
    joins: Mapping[str, str] = field(default_factory=dict)


def local_rule(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> LocalRule | None:
    """Return the rule of a node for operands in these splits; None if a composite must be decomposed to keep one."""

    def allows(_: str, role: Role | None) -> bool:
        into = node.operands[role.operand] if role is not None and role.operand is not None else None
        return role is None or (role.kind in REDUCTIONS and (into is None or is_zero(graph, into)))

    axes = axes_of(node)
    division = divide(axes, splits, mesh, allows)
    lost = any(division.cuts.get(f) != cut and cut.axis not in division.used for f, cut in requested_cuts(axes, splits))
    if lost and node.op.composite and not node.op.elementwise:
        return None
    kinds, scale = division.kinds, 1.0
    for axis, kind in kinds.items():
        scale /= mesh.size(axis) if kind == "mean" else 1
    return LocalRule(
        division.operand_splits,
        division.result_splits,
        frozenset(axis for axis, kind in kinds.items() if kind in ("sum", "mean")),
        axes.cut(division.lengths),
        scale,
        {axis: kind for axis, kind in kinds.items() if kind in ("max", "min")},
    )


def row_aligned_axes(graph: Graph, x: Value, indices: Value) -> list[int]:
    """Return the axes along which row ``i`` of ``indices`` refers to row ``i`` of ``x``, as in ``x[i, indices[i]]``."""
    stacked = graph.producers.get(indices)
    if stacked is None or stacked.op is not ops.concat or stacked.attributes["axis"] != indices.ndim - 1:
        return []
    row_axes = []
    for k, v in enumerate(stacked.operands):
        while v is not None and (node := graph.producers.get(v)) is not None and node.op in RENAMING:
            v = node.operands[0]
        counts = v is not None and node is not None and node.op is ops.iota and node.attributes["axis"] == k
        if counts and v is not None and v.shape == indices.shape[:-1] and x.shape[k] == indices.shape[k]:
            row_axes.append(k)
    return row_axes if len(stacked.operands) == sizes(indices)[-1] else []


def is_zero(graph: Graph, v: Value) -> bool:
    """Whether a value is provably zero everywhere."""
    while (node := graph.producers.get(v)) is not None:
        if is_source(node):
            return bool(node.attributes.get("value", 1) == 0)  # of full and constant
        if not is_unchanged(node) or node.operands[0] is None:
            return False
        v = node.operands[0]
    return False
