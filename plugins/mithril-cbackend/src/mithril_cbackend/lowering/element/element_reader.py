"""Element reader: the element of a value at an index as an expression, by which operations are fused into a kernel.

Each operation whose elements depend only on single elements of its operands has a rule: element-wise operations use
``scalar_ops``, data movement maps the index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product as cartesian
from typing import Any

from mithril import ops
from mithril.graph import Dim, Node, Registry, ShapeError, Size, Value, substitute, symbols
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import scalar_ops
from mithril_cbackend.lowering.element.storage_dtypes import computed, load, rounded

# Positions of an element, one expression for each axis.
Index = tuple[Any, ...]
Rule = Callable[["Reader", Node, Index], t.Expr]
RULES: Registry[Rule] = Registry("reading elements in C")
rule = RULES


TYPICAL = 8  # the value of a symbolic size for which kernels are scheduled


def typical(size: Size) -> int:
    """Return a size, or the value of a symbolic one for which its schedule is selected."""
    return int(substitute(size, {s.name: max(s.low, TYPICAL) for s in symbols(size)}))


def shape_of(value: Value) -> tuple[Any, ...]:
    """Return the sizes of a value: ints, and ``Dim`` where they are arguments of the program."""
    return tuple(n if isinstance(n, Dim) else int(n) for n in value.shape)


class Reader:
    """Builder of element expressions, each evaluated once per block of code."""

    def __init__(
        self,
        code: t.Code,
        producers: Mapping[Value, Node],
        buffers: dict[Value, t.Buffer],
        in_bounds: frozenset[Node] = frozenset(),  # gathers whose positions need no clamps
    ) -> None:
        self.code = code
        self.in_bounds = in_bounds
        self.producers = producers
        self.buffers = buffers
        self.shapes: dict[Value, tuple[int, ...]] = {}  # shapes of values with merged axes
        # joined, padded or gathered value -> axis along which the current loop reads neighbors, their operand, and the
        # position of an element minus that of its source
        self.sources: dict[Node, tuple[int, int, int]] = {}
        # One table per block of code: an element that was computed in a loop is unknown after it.
        self.elements: list[dict[Any, t.Expr]] = [{}]
        self._keep_alive: list[Any] = []  # indices, which must stay alive because their ids are keys

    def shape(self, value: Value) -> tuple[int, ...]:
        merged = self.shapes.get(value)
        return merged if merged is not None else shape_of(value)

    # -- code -----------------------------------------------------------------------------------------------------
    @contextmanager
    def loop(self, name: str, extent: Any, kind: Any = t.SERIAL) -> Iterator[Any]:
        with self.code.loop(name, extent, kind) as i:
            self.elements.append({})
            yield i
            self.elements.pop()

    def either(self, condition: Any, yes: Callable[[], None], no: Callable[[], None]) -> None:
        """Generate one of two branches for a static condition (a bool), else both and a test at run time."""
        if isinstance(condition, bool):
            (yes if condition else no)()
            return
        blocks = []
        for write in (yes, no):
            with self.block() as block:
                write()
            blocks.append(block)
        self.code.either(condition, *blocks)

    @contextmanager
    def block(self) -> Iterator[list[Any]]:
        """Collect statements in a separate list."""
        self.elements.append({})
        with self.code.block() as statements:
            yield statements
        self.elements.pop()

    @contextmanager
    def nest(self, names: str, extents: Sequence[int], kinds: Mapping[int, Any] | None = None) -> Iterator[Index]:
        """Open loops over all indices of a shape; several parallel ones are one loop."""
        if not extents:
            yield ()
            return
        if kinds is not None and list(kinds.values()).count(t.PARALLEL) > 1:
            with self.loop("thread", math.prod(extents), t.PARALLEL) as flat:
                yield self.split(flat, extents)
            return
        with self._nest(names, list(extents), dict(kinds or {}), 0) as index:
            yield index

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
    def several(self, names: str, extents: Sequence[int], limit: int = 9) -> Iterator[list[Index]]:
        """Yield all indices of a small shape, to be unrolled, or the single index of a loop nest over it."""
        if all(isinstance(n, int) for n in extents) and math.prod(extents) <= limit:
            yield list(cartesian(*map(range, extents)))
            return
        with self.nest(names, extents) as index:
            yield [index]

    # -- elements -------------------------------------------------------------------------------------------------
    def key(self, value: Value, index: Index) -> Any:
        self._keep_alive.append(index)
        return (value, tuple(i if isinstance(i, int) else ("e", id(i)) for i in index))

    def define(self, value: Value, index: Index, element: t.Expr) -> None:
        """Define an element for the rest of the current block."""
        self.elements[-1][self.key(value, index)] = element

    def at(self, value: Value, index: Index) -> t.Expr:
        """Return the element of a value at an index."""
        key = self.key(value, index)
        for elements in reversed(self.elements):
            element: t.Expr | None = elements.get(key)
            if element is not None:
                return element
        buffer = self.buffers.get(value)
        if buffer is not None:
            result = load(buffer, self.flat(index, self.shape(value)), value.dtype)
        else:
            node = self.producers[value]
            result = RULES[node.op.name](self, node, index)
        result = self.code.let(result, value.name)
        self.elements[-1][key] = result
        return result

    def flat(self, index: Index, shape: Sequence[int]) -> Any:
        """Return the row-major offset of an index."""
        total: Any = 0
        for k, (i, n) in enumerate(zip(index, shape, strict=True)):
            total = (total * n if k else 0) + (0 if isinstance(n, int) and n == 1 else i)
        return total

    def split(self, flat: Any, shape: Sequence[int]) -> Index:
        """Return the index of a row-major offset."""
        out: list[Any] = []
        if flat != 0 and not all(isinstance(n, int) for n in shape):
            flat = t.index(flat)
        for k, n in enumerate(shape):
            i = self.position(flat) // math.prod(shape[k + 1 :])
            is_first = math.prod(shape[:k]) == 1  # only axes of size 1 precede it
            out.append(0 if n == 1 else self.position(i if is_first else i % n))
        return tuple(out)

    def position(self, index: Any) -> Any:
        """Name a position that is used more than once, unless it is affine: vector loads must analyze it."""
        if isinstance(index, int):
            return index
        index = t.index(index)
        return index if t.is_affine(index) else self.code.let(index, "at")

    def broadcast(self, value: Value, index: Index) -> t.Expr:
        """Return the element that is broadcast to an index of a larger shape."""
        shape = self.shape(value)
        lead = len(index) - len(shape)
        return self.at(value, tuple(0 if n == 1 else index[lead + k] for k, n in enumerate(shape)))


# -- element-wise -------------------------------------------------------------------------------------------------
def is_uniform(node: Node | None) -> bool:
    """Whether all elements are one constant of the graph."""
    return node is not None and node.op in (ops.constant, ops.full)


def _elementwise(reader: Reader, node: Node, index: Index) -> t.Expr:
    operands = [reader.broadcast(v, index) for v in node.operands if v is not None]
    first = node.operands[0]
    assert first is not None
    kind = first.dtype if node.op is not ops.where else node.result.dtype
    result = scalar_ops.apply(reader.code, node.op, operands, kind, node.attributes)
    return rounded(reader.code, result, node.result.dtype)


for _name in scalar_ops.RULES:
    RULES[_name] = _elementwise


@rule(ops.constant, ops.full)
def _constant(reader: Reader, node: Node, index: Index) -> t.Expr:
    value, dtype = node.attributes["value"], node.result.dtype
    return t.const(float(dtype.numpy.type(value)) if dtype.is_float else value, computed(dtype))


@rule(ops.size_value)
def _size_value(reader: Reader, node: Node, index: Index) -> t.Expr:
    return t.const(node.attributes["value"], "int32")


@rule(ops.iota)
def _iota(reader: Reader, node: Node, index: Index) -> t.Expr:
    dtype = node.result.dtype
    return rounded(reader.code, t.cast(t.index(index[node.attributes["axis"]]), computed(dtype)), dtype)


# -- data movement ------------------------------------------------------------------------------------------------
def operand(node: Node, k: int = 0) -> Value:
    """Return an operand of a node, which is present."""
    value = node.operands[k]
    assert value is not None
    return value


@rule(ops.broadcast_to)
def _broadcast_to(reader: Reader, node: Node, index: Index) -> t.Expr:
    return reader.broadcast(operand(node), index)


@rule(ops.barrier)
def _barrier(reader: Reader, node: Node, index: Index) -> t.Expr:
    return reader.at(operand(node), index)


@rule(ops.reshape)
def _reshape(reader: Reader, node: Node, index: Index) -> t.Expr:
    x = operand(node)
    return reader.at(x, unflattened(reader, index, reader.shape(node.result), shape_of(x)))


def unflattened(reader: Reader, index: Index, shape: Sequence[int], target_shape: Sequence[int]) -> Index:
    """Map an index to a reshaped value; groups of axes with equal products are mapped separately."""
    out: list[Any] = []
    a = b = 0
    while a < len(shape) or b < len(target_shape):
        left, right = a, b
        m = n = 1
        while m != n or (a == left and b == right):
            if (typical(m) <= typical(n) and a < len(shape)) or b == len(target_shape):
                m *= shape[a]
                a += 1
            else:
                n *= target_shape[b]
                b += 1
        flat = reader.flat(index[left:a], shape[left:a])
        out += _split(reader, flat, target_shape[right:b])
    return tuple(out)


def _split(reader: Reader, flat: Any, shape: Sequence[int]) -> list[Any]:
    if not shape:
        return []
    axis = max(range(len(shape)), key=lambda k: typical(shape[k]))
    if math.prod(shape) == shape[axis]:  # only one axis is longer than one
        flat = reader.position(flat)
        return [flat if k == axis and shape[k] != 1 else 0 for k in range(len(shape))]
    return list(reader.split(flat, shape))


@rule(ops.transpose)
def _transpose(reader: Reader, node: Node, index: Index) -> t.Expr:
    perm = node.attributes["perm"]
    return reader.at(operand(node), tuple(index[perm.index(k)] for k in range(len(perm))))


@rule(ops.slice)
def _slice(reader: Reader, node: Node, index: Index) -> t.Expr:
    x, source_index = operand(node), list(index)
    a = node.attributes
    for start, stop, step, axis in zip(a["starts"], a["stops"], a["steps"], a["axes"], strict=True):
        first = first_position(start, stop, step, shape_of(x)[axis])
        source_index[axis] = reader.position(index[axis] * step + first)
    return reader.at(x, tuple(source_index))


def first_position(start: Size, stop: Size, step: int, size: Size) -> Any:
    """Return the position of a slice's first element; on a symbolic axis, of slices from the beginning or the end."""
    if all(isinstance(n, int) for n in (start, stop, size)):
        return slice(start, stop, step).indices(size)[0]
    # Python clamps starts at run time. Only the first position and the last one are inside of an axis
    # of any size.
    if step < 0 or (start != 0 and size - start != 1):
        raise ShapeError(f"a slice of the symbolic size '{size}' begins at '{start}'")
    return t.index(start)


@rule(ops.flip)
def _flip(reader: Reader, node: Node, index: Index) -> t.Expr:
    shape, axes = shape_of(operand(node)), node.attributes["axis"]
    return reader.at(
        operand(node),
        tuple(reader.position(shape[k] - 1 - i) if k in axes else i for k, i in enumerate(index)),
    )


def clamped(reader: Reader, index: Any, low: int, high: int) -> Any:
    """Clamp an index to low..high inclusive."""
    if isinstance(index, int) and isinstance(high, int):
        return min(max(index, low), high)
    index = reader.position(index)
    index = reader.position(t.select(index < low, t.index(low), index))
    return reader.position(t.select(index > high, t.index(high), index))


def between(index: Any, low: int, high: int) -> t.Expr:
    """Whether low <= at < high."""
    if isinstance(index, int) and isinstance(high, int):
        return t.const(low <= index < high, "bool")
    position: t.Expr = t.index(index)
    return (position >= low) & (position < high)


def conjunction(conditions: list[t.Expr]) -> t.Expr:
    result = t.const(True, "bool")
    for k, condition in enumerate(conditions):
        result = condition if k == 0 else result & condition
    return result


@rule(ops.pad)
def _pad(reader: Reader, node: Node, index: Index) -> t.Expr:
    x, widths, mode = operand(node), node.attributes["widths"], node.attributes["mode"]
    shape, conditions, source_index = shape_of(x), [], []
    inner_axis, _, _ = reader.sources.get(node, (-1, 0, 0))
    for k, (i, n, (before, after)) in enumerate(zip(index, shape, widths, strict=True)):
        if before == 0 and after == 0:
            source_index.append(i)
            continue
        shifted = reader.position(i - int(before))
        if k == inner_axis:
            source_index.append(shifted)
            continue
        conditions.append(between(shifted, 0, n))
        source_index.append(_copied_from(reader, shifted, n, mode))
    fill = _constant(reader, node, index)
    if 0 in shape:
        return fill
    element = reader.at(x, tuple(source_index))
    return element if mode != "constant" or not conditions else t.select(conjunction(conditions), element, fill)


def _copied_from(reader: Reader, shifted: Any, n: int, mode: str) -> Any:
    """Return the position of the element that padding repeats at a position outside the axis."""
    inner = clamped(reader, shifted, 0, n - 1)
    if mode in ("constant", "edge"):
        return inner
    if mode == "reflect":
        return reader.position(inner * 2 - shifted)
    side = clamped(reader, reader.position(shifted - inner), -1, 1)
    return reader.position(shifted - side * n if mode == "wrap" else inner * 2 - shifted + side)


def _from_source(reader: Reader, node: Node, index: Index) -> t.Expr:
    """Read an element of the operand that the current loop stays within."""
    axis, k, shift = reader.sources[node]
    return reader.at(operand(node, k), (*index[:axis], reader.position(index[axis] - shift), *index[axis + 1 :]))


@rule(ops.concat)
def _concat(reader: Reader, node: Node, index: Index) -> t.Expr:
    if node in reader.sources:
        return _from_source(reader, node, index)
    axis, result, end = node.attributes["axis"], None, 0
    for x in node.operands:
        assert x is not None
        n, start = shape_of(x)[axis], end
        end += n
        if 0 in shape_of(x):
            continue
        offset = clamped(reader, index[axis] - start, 0, n - 1)
        element = reader.at(x, (*index[:axis], offset, *index[axis + 1 :]))
        is_reached = t.index(index[axis]) >= start
        result = element if result is None else reader.code.let(t.select(is_reached, element, result), "joined")
    assert result is not None
    return result


@rule(ops.tril, ops.triu)
def _triangle(reader: Reader, node: Node, index: Index) -> t.Expr:
    edge = t.index(index[-2] + int(node.attributes["k"]))
    condition = t.binary("le" if node.op is ops.tril else "ge", t.index(index[-1]), edge)
    zero = t.const(0, computed(node.result.dtype))
    return t.select(condition, reader.at(operand(node), index), zero)


# -- gathers and dynamic slices -----------------------------------------------------------------------------------
def position_in(reader: Reader, positions: Value, index: Index, size: int) -> Any:
    """Read an index: negative values count from the end, and the result is clamped to the bounds."""
    position, dtype = reader.at(positions, index), positions.dtype
    index_dtype = "int64" if dtype.bits == 64 or dtype.name == "uint32" else "int32"
    if dtype.kind == "uint":
        if dtype.limits[1] >= size:
            limit = t.const(size - 1, dtype.name)
            position = t.select(position > limit, limit, position)
        return reader.code.let(t.cast(position, "int32"), "at")
    last = t.const(size - 1, index_dtype)
    if t.is_widened(position):
        position = t.cast(position, index_dtype)
        return reader.code.let(t.cast(t.select(position > last, last, position), "int32"), "at")
    position = reader.code.let(t.cast(position, index_dtype), "at")
    zero, count = t.const(0, index_dtype), t.const(size, index_dtype)
    position = reader.code.let(t.select(position < zero, position + count, position), "at")
    position = t.select(position < zero, zero, t.select(position > last, last, position))
    return reader.code.let(t.cast(position, "int32"), "at")


def _position_of(reader: Reader, node: Node, index: Index) -> Any:
    """Read the position of an element along the axis of a gather."""
    if node in reader.in_bounds:
        return reader.code.let(t.cast(reader.at(operand(node, 1), index), "int32"), "at")
    return position_in(reader, operand(node, 1), index, shape_of(operand(node))[node.attributes["axis"]])


@rule(ops.take)
def _take(reader: Reader, node: Node, index: Index) -> t.Expr:
    if node in reader.sources:
        return _from_source(reader, node, index)
    x, indices, axis = operand(node), operand(node, 1), node.attributes["axis"]
    rank = len(indices.shape)
    position = _position_of(reader, node, index[axis : axis + rank])
    return reader.at(x, (*index[:axis], position, *index[axis + rank :]))


@rule(ops.take_along_axis)
def _take_along_axis(reader: Reader, node: Node, index: Index) -> t.Expr:
    x, indices, axis = operand(node), operand(node, 1), node.attributes["axis"]

    def broadcast(value: Value) -> list[Any]:
        sizes = zip(index, shape_of(value), shape_of(node.result), strict=True)
        return [0 if k != axis and n == 1 != full else i for k, (i, n, full) in enumerate(sizes)]

    first = broadcast(x)
    position = _position_of(reader, node, tuple(broadcast(indices)))
    return reader.at(x, (*first[:axis], position, *first[axis + 1 :]))


@rule(ops.gather_nd)
def _gather_nd(reader: Reader, node: Node, index: Index) -> t.Expr:
    x, indices, batch = operand(node), operand(node, 1), node.attributes["batch_dims"]
    rank, depth, shape = len(indices.shape) - 1, shape_of(indices)[-1], shape_of(x)
    positions = [position_in(reader, indices, (*index[:rank], k), shape[batch + k]) for k in range(depth)]
    return reader.at(x, (*index[:batch], *positions, *index[rank:]))


# -- random numbers -----------------------------------------------------------------------------------------------
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _sum(a: t.Expr, b: t.Expr) -> t.Expr:
    """Add modulo 2**32."""
    return t.cast(t.cast(a, "uint64") + t.cast(b, "uint64"), "uint32")


def threefry(reader: Reader, key: Value, high: t.Expr, low: t.Expr) -> tuple[t.Expr, t.Expr]:
    """Apply the twenty rounds of Threefry-2x32 to a pair of 32-bit words."""
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
def _random_bits(reader: Reader, node: Node, index: Index) -> t.Expr:
    number = t.cast(t.index(reader.flat(index, shape_of(node.result))), "uint32")
    a, b = threefry(reader, operand(node), t.const(0, "uint32"), number)
    return a ^ b


@rule(ops.split_key)
def _split_key(reader: Reader, node: Node, index: Index) -> t.Expr:
    a, b = threefry(reader, operand(node), t.const(0, "uint32"), t.cast(t.index(index[0]), "uint32"))
    return t.select(t.equal(t.index(index[1]), 0), a, b)


@rule(ops.fold_in)
def _fold_in(reader: Reader, node: Node, index: Index) -> t.Expr:
    data = operand(node, 1)
    word = scalar_ops.convert(reader.code, reader.at(data, ()), data.dtype, data.dtype)
    a, b = threefry(reader, operand(node), t.const(0, "uint32"), t.cast(word, "uint32"))
    return t.select(t.equal(t.index(index[0]), 0), a, b)
