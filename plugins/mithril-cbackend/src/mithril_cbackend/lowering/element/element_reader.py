"""The element of a value at a position, as an expression: what fuses operations into one kernel.

Operations that give every element from elements of their operands are never run on their own where one kernel can
read through them. Each has a rule here: element-wise ones by ``scalars``, those that move elements by their places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product as every
from typing import Any

from mithril import ops
from mithril.base import Registry
from mithril.ir import Node, Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import scalar_ops
from mithril_cbackend.lowering.element.storage_dtypes import computed, load, rounded

Index = tuple[Any, ...]
Rule = Callable[["Reader", Node, Index], t.Expr]
RULES: Registry[Rule] = Registry("reading elements in C")
rule = RULES


def shape_of(value: Value) -> tuple[int, ...]:
    return tuple(int(n) for n in value.shape)


class Reader:
    """Expressions for elements, each computed once per block of code."""

    def __init__(self, code: t.Code, producers: Mapping[Value, Node], buffers: dict[Value, t.Buffer]) -> None:
        self.code = code
        self.producers = producers
        self.buffers = buffers
        self.shapes: dict[Value, tuple[int, ...]] = {}  # where axes have been merged
        self.given: list[dict[Any, t.Expr]] = [{}]
        self._kept: list[Any] = []  # positions, kept alive because their ids are keys

    def shape(self, value: Value) -> tuple[int, ...]:
        found = self.shapes.get(value)
        return found if found is not None else shape_of(value)

    # -- code -----------------------------------------------------------------------------------------------------
    @contextmanager
    def loop(self, name: str, extent: Any, kind: Any = t.SERIAL) -> Iterator[Any]:
        with self.code.loop(name, extent, kind) as i:
            self.given.append({})
            yield i
            self.given.pop()

    def either(self, condition: Any, yes: Callable[[], None], no: Callable[[], None]) -> None:
        """One of two, by a condition that is known now (a bool) or when the code runs."""
        if isinstance(condition, bool):
            (yes if condition else no)()
            return
        blocks = []
        for write in (yes, no):
            self.given.append({})
            with self.code.block() as block:
                write()
            self.given.pop()
            blocks.append(block)
        self.code.either(condition, *blocks)

    @contextmanager
    def nest(self, names: str, extents: Sequence[int], kinds: Mapping[int, Any] | None = None) -> Iterator[Index]:
        """Loops over all positions of a shape."""
        if not extents:
            yield ()
            return
        with self._nest(names, list(extents), dict(kinds or {}), 0) as found:
            yield found

    @contextmanager
    def _nest(self, names: str, extents: list[int], kinds: dict[int, Any], k: int) -> Iterator[Index]:
        name = names[k] if k < len(names) else f"i{k}"
        with self.loop(name, extents[k], kinds.get(k, t.SERIAL)) as i:
            if k + 1 == len(extents):
                yield (i,)
            else:
                with self._nest(names, extents, kinds, k + 1) as rest:
                    yield (i, *rest)

    @contextmanager
    def several(self, names: str, extents: Sequence[int], most: int = 9) -> Iterator[list[Index]]:
        """All positions of a small shape, one after the other in the code, or those of one round of a loop."""
        if math.prod(extents) <= most:
            yield list(every(*map(range, extents)))
            return
        with self.nest(names, extents) as at:
            yield [at]

    # -- elements -------------------------------------------------------------------------------------------------
    def key(self, value: Value, at: Index) -> Any:
        self._kept.append(at)
        return (value, tuple(i if isinstance(i, int) else ("e", id(i)) for i in at))

    def give(self, value: Value, at: Index, element: t.Expr) -> None:
        """An element that is known from here on."""
        self.given[-1][self.key(value, at)] = element

    def at(self, value: Value, at: Index) -> t.Expr:
        """The element of a value at a position."""
        key = self.key(value, at)
        for elements in reversed(self.given):
            element: t.Expr | None = elements.get(key)
            if element is not None:
                return element
        buffer = self.buffers.get(value)
        if buffer is not None:
            made = load(buffer, self.flat(at, self.shape(value)), value.dtype)
        else:
            node = self.producers[value]
            made = RULES[node.op.name](self, node, at)
        made = self.code.let(made, value.name)
        self.given[-1][key] = made
        return made

    def flat(self, at: Index, shape: Sequence[int]) -> Any:
        """The number of a position in row-major order."""
        total: Any = 0
        for k, (i, n) in enumerate(zip(at, shape, strict=True)):
            total = (total * n if k else 0) + (0 if isinstance(n, int) and n == 1 else i)
        return total

    def split(self, flat: Any, shape: Sequence[int]) -> Index:
        """The position that has a number in row-major order."""
        out: list[Any] = []
        stride = math.prod(shape)
        for k, n in enumerate(shape):
            stride //= n
            i = self.position(flat) // stride
            out.append(self.position(i % n if k and n != 1 else (i if n != 1 else 0)))
        return tuple(out)

    def position(self, at: Any) -> Any:
        """A position that is used more than once: by name, unless it is a sum, which vector loads must see through."""
        return at if isinstance(at, int) or t.is_affine(at) else self.code.let(at, "at")

    def broadcast(self, value: Value, at: Index) -> t.Expr:
        """The element that meets a position of a larger shape."""
        shape = self.shape(value)
        lead = len(at) - len(shape)
        return self.at(value, tuple(0 if n == 1 else at[lead + k] for k, n in enumerate(shape)))


# -- element-wise -------------------------------------------------------------------------------------------------
def is_uniform(node: Node | None) -> bool:
    """Whether all elements are one number that the graph states."""
    return node is not None and node.op in (ops.constant, ops.full)


def _elementwise(reader: Reader, node: Node, at: Index) -> t.Expr:
    operands = [reader.broadcast(v, at) for v in node.operands if v is not None]
    first = node.operands[0]
    assert first is not None
    kind = first.dtype if node.op is not ops.where else node.result.dtype
    made = scalar_ops.apply(reader.code, node.op, operands, kind, node.attributes)
    return rounded(reader.code, made, node.result.dtype)


for _name in scalar_ops.RULES:
    RULES[_name] = _elementwise


@rule(ops.constant, ops.full)
def _constant(reader: Reader, node: Node, at: Index) -> t.Expr:
    value, dtype = node.attributes["value"], node.result.dtype
    return t.const(float(dtype.numpy.type(value)) if dtype.is_float else value, computed(dtype))


@rule(ops.size_value)
def _size_value(reader: Reader, node: Node, at: Index) -> t.Expr:
    return t.const(int(node.attributes["value"]), "int32")


@rule(ops.iota)
def _iota(reader: Reader, node: Node, at: Index) -> t.Expr:
    dtype = node.result.dtype
    return rounded(reader.code, t.cast(t.index(at[node.attributes["axis"]]), computed(dtype)), dtype)


# -- places -------------------------------------------------------------------------------------------------------
def operand(node: Node, k: int = 0) -> Value:
    found = node.operands[k]
    assert found is not None
    return found


@rule(ops.broadcast_to)
def _broadcast_to(reader: Reader, node: Node, at: Index) -> t.Expr:
    return reader.broadcast(operand(node), at)


@rule(ops.barrier)
def _barrier(reader: Reader, node: Node, at: Index) -> t.Expr:
    return reader.at(operand(node), at)


@rule(ops.reshape)
def _reshape(reader: Reader, node: Node, at: Index) -> t.Expr:
    x = operand(node)
    return reader.at(x, unflattened(reader, at, reader.shape(node.result), shape_of(x)))


def unflattened(reader: Reader, at: Index, shape: Sequence[int], wanted: Sequence[int]) -> Index:
    """The same element's position under another shape; groups of axes that make each other up stay apart."""
    out: list[Any] = []
    a = b = 0
    while a < len(shape) or b < len(wanted):
        left, right = a, b
        m = n = 1
        while m != n or (a == left and b == right):
            if (m <= n and a < len(shape)) or b == len(wanted):
                m *= shape[a]
                a += 1
            else:
                n *= wanted[b]
                b += 1
        flat = reader.flat(at[left:a], shape[left:a])
        out += _split(reader, flat, wanted[right:b])
    return tuple(out)


def _split(reader: Reader, flat: Any, shape: Sequence[int]) -> list[Any]:
    if not shape:
        return []
    if math.prod(shape) == max(shape):  # only one axis is longer than one
        where = max(range(len(shape)), key=lambda k: shape[k])
        flat = reader.position(flat)
        return [flat if k == where and shape[k] != 1 else 0 for k in range(len(shape))]
    return list(reader.split(flat, shape))


@rule(ops.transpose)
def _transpose(reader: Reader, node: Node, at: Index) -> t.Expr:
    perm = node.attributes["perm"]
    return reader.at(operand(node), tuple(at[perm.index(k)] for k in range(len(perm))))


@rule(ops.slice)
def _slice(reader: Reader, node: Node, at: Index) -> t.Expr:
    x, found = operand(node), list(at)
    a = node.attributes
    for start, stop, step, axis in zip(a["starts"], a["stops"], a["steps"], a["axes"], strict=True):
        first = slice(int(start), int(stop), step).indices(shape_of(x)[axis])[0]
        found[axis] = reader.position(at[axis] * step + first)
    return reader.at(x, tuple(found))


@rule(ops.flip)
def _flip(reader: Reader, node: Node, at: Index) -> t.Expr:
    shape, axes = shape_of(operand(node)), node.attributes["axis"]
    return reader.at(
        operand(node),
        tuple(reader.position(shape[k] - 1 - i) if k in axes else i for k, i in enumerate(at)),
    )


def clamped(reader: Reader, at: Any, low: int, high: int) -> Any:
    """A position kept from low to high inclusive."""
    if isinstance(at, int):
        return min(max(at, low), high)
    at = reader.position(at)
    at = reader.position(t.select(at < low, t.index(low), at))
    return reader.position(t.select(at > high, t.index(high), at))


def between(at: Any, low: int, high: int) -> t.Expr:
    """Whether low <= at < high."""
    if isinstance(at, int):
        return t.const(low <= at < high, "bool")
    position: t.Expr = at
    return (position >= low) & (position < high)


def conjunction(conditions: list[t.Expr]) -> t.Expr:
    made = t.const(True, "bool")
    for k, condition in enumerate(conditions):
        made = condition if k == 0 else made & condition
    return made


@rule(ops.pad)
def _pad(reader: Reader, node: Node, at: Index) -> t.Expr:
    x, widths, mode = operand(node), node.attributes["widths"], node.attributes["mode"]
    shape, inside, found = shape_of(x), [], []
    for i, n, (before, after) in zip(at, shape, widths, strict=True):
        if before == 0 and after == 0:
            found.append(i)
            continue
        moved = reader.position(i - int(before))
        inside.append(between(moved, 0, n))
        kept = clamped(reader, moved, 0, n - 1)
        found.append(reader.position(kept * 2 - moved) if mode == "reflect" else kept)
    fill = _constant(reader, node, at)
    if 0 in shape:
        return fill
    made = reader.at(x, tuple(found))
    return made if mode != "constant" or not inside else t.select(conjunction(inside), made, fill)


@rule(ops.concat)
def _concat(reader: Reader, node: Node, at: Index) -> t.Expr:
    axis, made, end = node.attributes["axis"], None, 0
    for x in node.operands:
        assert x is not None
        n, start = shape_of(x)[axis], end
        end += n
        if 0 in shape_of(x):
            continue
        place = clamped(reader, at[axis] - start, 0, n - 1)
        element = reader.at(x, (*at[:axis], place, *at[axis + 1 :]))
        here = t.index(at[axis]) >= start
        made = element if made is None else reader.code.let(t.select(here, element, made), "joined")
    assert made is not None
    return made


@rule(ops.tril, ops.triu)
def _triangle(reader: Reader, node: Node, at: Index) -> t.Expr:
    edge = t.index(at[-2] + int(node.attributes["k"]))
    kept = t.binary("le" if node.op is ops.tril else "ge", t.index(at[-1]), edge)
    zero = t.const(0, computed(node.result.dtype))
    return t.select(kept, reader.at(operand(node), at), zero)


# -- computed places ----------------------------------------------------------------------------------------------
def position_in(reader: Reader, positions: Value, at: Index, size: int) -> Any:
    """A position that is read: negative ones count from the end, what is outside is moved inside."""
    found, dtype = reader.at(positions, at), positions.dtype
    wide = "int64" if dtype.bits == 64 or dtype.name == "uint32" else "int32"
    if dtype.kind == "uint":
        if dtype.limits[1] >= size:
            limit = t.const(size - 1, dtype.name)
            found = t.select(found > limit, limit, found)
        return reader.code.let(t.cast(found, "int32"), "at")
    found = reader.code.let(t.cast(found, wide), "at")
    zero, count = t.const(0, wide), t.const(size, wide)
    found = reader.code.let(t.select(found < zero, found + count, found), "at")
    last = t.const(size - 1, wide)
    found = t.select(found < zero, zero, t.select(found > last, last, found))
    return reader.code.let(t.cast(found, "int32"), "at")


@rule(ops.take)
def _take(reader: Reader, node: Node, at: Index) -> t.Expr:
    x, indices, axis = operand(node), operand(node, 1), node.attributes["axis"]
    rank = len(indices.shape)
    place = position_in(reader, indices, at[axis : axis + rank], shape_of(x)[axis])
    return reader.at(x, (*at[:axis], place, *at[axis + rank :]))


@rule(ops.take_along_axis)
def _take_along_axis(reader: Reader, node: Node, at: Index) -> t.Expr:
    x, axis = operand(node), node.attributes["axis"]
    place = position_in(reader, operand(node, 1), at, shape_of(x)[axis])
    return reader.at(x, (*at[:axis], place, *at[axis + 1 :]))


@rule(ops.gather_nd)
def _gather_nd(reader: Reader, node: Node, at: Index) -> t.Expr:
    x, indices, batch = operand(node), operand(node, 1), node.attributes["batch_dims"]
    rank, depth, shape = len(indices.shape) - 1, shape_of(indices)[-1], shape_of(x)
    places = [position_in(reader, indices, (*at[:rank], k), shape[batch + k]) for k in range(depth)]
    return reader.at(x, (*at[:batch], *places, *at[rank:]))


def window_starts(reader: Reader, starts: Value, shape: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Where a part of a known size begins, moved inside so that it does not overrun."""
    found: list[Any] = []
    for k, (n, size) in enumerate(zip(shape, sizes, strict=True)):
        if n == size:
            found.append(0)
            continue
        dtype = starts.dtype
        wide = "int64" if dtype.bits == 64 or dtype.name == "uint32" else "int32"
        start = reader.at(starts, (k,))
        if dtype.name == "uint64":
            limit = t.const(n, "uint64")
            start = t.select(start > limit, limit, start)
        start = reader.code.let(t.cast(start, wide), "start")
        zero, last = t.const(0, wide), t.const(n - size, wide)
        wrapped = start + t.const(n, wide)
        start = reader.code.let(t.select(start < zero, wrapped, start), "start")
        start = t.select(start < zero, zero, t.select(start > last, last, start))
        found.append(reader.code.let(t.cast(start, "int32"), "start"))
    return found


@rule(ops.dynamic_slice)
def _dynamic_slice(reader: Reader, node: Node, at: Index) -> t.Expr:
    x, starts = operand(node), operand(node, 1)
    begin = window_starts(reader, starts, shape_of(x), shape_of(node.result))
    return reader.at(x, tuple(reader.position(b + i) for b, i in zip(begin, at, strict=True)))


@rule(ops.dynamic_update_slice)
def _dynamic_update_slice(reader: Reader, node: Node, at: Index) -> t.Expr:
    x, update, starts = (operand(node, k) for k in range(3))
    if 0 in shape_of(update):
        return reader.at(x, at)
    begin = window_starts(reader, starts, shape_of(x), shape_of(update))
    inside, places = [], []
    for b, i, n in zip(begin, at, shape_of(update), strict=True):
        place = reader.position(i - b)
        inside.append(between(place, 0, n))
        places.append(clamped(reader, place, 0, n - 1))
    return t.select(conjunction(inside), reader.at(update, tuple(places)), reader.at(x, at))


# -- random numbers -----------------------------------------------------------------------------------------------
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _sum(a: t.Expr, b: t.Expr) -> t.Expr:
    """Modulo 2**32."""
    return t.cast(t.cast(a, "uint64") + t.cast(b, "uint64"), "uint32")


def threefry(reader: Reader, key: Value, high: t.Expr, low: t.Expr) -> tuple[t.Expr, t.Expr]:
    """Twenty rounds over a pair of 32-bit words."""
    let = reader.code.let
    k0, k1 = reader.at(key, (0,)), reader.at(key, (1,))
    parity = t.const(0x1BD11BDA, "uint32")
    keys = (k0, k1, let(k0 ^ k1 ^ parity, "k2"))
    x0, x1 = let(_sum(high, keys[0]), "x0"), let(_sum(low, keys[1]), "x1")
    for block in range(5):
        for r in ROTATIONS[block % 2]:
            x0 = let(_sum(x0, x1), "x0")
            up = x1 << t.const(r, "uint32")
            x1 = up | x1 >> t.const(32 - r, "uint32")
            x1 = let(x1 ^ x0, "x1")
        x0 = let(_sum(x0, keys[(block + 1) % 3]), "x0")
        x1 = let(_sum(_sum(x1, keys[(block + 2) % 3]), t.const(block + 1, "uint32")), "x1")
    return x0, x1


@rule(ops.random_bits)
def _random_bits(reader: Reader, node: Node, at: Index) -> t.Expr:
    number = t.cast(t.index(reader.flat(at, shape_of(node.result))), "uint32")
    a, b = threefry(reader, operand(node), t.const(0, "uint32"), number)
    return a ^ b


@rule(ops.split_key)
def _split_key(reader: Reader, node: Node, at: Index) -> t.Expr:
    a, b = threefry(reader, operand(node), t.const(0, "uint32"), t.cast(t.index(at[0]), "uint32"))
    return t.select(t.equal(t.index(at[1]), 0), a, b)


@rule(ops.fold_in)
def _fold_in(reader: Reader, node: Node, at: Index) -> t.Expr:
    data = operand(node, 1)
    word = scalar_ops.convert(reader.code, reader.at(data, ()), data.dtype, data.dtype)
    a, b = threefry(reader, operand(node), t.const(0, "uint32"), t.cast(word, "uint32"))
    return t.select(t.equal(t.index(at[0]), 0), a, b)
