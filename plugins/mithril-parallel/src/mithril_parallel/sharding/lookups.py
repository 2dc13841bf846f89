"""Look-ups in what is split: tables whose rows are on several devices, and rows that name their own place."""

from __future__ import annotations

from mithril import ops
from mithril.base import operation
from mithril.ir import Node
from mithril_parallel.mesh import BLOCKS
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.local_graph import LocalGraph
from mithril_parallel.sharding.local_rules import Local, own_places


def look_up(local: LocalGraph, node: Node) -> bool:
    """Whether a table is split where it is looked up in: each device then reads its rows, and zeros for the others."""
    if node.op is not ops.take:
        return False
    table, at = node.operands
    assert table is not None
    assert at is not None
    axis = node.attributes["axis"]
    holder = local.splits[table][axis]
    if holder is None or holder in local.turns or holder in local.splits[at] or not table.dtype.is_float:
        return False
    count = sizes(table)[axis]
    part = count // local.mesh.size(holder)
    where, op = local.splits[at], operation
    outer = {a for a in where if a is not None}
    kept = tuple(None if a in outer else a for a in local.splits[table])
    places = local.as_split(at, where)
    rows = local.as_split(table, kept)
    places = op("where")(op("less")(places, 0), places + count, places)
    places = op("clip")(places, low=0, high=count - 1) - op("cast")(local.place(holder) * part, dtype=places.dtype)
    mine = op("logical_and")(op("greater_equal")(places, 0), op("less")(places, part))
    found = op("take")(rows, op("where")(mine, places, 0), axis=axis)
    mask = op("reshape")(mine, shape=(*[1] * axis, *mine.shape, *[1] * (table.ndim - axis - 1)))
    value = op("where")(mask, found, 0.0)
    local.made[node.result] = value
    local.splits[node.result] = (*kept[:axis], *where, *kept[axis + 1 :])
    local.open[node.result] = frozenset({holder})
    return True


def row_by_row(local: LocalGraph, node: Node) -> bool:
    """Whether places count along split axes (``x[i, places[i]]``): then each device has those it needs."""
    if not _takes_places(node):
        return False
    x, at, *updates = [v for v in node.operands if v is not None]
    own = [] if node.attributes.get("batch_dims") else own_places(local.graph, x, at)
    chosen: dict[int, str] = {}
    for k in own:
        entry = next((a for v in (x, at, *updates) if (a := local.splits[v][k]) is not None and BLOCKS not in a), None)
        if entry is not None and entry not in chosen.values():
            chosen[k] = entry
    if not chosen:
        return False
    needs = [tuple(chosen.get(k) for k in range(v.ndim)) for v in (x, at, *updates)]
    operands = [local.as_split(v, need) for v, need in zip((x, at, *updates), needs, strict=True)]
    first = [operation("full")(shape=(1,), value=0, dtype=at.dtype)] * sizes(at)[-1]
    for k, entry in chosen.items():
        start = local.place(entry) * (sizes(x)[k] // local.mesh.size(entry))
        first[k] = operation("reshape")(operation("cast")(start, dtype=at.dtype), shape=(1,))
    operands[1] = operands[1] - operation("concat")(*first, axis=0)
    local.emit(node, operands, Local(tuple(needs), (tuple(chosen.get(k) for k in range(node.result.ndim)),)))
    return True


def _takes_places(node: Node) -> bool:
    """Whether each row of the indices names a place along several axes."""
    axes = node.axes
    if not axes.lookups or node.op.composite:
        return False
    indices = axes.operands[axes.lookups[0][0]]
    role = axes.role(indices[-1][0]) if indices else None
    return role is not None and role.kind == "whole"
