"""Causal attention whose queries are split: each device compares its positions with those of all keys."""

from __future__ import annotations

from mithril import ops
from mithril.base import operation
from mithril.ir import Node, Value
from mithril_parallel.mesh import BLOCKS
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.local_graph import LocalGraphBuilder


def shard_causal_attention(local: LocalGraphBuilder, node: Node) -> bool:
    """Partition causal attention along the queries; return whether this was possible.

    Keys and values are gathered. The mask is computed for the queries of a device, so that a fused kernel can run;
    each device has the same work.
    """
    if node.op is not ops.attention or not node.attributes["causal"]:
        return False
    q, k, v, mask = node.operands
    assert q is not None
    assert k is not None
    assert v is not None
    batch, heads, axis, _ = local.splits[q]
    if axis is None or BLOCKS in axis or axis in local.sequential_axes or heads is not None:
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


def _allowed(local: LocalGraphBuilder, axis: str, count: int, queries: int, keys: int) -> Value:
    """Return for each query of the device the keys that are not after it; the last query sees all of them."""
    op = operation
    rows, columns = (op("iota")(shape=(count, keys), axis=k) for k in (0, 1))
    first = local.device_index(axis) * count + (keys - queries)
    result: Value = op("greater_equal")(rows + first, columns)
    return result
