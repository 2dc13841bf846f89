"""How a split tensor passes through an operation: what the operation needs, what it gives, what must be summed.

A rule gets a node and the splits its operands have, and answers with the splits it works on, the splits of its results,
and the mesh axes over which the results are sums still to be made. Operations without a rule keep a split first axis
where they plainly keep that axis, and need everything else whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mithril import ops
from mithril.base.registry import Registry
from mithril.ir import Node, Value
from mithril.ir.traits import is_product
from mithril_parallel.mesh import Mesh, Split, whole
from mithril_parallel.placing.factors import divide


@dataclass(frozen=True, slots=True)
class Passage:
    """A rule's answer."""

    needs: tuple[Split | None, ...]
    gives: tuple[Split, ...]
    sums: frozenset[str] = field(default_factory=frozenset)


Rule = Callable[[Node, Sequence[Split | None], Mesh], Passage]
RULES: Registry[Rule] = Registry("placing")
rule = RULES


def passage(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    """What ``node`` does to operands with these splits."""
    chosen = RULES.get(node.op.name)
    if chosen is None and node.op.elementwise:
        chosen = _elementwise
    elif chosen is None:
        chosen = _by_axes if is_product(node) else _unknown
    if not any(s is not None and any(s) for s in splits):
        return Passage(tuple(splits), tuple(whole(v.ndim) for v in node.results))
    return chosen(node, splits, mesh)


def sizes(v: Value) -> tuple[int, ...]:
    """The shape as numbers; symbolic sizes count as 1, which nothing divides."""
    return tuple(n if isinstance(n, int) else 1 for n in v.shape)


def _once(split: Sequence[str | None]) -> Split:
    """A mesh axis divides one axis of a tensor at most: the first keeps it."""
    seen: set[str] = set()
    out: list[str | None] = []
    for axis in split:
        out.append(None if axis is None or axis in seen else axis)
        if axis is not None:
            seen.add(axis)
    return tuple(out)


def _join(operands: Sequence[tuple[tuple[int, ...], Split]], shape: Sequence[int]) -> Split:
    """The split of a broadcast result: along each axis that of the first operand that has one there."""
    out: list[str | None] = []
    for k in range(len(shape)):
        back = len(shape) - k
        found = [s[-back] for dims, s in operands if len(dims) >= back and dims[-back] == shape[k] > 1]
        out.append(next((axis for axis in found if axis is not None), None))
    return _once(out)


def as_part(dims: tuple[int, ...], result: Split, shape: Sequence[int]) -> Split:
    """How an operand must be split to fit a broadcast result."""
    return tuple(
        result[len(shape) - len(dims) + k] if dims[k] == shape[len(shape) - len(dims) + k] else None
        for k in range(len(dims))
    )


def _present(node: Node, splits: Sequence[Split | None]) -> list[tuple[tuple[int, ...], Split]]:
    return [(sizes(v), s) for v, s in zip(node.operands, splits, strict=True) if v is not None and s is not None]


def _elementwise(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    shape = sizes(node.result)
    joined = _join(_present(node, splits), shape)
    needs = tuple(None if v is None else as_part(sizes(v), joined, shape) for v in node.operands)
    return Passage(needs, tuple(joined for _ in node.results))


rule("where", "cast", "clip", "stop_gradient", "barrier", "mesh.chunk_sum")(_elementwise)


def _by_axes(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    """Products of other distributions: read off their axes."""
    division = divide(node, splits, mesh)
    return Passage(division.needs, division.gives, frozenset(division.kinds))


def _unknown(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    first, result = node.operands[0] if node.operands else None, node.results[0]
    split = splits[0] if splits else None
    keeps = (
        first is not None
        and split
        and not node.regions
        and first.ndim
        and result.ndim
        and first.shape[0] == result.shape[0]
    )
    leading = split[0] if keeps and split else None
    needs: list[Split | None] = [None if v is None else whole(v.ndim) for v in node.operands]
    if leading is not None and first is not None:
        needs[0] = (leading, *whole(first.ndim - 1))
    gives = tuple(
        (leading, *whole(v.ndim - 1))
        if v.ndim and first is not None and v.shape[0] == first.shape[0]
        else whole(v.ndim)
        for v in node.results
    )
    return Passage(tuple(needs), gives)


# -- moving axes ----------------------------------------------------------------------------------------------------
@rule("transpose")
def _transpose(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    (split,) = splits
    assert split is not None
    return Passage((split,), (tuple(split[k] for k in node.attributes["perm"]),))


@rule("reshape", "squeeze", "unsqueeze")
def _reshape(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    (split,) = splits
    operand = node.operands[0]
    assert split is not None
    assert operand is not None
    before, after = sizes(operand), sizes(node.result)
    need, give = list(whole(len(before))), list(whole(len(after)))
    for left, right in groups(before, after):
        # Of axes that are cut apart only the outermost stays one piece per device. Merged ones may have any of them
        # split: devices then hold strided rows, which the product or sum that reads them does not mind.
        long, cut = [k for k in left if before[k] > 1], [k for k in right if after[k] > 1]
        merged = next((k for k in long if split[k] is not None), None) if len(cut) == 1 else None
        source = merged if merged is not None else next(iter(long), None)
        target = next(iter(cut), None)
        if source is None or target is None or split[source] is None:
            continue
        if mesh.divides(split[source], after[target]):
            need[source] = give[target] = split[source]
    return Passage((tuple(need),), (tuple(give),))


def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Axes of two shapes of one size, in groups of equal products."""
    out: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left: list[int] = []
        right: list[int] = []
        a = b = 1
        while True:
            if a <= b and i < len(before) and (a < b or not left):
                a *= before[i]
                left.append(i)
                i += 1
            elif (b < a and j < len(after)) or (not right and j < len(after)):
                b *= after[j]
                right.append(j)
                j += 1
            else:
                break
            if left and right and a == b:
                break
        if not left and not right:
            break
        out.append((left, right))
    return out


@rule("broadcast_to")
def _broadcast_to(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    return _elementwise(node, splits, mesh)


@rule("concat")
def _concat(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    axis = node.attributes["axis"]
    chosen = [
        None if k == axis else next((s[k] for s in splits if s is not None and s[k] is not None), None)
        for k in range(node.result.ndim)
    ]
    joined = _once(chosen)
    return Passage(tuple(None if v is None else joined for v in node.operands), (joined,))


@rule("slice", "pad", "flip", "cumsum", "cumprod", "sort", "argsort", "tril", "triu", "dynamic_slice")
def _same_axes(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    """Axes whose length stays stay split, but for the one the operation works along."""
    operand, split = node.operands[0], splits[0]
    assert operand is not None
    assert split is not None
    along = node.attributes.get("axis")
    worked = set(along) if isinstance(along, tuple) else {along}
    if node.op in (ops.tril, ops.triu):
        worked = {operand.ndim - 1, operand.ndim - 2}
    kept = tuple(
        axis if operand.shape[k] == node.result.shape[k] and k not in worked else None for k, axis in enumerate(split)
    )
    needs = (kept, *(None if v is None else whole(v.ndim) for v in node.operands[1:]))
    return Passage(needs, tuple(kept for _ in node.results))


# -- contractions ---------------------------------------------------------------------------------------------------
@rule("matmul")
def _matmul(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    a, b = node.operands
    assert a is not None
    assert b is not None
    left, right = splits
    assert left is not None
    assert right is not None
    if a.ndim < 2 or b.ndim < 2:
        return _unknown(node, splits, mesh)
    batch = sizes(node.result)[:-2]
    joined = _join([(sizes(a)[:-2], left[:-2]), (sizes(b)[:-2], right[:-2])], batch)
    used = {axis for axis in joined if axis is not None}
    rows = left[-2] if left[-2] not in used else None
    columns = right[-1] if right[-1] not in used | {rows} else None
    inner = _inner(left[-1], right[-2], {*used, rows, columns})
    gives = (*joined, rows, columns)
    needs = (
        (*as_part(sizes(a)[:-2], joined, batch), rows, inner),
        (*as_part(sizes(b)[:-2], joined, batch), inner, columns),
    )
    return Passage(needs, (gives,), frozenset({inner} if inner else ()))


def _inner(left: str | None, right: str | None, used: set[str | None]) -> str | None:
    """The mesh axis along which a contracted axis stays split: each device then has one term of a sum."""
    return next((axis for axis in (left, right) if axis is not None and axis not in used), None)


@rule("conv", "conv_input_grad")
def _conv(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    """x[N, C, ...] and w[O, I, ...]: N and O as in a product, C with I is contracted; its gradient contracts O."""
    x, w = node.operands[0], node.operands[1]
    left, right = splits[0], splits[1]
    assert x is not None
    assert w is not None
    assert left is not None
    assert right is not None
    forward = node.op is ops.conv
    one_group = node.attributes.get("groups", 1) == 1
    out_axis, in_axis = (0, 1) if forward else (1, 0)
    rows = left[0]
    columns = right[out_axis] if one_group and right[out_axis] != rows else None
    inner = _inner(left[1], right[in_axis], {rows, columns}) if one_group else None
    kernel: list[str | None] = list(whole(w.ndim))
    kernel[out_axis], kernel[in_axis] = columns, inner
    needs = ((rows, inner, *whole(x.ndim - 2)), tuple(kernel), *(None for _ in node.operands[2:]))
    return Passage(
        needs, ((rows, columns, *whole(node.result.ndim - 2)),), frozenset({inner} if inner is not None else ())
    )


@rule("conv_weight_grad")
def _conv_weight_grad(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    x, g = node.operands[0], node.operands[1]
    left, right = splits[0], splits[1]
    assert x is not None
    assert g is not None
    assert left is not None
    assert right is not None
    one_group = node.attributes.get("groups", 1) == 1
    inner = _inner(left[0], right[0], set())
    outs = right[1] if one_group and right[1] != inner else None
    ins = left[1] if one_group and left[1] not in (inner, outs) else None
    needs = ((inner, ins, *whole(x.ndim - 2)), (inner, outs, *whole(g.ndim - 2)), *(None for _ in node.operands[2:]))
    gives = (outs, ins, *whole(node.result.ndim - 2))
    return Passage(needs, (gives,), frozenset({inner} if inner else ()))


# -- reductions -----------------------------------------------------------------------------------------------------
@rule("sum", "mean", "max", "min", "any", "all", "prod")
def _reduce(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    (split,) = splits
    assert split is not None
    gone = set(node.attributes["axis"])
    kept = [axis for k, axis in enumerate(split) if k not in gone]
    if node.attributes["keepdims"]:
        kept = [None if k in gone else axis for k, axis in enumerate(split)]
    return Passage((split,), (tuple(kept),), frozenset(split[k] or "" for k in gone) - {""})


@rule("argmax", "argmin")
def _position(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    (split,) = splits
    assert split is not None
    axis = node.attributes["axis"]
    need = tuple(None if k == axis else a for k, a in enumerate(split))
    kept = need if node.attributes["keepdims"] else tuple(a for k, a in enumerate(need) if k != axis)
    return Passage((need,), (kept,))


@rule("max_pool", "avg_pool", "max_pool_grad", "avg_pool_grad")
def _pool(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    leading = next((s[:2] for s in splits if s is not None and any(s[:2])), (None, None))
    needs = tuple(None if v is None else (*leading, *whole(v.ndim - 2)) for v in node.operands)
    return Passage(needs, tuple((*leading, *whole(v.ndim - 2)) for v in node.results))


# -- looking up -----------------------------------------------------------------------------------------------------
@rule("take")
def _take(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    """A table split along the axis looked up in gives each device the rows it has, zeros elsewhere, to be summed."""
    split, where = splits
    assert split is not None
    assert where is not None
    axis = node.attributes["axis"]
    outer = {a for a in where if a is not None}
    kept = tuple(None if a in outer else a for a in split)
    gives = (*kept[:axis], *where, *kept[axis + 1 :])
    summed = kept[axis]
    return Passage((kept, where), (gives,), frozenset({summed} if summed is not None else ()))


@rule("scatter_nd_add")
def _scatter_add(node: Node, splits: Sequence[Split | None], mesh: Mesh) -> Passage:
    """Updates split along their rows are sums still to be made."""
    into, at, updates = node.operands
    _, where, given = splits
    assert into is not None
    assert at is not None
    assert updates is not None
    assert where is not None
    assert given is not None
    depth = sizes(at)[-1]
    rows = at.ndim - 1
    split_rows = _once([w or g for w, g in zip(where[:rows], given[:rows], strict=True)])
    inner = {a for a in split_rows if a is not None}
    columns = tuple(None if a in inner else a for a in given[rows:])
    return Passage(
        ((*whole(depth), *columns), (*split_rows, None), (*split_rows, *columns)),
        ((*whole(depth), *columns),),
        frozenset(inner),
    )
