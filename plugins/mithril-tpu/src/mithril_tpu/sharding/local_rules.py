"""Which operations run on parts of their operands, exactly; everything else runs on whole ones, on every device.

The placing rules say what a compiler makes of a split. Here nobody comes after: a rule is only used where the operation
on parts, with its attributes changed to sizes of parts, gives parts of the result, bit for bit what one device computes
but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from mithril.ir import Graph, Node, Value
from mithril_tpu.partitioning.mesh import BLOCKS, Mesh, Split, base, blocks, in_blocks, whole
from mithril_tpu.partitioning.rules import Passage, groups, passage, sizes

Splits = Sequence[Split | None]


@dataclass(frozen=True)
class Local:
    """How a node runs on parts. ``joins`` says over which axes its results are joined at once, and how."""

    needs: tuple[Split | None, ...]
    gives: tuple[Split, ...]
    sums: frozenset[str] = frozenset()
    attributes: Mapping[str, Any] = field(default_factory=dict)  # those that change
    scale: float = 1.0  # of sums that stand for means
    joins: Mapping[str, str] = field(default_factory=dict)


Rule = Callable[[Graph, Node, Splits, Mesh], Local | None]
RULES: dict[str, Rule] = {}

# Operations whose placing rules are exact as they stand; the attributes named here hold the result's shape.
PLACED = {
    "transpose": "",
    "cast": "",
    "mesh.chunk_sum": "",
    "where": "",
    "concat": "",
    "tril": "",
    "triu": "",
    "cumsum": "",
    "cumprod": "",
    "flip": "",
    "sort": "",
    "argsort": "",
    "argmax": "",
    "argmin": "",
    "conv": "",
    "dot": "",
    "max_pool": "",
    "max_pool_positions": "",
    "max_pool_grad": "",
    "avg_pool": "",
    "broadcast_to": "shape",
    "conv_input_grad": "shape",
    "conv_weight_grad": "shape",
    "avg_pool_grad": "shape",
}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return enter


def local(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local | None:
    """How ``node`` runs on operands split so; None where it wants whole ones."""
    if node.op.name == "reshape":
        return _reshape(node, splits, mesh)
    entries = {base(a): a for split in splits for a in split or () if a is not None and BLOCKS in a}
    if not entries:
        return _local(graph, node, splits, mesh)
    # Whatever is divided in the same blocks goes along as if it were divided as a whole; what is not is gathered first.
    plain = [None if s is None else tuple(_plain(a, entries) for a in s) for s in splits]
    found = _local(graph, node, plain, mesh)
    if found is None:
        return None
    needs = tuple(None if s is None else tuple(entries.get(a or "", a) for a in s) for s in found.needs)
    return replace(found, needs=needs, gives=tuple(tuple(entries.get(a or "", a) for a in s) for s in found.gives))


def _plain(axis: str | None, entries: Mapping[str, str]) -> str | None:
    if axis is None or base(axis) not in entries:
        return axis
    return base(axis) if entries[base(axis)] == axis else None


def _local(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local | None:
    found = RULES.get(node.op.name)
    if found is not None:
        return found(graph, node, splits, mesh)
    shaped = PLACED.get(node.op.name, "" if getattr(node.op, "elementwise", False) else None)
    return None if shaped is None else _as_local(node, passage(node, splits, mesh), mesh, shaped)


def _as_local(node: Node, made: Passage, mesh: Mesh, shaped: str = "") -> Local:
    attributes = {shaped: mesh.local(sizes(node.result), made.gives[0])} if shaped else {}
    return Local(made.needs, made.gives, made.sums, attributes)


def _without(split: Split, axes: Sequence[int]) -> Split:
    return tuple(None if k in axes else a for k, a in enumerate(split))


def _first(node: Node, splits: Splits) -> tuple[Value, Split]:
    x, split = node.operands[0], splits[0]
    assert x is not None
    assert split is not None
    return x, split


def _along(node: Node, need: Split, mesh: Mesh, **attributes: Any) -> Local:
    """The first operand is split so, the others are whole, and results are split like the first."""
    rest = (None if v is None else whole(v.ndim) for v in node.operands[1:])
    return Local((need, *rest), tuple(need for _ in node.results), attributes=attributes)


# -- moving -----------------------------------------------------------------------------------------------------------
def _reshape(node: Node, splits: Splits, mesh: Mesh) -> Local:
    """An inner one of axes that become one leaves blocks, which become an axis again where it is taken apart."""
    x, split = _first(node, splits)
    before, after = sizes(x), sizes(node.result)
    need, give = list(whole(len(before))), list(whole(len(after)))
    for left, right in groups(before, after):
        source = next((k for k in left if split[k] is not None), None)
        if source is None or 0 in before:
            continue
        axis = split[source]
        assert axis is not None
        outer = blocks(axis) * prod(before[k] for k in left if k < source)
        for k in right:
            if outer % after[k]:
                if after[k] % outer == 0 and after[k] // outer % mesh.size(axis) == 0:
                    need[source], give[k] = axis, in_blocks(base(axis), outer)
                break
            outer //= after[k]
    return Local((tuple(need),), (tuple(give),), attributes={"shape": mesh.local(after, tuple(give))})


@rule("slice")
def _slice(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    _, split = _first(node, splits)
    return _along(node, _without(split, node.attributes["axes"]), mesh)


@rule("pad")
def _pad(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    _, split = _first(node, splits)
    return _along(node, _without(split, [k for k, w in enumerate(node.attributes["widths"]) if any(w)]), mesh)


@rule("dynamic_slice")
def _dynamic_slice(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    x, split = _first(node, splits)
    sizes_ = node.attributes["sizes"]
    need = _without(split, [k for k, n in enumerate(sizes_) if n != x.shape[k]])
    return _along(node, need, mesh, sizes=mesh.local(sizes_, need))


@rule("dynamic_update_slice")
def _dynamic_update_slice(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    x, split = _first(node, splits)
    update, starts = node.operands[1], node.operands[2]
    assert update is not None
    assert starts is not None
    need = _without(split, [k for k, n in enumerate(update.shape) if n != x.shape[k]])
    return Local((need, need, whole(starts.ndim)), (need,))


@rule("barrier")
def _barrier(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    kept = tuple(whole(v.ndim) if s is None else s for v, s in zip(node.results, splits, strict=True))
    return Local(kept, kept)


# -- products ---------------------------------------------------------------------------------------------------------
@rule("matmul")
def _matmul(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    a, b = node.operands
    left, right = splits
    assert a is not None
    assert b is not None
    assert left is not None
    assert right is not None
    if min(a.ndim, b.ndim) > 1:
        return _as_local(node, passage(node, splits, mesh), mesh)
    rows, columns = left[:-1], (*right[:-2], *right[-1:]) if b.ndim > 1 else ()
    kept = (*rows, *columns)  # of a product with a vector one of the two is empty
    along = left[-1] or (right[0] if b.ndim == 1 else right[-2])
    inner = None if along in kept else along
    needs = ((*rows, inner), (inner,) if b.ndim == 1 else (*right[:-2], inner, right[-1]))
    return Local(needs, (kept,), frozenset({inner} if inner is not None else ()))


@rule("linear")
def _linear(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local | None:
    """By rows of ``x`` and columns of the product; a sum over devices cannot come before bias and activation."""
    _, split = _first(node, splits)
    weight = splits[1]
    assert weight is not None
    rows = split[:-1]
    if split[-1] is not None and split[-1] == weight[1]:
        return None
    columns = weight[0] if weight[0] not in rows else None
    needs = [(*rows, None), (columns, None), (columns,)][: len(node.operands)]
    if len(node.operands) > 2 and node.operands[2] is None:
        return Local((needs[0], needs[1], None), ((*rows, columns),))
    return Local(tuple(needs), ((*rows, columns),))


@rule("attention")
def _attention(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    """Examples and heads are apart from each other; groups of heads that share keys stay together."""
    _, split = _first(node, splits)
    k, v, mask = node.operands[1:4]
    assert k is not None
    assert v is not None
    heads = split[1] if isinstance(k.shape[1], int) and mesh.divides(split[1], k.shape[1]) else None
    need = (split[0], heads, None, None)
    masked = None
    if mask is not None:
        last = tuple(
            a if mask.shape[k - 4 + mask.ndim] != 1 else None for k, a in enumerate(need) if k >= 4 - mask.ndim
        )
        masked = last
    return Local((need, need, need, masked)[: len(node.operands)], (need,))


# -- along an axis ----------------------------------------------------------------------------------------------------
@rule("softmax", "log_softmax", "rms_norm")
def _normalised(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    _, split = _first(node, splits)
    return _along(node, _without(split, (node.attributes["axis"],)), mesh)


@rule("layer_norm")
def _layer_norm(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    x, split = _first(node, splits)
    return _along(node, _without(split, [k % x.ndim for k in node.attributes["axes"]]), mesh)


@rule("batch_norm", "group_norm")
def _channels(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    x, split = _first(node, splits)
    return _along(node, (split[0], *whole(x.ndim - 1)), mesh)


@rule("sum", "mean", "max", "min", "any", "all", "prod")
def _reduce(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local | None:
    made = passage(node, splits, mesh)
    name = node.op.name
    if not made.sums:
        return _as_local(node, made, mesh)
    if name in ("sum", "mean"):
        scale = 1.0
        for axis in made.sums if name == "mean" else ():
            scale /= mesh.size(axis)
        return Local(made.needs, made.gives, made.sums, scale=scale)
    if name in ("max", "min"):
        return Local(made.needs, made.gives, joins=dict.fromkeys(sorted(made.sums), name))
    return None


@rule("take_along_axis")
def _take_along_axis(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    x, split = _first(node, splits)
    at, other = node.operands[1], splits[1]
    assert at is not None
    assert other is not None
    axis = node.attributes["axis"]
    used: list[str] = []
    need: list[str | None] = []
    for k in range(x.ndim):
        chosen = split[k] or other[k]
        fits = k != axis and chosen is not None and chosen not in used and x.shape[k] == at.shape[k]
        need.append(chosen if fits else None)
        used += [chosen] if fits and chosen is not None else []
    return Local((tuple(need), tuple(need)), (tuple(need),))


@rule("gather_nd")
def _gather_nd(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    """Leading axes that both have go along; others are whole."""
    x, split = _first(node, splits)
    at, other = node.operands[1], splits[1]
    assert at is not None
    assert other is not None
    batch = node.attributes["batch_dims"]
    lead = tuple(
        (a or b) if x.shape[k] == at.shape[k] else None
        for k, (a, b) in enumerate(zip(split, other, strict=False))
        if k < batch
    )
    if not batch:  # rows of indices are apart from each other
        return Local((whole(x.ndim), (*other[:-1], None)), ((*other[:-1], *whole(node.result.ndim - at.ndim + 1)),))
    if len([a for a in lead if a]) != len({a for a in lead if a}):
        lead = whole(batch)
    return Local(
        ((*lead, *whole(x.ndim - batch)), (*lead, *whole(at.ndim - batch))),
        ((*lead, *whole(node.result.ndim - batch)),),
    )


@rule("take")
def _take(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    """Places may be split, and axes that are not looked up along. Rows of a split table are found by ``looked_up``."""
    _, split = _first(node, splits)
    at, where = node.operands[1], splits[1]
    assert at is not None
    assert where is not None
    axis = node.attributes["axis"]
    outer = {a for a in where if a is not None}
    kept = tuple(None if a in outer or k == axis else a for k, a in enumerate(split))
    return Local((kept, where), ((*kept[:axis], *where, *kept[axis + 1 :]),))


@rule("scatter_nd")
def _scatter_nd(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local:
    """Axes that are not looked up along may be split."""
    into, at, updates = node.operands
    assert into is not None
    assert at is not None
    assert updates is not None
    depth, rows = sizes(at)[-1], at.ndim - 1
    mine, given = splits[0], splits[2]
    assert mine is not None
    assert given is not None
    columns: list[str | None] = []
    for a, b in zip(mine[depth:], given[rows:], strict=True):
        columns.append(a or b if (a or b) not in columns else None)
    need = (*whole(depth), *columns)
    return Local((need, whole(at.ndim), (*whole(rows), *columns)), (need,))


@rule("scatter_nd_add")
def _scatter_nd_add(graph: Graph, node: Node, splits: Splits, mesh: Mesh) -> Local | None:
    """Into zeros every device may add what it has; the sum over devices is the whole."""
    into = node.operands[0]
    assert into is not None
    if is_zero(graph, into):
        return _as_local(node, passage(node, splits, mesh), mesh)
    return _scatter_nd(graph, node, splits, mesh)


def own_places(graph: Graph, x: Value, at: Value) -> list[int]:
    """Axes along which each row of places in ``at`` names its own place in ``x``, as ``x[i, places[i]]`` does."""
    stacked = graph.producers.get(at)
    if stacked is None or stacked.op.name != "concat" or stacked.attributes["axis"] != at.ndim - 1:
        return []
    found = []
    for k, v in enumerate(stacked.operands):
        while v is not None and (node := graph.producers.get(v)) is not None and node.op.name in ("reshape", "cast"):
            v = node.operands[0]
        counts = v is not None and node is not None and node.op.name == "iota" and node.attributes["axis"] == k
        if counts and v is not None and v.shape == at.shape[:-1] and x.shape[k] == at.shape[k]:
            found.append(k)
    return found if len(stacked.operands) == sizes(at)[-1] else []


def is_zero(graph: Graph, v: Value) -> bool:
    """Whether a value is zero everywhere, and known to be."""
    while (node := graph.producers.get(v)) is not None:
        if node.op.name in ("full", "constant"):
            return bool(node.attributes["value"] == 0)
        if node.op.name not in ("broadcast_to", "cast", "reshape") or node.operands[0] is None:
            return False
        v = node.operands[0]
    return False
