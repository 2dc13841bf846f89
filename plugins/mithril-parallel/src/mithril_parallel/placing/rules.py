"""Sharding of one operation, derived from its axes: splits of operands and results, and pending sums.

The rules model an SPMD compiler (XLA), which reduces every result that can be combined from partial results, gathers
from sharded tables, and lets a merged axis inherit the split of any of its factors. ``sharding.local_rules`` derives
from the same axes the rules that are exact without a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mithril.graph import Node, OpAxes, Role, Value, axes_of
from mithril_parallel.mesh import Mesh, Split, base, replicated
from mithril_parallel.placing.factors import divide


@dataclass(frozen=True, slots=True)
class OpSharding:
    """The splits that an operation requires of its operands, and those of its results.

    Over the mesh axes ``sums`` the results are partial and must be reduced. With ``at_once`` a compiler reduces them
    where they are computed, otherwise at their first use.
    """

    operand_splits: tuple[Split | None, ...]
    result_splits: tuple[Split, ...]
    sums: frozenset[str] = field(default_factory=frozenset)
    at_once: bool = False


def op_sharding(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> OpSharding:
    """Return the sharding of a node whose operands have these splits."""
    if not any(s is not None and any(s) for s in splits):
        return OpSharding(tuple(splits), tuple(replicated(v.ndim) for v in node.results))
    if node.regions:
        needs = tuple(None if v is None else replicated(v.ndim) for v in node.operands)
        return OpSharding(needs, tuple(replicated(v.ndim) for v in node.results))
    axes = axes_of(node)
    division = divide(axes, splits, mesh, lambda factor, role: _may_divide(axes, factor, role))
    gives = tuple(tuple(entry and base(entry) for entry in split) for split in division.result_splits)
    roles = [role for f in division.cuts if (role := axes.role(f)) is not None]
    at_once = any(role.operand is not None or role.kind not in ("sum", "mean") for role in roles)
    return OpSharding(division.operand_splits, gives, frozenset(division.kinds), at_once)


def _may_divide(axes: OpAxes, factor: str, role: Role | None) -> bool:
    """Whether the compiler divides a factor: a parallel factor, a reduced one, or the rows of a lookup table."""
    if role is not None and not role.reduces and (role.kind != "index" or axes.has_in_result(factor)):
        return False
    return all(
        all(axes.sizes[f] == 1 for f in factors[: factors.index(factor)])
        for fs in axes.operands
        for factors in fs or ()
        if factor in factors
    )


def sizes(v: Value) -> tuple[int, ...]:
    """Return the shape as numbers; symbolic sizes count as 1, so that they are never divided."""
    return tuple(n if isinstance(n, int) else 1 for n in v.shape)


def broadcast_split(dims: tuple[int, ...], result: Split, shape: Sequence[int]) -> Split:
    """Return the split of an operand that is consistent with the split of its broadcast result."""
    return tuple(
        result[len(shape) - len(dims) + k] if dims[k] == shape[len(shape) - len(dims) + k] else None
        for k in range(len(dims))
    )
