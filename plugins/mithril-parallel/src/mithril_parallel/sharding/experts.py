"""Mixtures whose experts are divided: each device computes the rows of all devices that are routed to its experts."""

from __future__ import annotations

from mithril import ops
from mithril.graph import Node, Value, operation
from mithril_parallel.mesh import BLOCKS, Split
from mithril_parallel.placing.experts import expert_weights
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.local_graph import LocalGraphBuilder


def shard_experts(local: LocalGraphBuilder, node: Node) -> bool:
    """Partition a mixture along its experts; return whether this was possible.

    Rows of the experts of other devices are zeros, so that the sum over devices is the result.
    """
    weights = expert_weights(node)
    if not weights:
        return False
    axis = local.splits[weights[0]][0]
    if axis is None or BLOCKS in axis or axis in local.sequential_axes:
        return False
    if local.exchanges_rows and _exchange_rows(local, node, axis):
        return True
    operands: list[Value | None] = []
    lead = _split_of_rows(local, node, axis)
    for name, v in zip(node.op.operands, node.operands, strict=True):
        if v is None or any(v is w for w in weights):
            operands.append(None if v is None else local.reshard(v, (axis, None, None)))
            continue
        rank = v.ndim - (0 if name == "experts" and node.op is ops.expert_matmul else 1)
        rows = tuple(a if n > 1 else None for a, n in zip(lead[len(lead) - rank :], sizes(v)[:rank], strict=True))
        part = local.reshard(v, (*rows, *[None] * (v.ndim - rank)))
        if name == "experts":
            first = local.device_index(axis) * (sizes(weights[0])[0] // local.mesh.size(axis))
            part = part - operation("cast")(first, dtype=v.dtype)
        operands.append(part)
    local.local_values[node.result] = node.op(*operands, **node.attributes)
    local.splits[node.result] = (*lead, None)
    local.pending[node.result] = frozenset({axis})
    return True


def _exchange_rows(local: LocalGraphBuilder, node: Node, axis: str) -> bool:
    """Send rows to their experts and results back, if rows are divided over the devices that divide the experts."""
    operands = dict(zip(node.op.operands, node.operands, strict=True))
    if node.op is not ops.expert_mixture:
        return False
    rows = {n: v for n in ("x", "shares", "experts") if (v := operands[n]) is not None}
    split = local.splits[rows["experts"]][:-1]
    if axis not in split or any(a is not None and BLOCKS in a for a in split):
        return False
    rows = {n: local.reshard(v, (*split, None)) for n, v in rows.items()}
    weights = {
        n: local.reshard(v, (axis, None, None)) for n in ("up", "down", "gate") if (v := operands[n]) is not None
    }
    places = {"mesh": axis, "parts": local.mesh.size(axis), "count": weights["up"].shape[0]}
    numbers = ops.used_experts(rows["experts"], rows["shares"])
    x, local_numbers, counts = operation("mesh.to_experts")(rows["x"], numbers, **places)
    one = operation("full")(shape=(x.shape[0], 1), value=1.0, dtype=x.dtype)
    single = operation("unsqueeze")(local_numbers, axis=(-1,))
    y = node.op(x, one, single, *(weights.get(n) for n in ("up", "down", "gate")), **node.attributes)
    y = operation("mesh.from_experts")(y, numbers, counts, **places)
    local.local_values[node.result] = ops.sum_of_shares(y, rows["shares"])
    local.splits[node.result] = (*split, None)
    return True


def _split_of_rows(local: LocalGraphBuilder, node: Node, axis: str) -> Split:
    """Return the split of the rows of the result: that of the numbers of experts, without the axis of the experts."""
    numbers = node.operands[node.op.operands.index("experts")]
    assert numbers is not None
    rank = node.result.ndim - 1
    split = local.splits[numbers][:rank]
    return (*[None] * (rank - len(split)), *(None if a == axis or a is None or BLOCKS in a else a for a in split))
