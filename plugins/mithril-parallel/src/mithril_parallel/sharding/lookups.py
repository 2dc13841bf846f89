"""Gathers from split operands: tables whose rows are on several devices, and indices aligned with split rows."""

from __future__ import annotations

from mithril import ops
from mithril.graph import Node, axes_of, operation
from mithril_parallel.mesh import BLOCKS
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.local_graph import LocalGraphBuilder
from mithril_parallel.sharding.local_rules import LocalRule, row_aligned_axes


def shard_lookup(local: LocalGraphBuilder, node: Node) -> bool:
    """Partition a lookup in a table split along the indexed axis; return whether this was possible.

    Each device reads its own rows and zeros for the others, so that the sum over devices is the result.
    """
    if node.op is not ops.take:
        return False
    table, indices = node.operands
    assert table is not None
    assert indices is not None
    axis = node.attributes["axis"]
    mesh_axis = local.splits[table][axis]
    if (
        mesh_axis is None
        or BLOCKS in mesh_axis  # rows of a device are not contiguous
        or mesh_axis in local.sequential_axes
        or mesh_axis in local.splits[indices]
        or not table.dtype.is_float
    ):
        return False
    count = sizes(table)[axis]
    part = count // local.mesh.size(mesh_axis)
    index_split, op = local.splits[indices], operation
    outer = {a for a in index_split if a is not None}
    table_split = tuple(None if a in outer else a for a in local.splits[table])
    positions = local.reshard(indices, index_split)
    rows = local.reshard(table, table_split)
    positions = op("where")(op("less")(positions, 0), positions + count, positions)
    positions = op("clip")(positions, low=0, high=count - 1) - op("cast")(
        local.device_index(mesh_axis) * part, dtype=positions.dtype
    )
    is_local = op("logical_and")(op("greater_equal")(positions, 0), op("less")(positions, part))
    looked_up = op("take")(rows, op("where")(is_local, positions, 0), axis=axis)
    mask = op("reshape")(is_local, shape=(*[1] * axis, *is_local.shape, *[1] * (table.ndim - axis - 1)))
    value = op("where")(mask, looked_up, 0.0)
    local.local_values[node.result] = value
    local.splits[node.result] = (*table_split[:axis], *index_split, *table_split[axis + 1 :])
    local.pending[node.result] = frozenset({mesh_axis})
    return True


def shard_row_aligned(local: LocalGraphBuilder, node: Node) -> bool:
    """Partition a lookup of the form ``x[i, indices[i]]`` along ``i``; return whether this was possible."""
    if not _indexes_several_axes(node):
        return False
    x, indices, *updates = [v for v in node.operands if v is not None]
    aligned_axes = [] if node.attributes.get("batch_dims") else row_aligned_axes(local.graph, x, indices)
    split_axes: dict[int, str] = {}
    for k in aligned_axes:
        mesh_axis = next(
            (a for v in (x, indices, *updates) if (a := local.splits[v][k]) is not None and BLOCKS not in a), None
        )
        if mesh_axis is not None and mesh_axis not in split_axes.values():
            split_axes[k] = mesh_axis
    if not split_axes:
        return False
    needs = [tuple(split_axes.get(k) for k in range(v.ndim)) for v in (x, indices, *updates)]
    operands = [local.reshard(v, need) for v, need in zip((x, indices, *updates), needs, strict=True)]
    first = [operation("full")(shape=(1,), value=0, dtype=indices.dtype)] * sizes(indices)[-1]
    for k, mesh_axis in split_axes.items():
        start = local.device_index(mesh_axis) * (sizes(x)[k] // local.mesh.size(mesh_axis))
        first[k] = operation("reshape")(operation("cast")(start, dtype=indices.dtype), shape=(1,))
    operands[1] = operands[1] - operation("concat")(*first, axis=0)
    local.emit(node, operands, LocalRule(tuple(needs), (tuple(split_axes.get(k) for k in range(node.result.ndim)),)))
    return True


def _indexes_several_axes(node: Node) -> bool:
    """Whether each row of the indices addresses several axes."""
    axes = axes_of(node)
    if not axes.lookups or node.op.composite:
        return False
    indices = axes.operands[axes.lookups[0][0]]
    role = axes.role(indices[-1][0]) if indices else None
    return role is not None and role.kind == "whole"
