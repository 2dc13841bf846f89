"""The passage of a split tensor through an operation, read off its axes: splits of operands and results, open sums.

The answer is that of a compiler which shares a program over devices (XLA): it sums whatever can be joined from parts,
looks up in parts of a table, and lets merged axes be split by any of those that they were. ``sharding.local_rules``
asks the same axes for the parts that are exact without a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mithril.ir import Node, OpAxes, Role, Value
from mithril_parallel.mesh import Mesh, Split, base, replicated
from mithril_parallel.placing.factors import divide


@dataclass(frozen=True, slots=True)
class OpSharding:
    """The splits an operation works on and those of its results, which over the axes ``sums`` are parts to be joined.

    ``at_once``: a compiler joins them where they are computed, and not where something first reads them.
    """

    operand_splits: tuple[Split | None, ...]
    result_splits: tuple[Split, ...]
    sums: frozenset[str] = field(default_factory=frozenset)
    at_once: bool = False


def op_sharding(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> OpSharding:
    """Return the passage of operands with these splits through a node."""
    if not any(s is not None and any(s) for s in splits):
        return OpSharding(tuple(splits), tuple(replicated(v.ndim) for v in node.results))
    if node.regions:
        needs = tuple(None if v is None else replicated(v.ndim) for v in node.operands)
        return OpSharding(needs, tuple(replicated(v.ndim) for v in node.results))
    axes = node.axes
    division = divide(axes, splits, mesh, lambda factor, role: _may_divide(axes, factor, role))
    gives = tuple(tuple(entry and base(entry) for entry in split) for split in division.result_splits)
    roles = [role for f in division.cuts if (role := axes.role(f)) is not None]
    at_once = any(role.operand is not None or role.kind not in ("sum", "mean") for role in roles)
    return OpSharding(division.operand_splits, gives, frozenset(division.kinds), at_once)


def _may_divide(axes: OpAxes, factor: str, role: Role | None) -> bool:
    """Whether the compiler divides a factor: a parallel one, one that is reduced, and a table that is looked up in."""
    if role is not None and not role.reduces and (role.kind != "index" or axes.gives(factor)):
        return False
    return all(
        all(axes.sizes[f] == 1 for f in factors[: factors.index(factor)])
        for fs in axes.operands
        for factors in fs or ()
        if factor in factors
    )


def sizes(v: Value) -> tuple[int, ...]:
    """Return the shape as numbers; symbolic sizes count as 1, which nothing divides."""
    return tuple(n if isinstance(n, int) else 1 for n in v.shape)


def broadcast_split(dims: tuple[int, ...], result: Split, shape: Sequence[int]) -> Split:
    """Return the split of an operand that fits a broadcast result."""
    return tuple(
        result[len(shape) - len(dims) + k] if dims[k] == shape[len(shape) - len(dims) + k] else None
        for k in range(len(dims))
    )
