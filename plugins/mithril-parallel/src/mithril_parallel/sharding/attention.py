"""Attention whose queries are split: each device compares its positions with those of all keys.

Keys and values of all devices pass around a ring, or are gathered: for masks of the user, and for queries that are
other positions than the keys.
"""

from __future__ import annotations

from mithril import ops
from mithril.graph import Node, Value, operation
from mithril_parallel.mesh import BLOCKS, Split
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.local_graph import LocalGraphBuilder


def shard_attention(local: LocalGraphBuilder, node: Node) -> bool:
    """Partition attention along the queries; return whether this was possible. Each device has the same work."""
    if node.op is not ops.attention:
        return False
    q, k, v, mask = node.operands
    assert q is not None
    assert k is not None
    assert v is not None
    batch, heads, axis, _ = local.splits[q]
    if axis is None or BLOCKS in axis or axis in local.sequential_axes or heads is not None:
        return False
    if local.differentiated and mask is None and _in_parts(local, (q, k, v), (batch, None, axis, None)):
        operands = [local.reduce_pending(x) for x in (q, k, v)]
        attributes = {"causal": node.attributes["causal"], "scale": node.attributes["scale"]}
        y = operation("mesh.ring_attention")(*operands, mesh=axis, parts=local.mesh.size(axis), **attributes)
        local.local_values[node.result], local.splits[node.result] = y, local.splits[q]
        return True
    if not node.attributes["causal"]:
        return False
    split = (batch, None, axis, None)
    query = local.reshard(q, split)
    key, value = (local.reshard(x, (batch, None, None, None)) for x in (k, v))
    allowed = _allowed(local, axis, sizes(query)[2], sizes(q)[2], sizes(k)[2])
    if mask is not None:
        part = tuple(entry if n > 1 else None for entry, n in zip(split[4 - mask.ndim :], sizes(mask), strict=True))
        local_mask = local.reshard(mask, part)
        conjunction = operation("logical_and") if mask.dtype.is_bool else None
        allowed = (
            conjunction(local_mask, allowed) if conjunction else operation("where")(allowed, local_mask, -float("inf"))
        )
    attention = operation("attention")(query, key, value, allowed, causal=False, scale=node.attributes["scale"])
    local.local_values[node.result], local.splits[node.result] = attention, split
    return True


def _in_parts(local: LocalGraphBuilder, values: tuple[Value, ...], split: Split) -> bool:
    """Whether queries, keys and values have this split, and are the same positions."""
    return len({sizes(v)[2] for v in values}) == 1 and all(local.splits[v] == split for v in values)


def _allowed(local: LocalGraphBuilder, axis: str, count: int, queries: int, keys: int) -> Value:
    """Return for each query of the device the keys that are not after it; the last query sees all of them."""
    op = operation
    rows, columns = (op("iota")(shape=(count, keys), axis=k) for k in (0, 1))
    first = local.device_index(axis) * count + (keys - queries)
    result: Value = op("greater_equal")(rows + first, columns)
    return result
