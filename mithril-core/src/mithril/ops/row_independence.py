"""Whether a graph computes each row of its outputs from the same row of its inputs alone.

Rows lie along the axes whose size is one given symbol, the batch's usually. Where rows are apart, a batch may be filled
up with further rows and the results be cut, and nobody can tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mithril.base.dims import Dim, Size, symbols
from mithril.ir import Graph, Node, Value


class _Mixed(Exception):
    """A value that has rows along several axes, or along a part of one."""


def first_mixed(graph: Graph, size: Dim) -> str | None:
    """What mixes rows first, or needs to know how many there are; None where rows are apart throughout."""
    for i in graph.inputs:
        try:
            _place(i.value, size)
        except _Mixed:
            return f"input '{i.name}' of shape [{', '.join(map(str, i.type.shape))}]"
    for node in graph.nodes:
        try:
            apart = _apart(node, size)
        except _Mixed:
            apart = False
        if not apart:
            return f"'{node.op.name}'" + (f" in {node.origin}" if str(node.origin) else "")
    return None


def _place(value: Value, size: Dim) -> int | None:
    """The axis along which a value has rows."""
    found = [axis for axis, n in enumerate(value.shape) if _mentions(n, size)]
    if not found:
        return None
    if len(found) > 1 or value.shape[found[0]] != size:
        raise _Mixed
    return found[0]


def _mentions(thing: Any, size: Dim) -> bool:
    """Whether an attribute or a size depends on how many rows there are."""
    if isinstance(thing, (tuple, list)):
        return any(_mentions(part, size) for part in thing)
    return isinstance(thing, Dim) and size.symbol in symbols(thing)


def _apart(node: Node, size: Dim) -> bool:
    places = [None if v is None else _place(v, size) for v in node.operands]
    results = [_place(v, size) for v in node.results]
    concerned = any(_mentions(a, size) for a in node.attributes.values())
    if all(p is None for p in (*places, *results)) and not concerned:
        return True
    if node.regions:  # bodies say of themselves where rows are; a loop over rows has their number as an attribute
        return not concerned and all(first_mixed(region, size) is None for region in node.regions)
    op: Any = node.op
    if op.elementwise:
        return _aligned(node, places, results[0])
    rule = RULES.get(op.name)
    if rule is not None:
        return rule(node, places, results[0])
    if op.composite:
        types = [None if v is None else v.type for v in node.operands]
        return first_mixed(op.decompose(types, node.attributes), size) is None
    return False


Places = list["int | None"]
Rule = Callable[[Node, Places, "int | None"], bool]


def _operand(node: Node, k: int = 0) -> Value:
    value = node.operands[k]
    assert value is not None
    return value


def _aligned(node: Node, places: Places, at: int | None) -> bool:
    """Shapes that broadcast have their rows at the same distance from the end."""
    ends = {v.ndim - p for v, p in zip(node.operands, places, strict=True) if v is not None and p is not None}
    return at is not None and ends == {node.result.ndim - at}


def _along(node: Node, places: Places, at: int | None) -> bool:
    """What happens along the axes of the attribute does not happen along the rows."""
    axes = node.attributes["axis"]
    return places[0] not in (axes if isinstance(axes, tuple) else (axes,))


def _kept(node: Node, places: Places, at: int | None) -> bool:
    return all(p == at for p in places)


def _slice(node: Node, places: Places, at: int | None) -> bool:
    return places[0] not in node.attributes["axes"]


def _pad(node: Node, places: Places, at: int | None) -> bool:
    return at is not None and not any(node.attributes["widths"][at])


def _reshape(node: Node, places: Places, at: int | None) -> bool:
    """As many elements lie before the rows as after."""
    before: Size = math.prod(_operand(node).shape[: places[0]])
    after: Size = math.prod(node.result.shape[:at])
    return places[0] is not None and at is not None and before == after


def _transpose(node: Node, places: Places, at: int | None) -> bool:
    return at is not None and node.attributes["perm"][at] == places[0]


def _broadcast(node: Node, places: Places, at: int | None) -> bool:
    return places[0] is None or _aligned(node, places, at)


def _concat(node: Node, places: Places, at: int | None) -> bool:
    return node.attributes["axis"] != at and all(p == at for p in places)


def _triangle(node: Node, places: Places, at: int | None) -> bool:
    return at is not None and at < node.result.ndim - 2


def _matmul(node: Node, places: Places, at: int | None) -> bool:
    """Rows are no inner axis, and of two operands with rows they are a batch axis of both."""
    a, b = (_operand(node, k).ndim for k in (0, 1))
    inner = (a - 1, max(b - 2, 0))
    if at is None or any(p == i for p, i in zip(places, inner, strict=True)):
        return False
    if None in places:
        return True
    batch = places[0] < a - 2 and places[1] < b - 2  # type: ignore[operator]
    return batch and a - places[0] == b - places[1]  # type: ignore[operator]


def _dot(node: Node, places: Places, at: int | None) -> bool:
    given = node.attributes
    if places[0] in given["contract_a"] or places[1] in given["contract_b"]:
        return False
    if None in places:
        return places[0] not in given["batch_a"] and places[1] not in given["batch_b"]
    pairs = zip(given["batch_a"], given["batch_b"], strict=True)
    return tuple(places) in set(pairs)


def _images(node: Node, places: Places, at: int | None) -> bool:
    """Images lie along the first axis; of pooling also channels are apart."""
    return at == 0 and places == [0, *[None] * (len(places) - 1)]


def _take(node: Node, places: Places, at: int | None) -> bool:
    table, indices = places
    return indices is not None if table is None else indices is None and table != node.attributes["axis"]


def _take_along(node: Node, places: Places, at: int | None) -> bool:
    return places[0] == places[1] == at != node.attributes["axis"]


def _gather(node: Node, places: Places, at: int | None) -> bool:
    x, indices = places
    if x is None:
        return indices is not None and indices < _operand(node, 1).ndim - 1
    return x == indices and x < node.attributes["batch_dims"]


def _window(node: Node, places: Places, at: int | None) -> bool:
    """A part of each row, at one place for all of them."""
    same = places[0] is not None and _operand(node).shape[places[0]] == node.result.shape[places[0]]
    return same and places[-1] is None and places[0] == at


def _update(node: Node, places: Places, at: int | None) -> bool:
    return places[0] == places[1] == at and places[2] is None


RULES: dict[str, Rule] = {
    **dict.fromkeys(("sum", "prod", "max", "min", "any", "all", "mean", "argmax", "argmin"), _along),
    **dict.fromkeys(("cumsum", "cumprod", "sort", "argsort", "flip"), _along),
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("full", "iota"), lambda node, places, at: True),  # each row of these is there for itself
    **dict.fromkeys(("conv", "max_pool", "max_pool_positions", "avg_pool"), _images),
    "cast": _kept,
    "barrier": lambda node, places, at: True,
    "slice": _slice,
    "pad": _pad,
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast_to": _broadcast,
    "concat": _concat,
    "matmul": _matmul,
    "dot": _dot,
    "take": _take,
    "take_along_axis": _take_along,
    "gather_nd": _gather,
    "dynamic_slice": _window,
    "dynamic_update_slice": _update,
}
