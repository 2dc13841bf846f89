"""Reductions over axes: sum, mean, prod, max, min, any, all, argmax, argmin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.graph import DType, Node, Op, Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element import scalar_ops
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.elementwise import merge, merged
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed, rounded
from mithril_cbackend.lowering.element.vectorization import gathers_rows, is_plain, pieces, vectorizable

Emit = Callable[[dict[int, Any], t.Expr], None]  # coordinates, element of the result
Block = Callable[[dict[int, Any], Any, int, bool], None]  # coordinates, first element, size, whether vectorized
FOLDS = (ops.sum, ops.mean, ops.prod, ops.max, ops.min, ops.any, ops.all)
UNROLL = 4  # independent vectors of accumulators, enough to hide the latency of a reduction step


def identity(op: Op, dtype: DType) -> t.Expr:
    """Return the identity of a reduction."""
    if op in (ops.any, ops.all):
        return t.const(op is ops.all, "bool")
    if op in (ops.max, ops.min):
        sign = -1 if op is ops.max else 1
        value = sign * math.inf if dtype.is_float else dtype.limits[0 if op is ops.max else 1]
        return t.const(value, computed(dtype))
    return t.const(1 if op is ops.prod else 0, computed(dtype))


def fold(code: t.Code, op: Op, total: t.Expr, x: t.Expr, dtype: DType) -> t.Expr:
    """Reduce one more element into the accumulator."""
    if op in (ops.any, ops.all):
        return t.binary("or" if op is ops.any else "and", total, x)
    if op in (ops.max, ops.min):
        return scalar_ops.extreme("gt" if op is ops.max else "lt", code.let(x), code.let(total), dtype)
    return (scalar_ops.mul if op is ops.prod else scalar_ops.add)(code, total, x, dtype)


def finalize(code: t.Code, op: Op, total: t.Expr, dtype: DType, count: int) -> t.Expr:
    if op is ops.mean:
        total = total / t.const(count, computed(dtype))
    return rounded(code, total, dtype)


def accumulator(dtype: DType) -> str:
    """Return the dtype of the accumulator; bools are stored as bytes."""
    return "uint8" if dtype.is_bool else computed(dtype)


def to_stored(x: t.Expr) -> t.Expr:
    return t.cast(x, "uint8") if x.dtype == "bool" else x


def load_element(buffer: t.Buffer, offset: Any, dtype: DType) -> t.Expr:
    x = t.load(buffer, offset)
    return t.not_equal(x, t.const(0, "uint8")) if dtype.is_bool else x


def array_of(element: t.Expr) -> t.Buffer:
    """Return the array of an element that ``load_element`` read."""
    return (element.node.a if element.dtype == "bool" else element.node).source


def reduce_lanes(frame: KernelBuilder, op: Op, total: Any, lanes: int, dtype: DType, count: int) -> t.Expr:
    """Reduce the lanes of an accumulator to one element by halves."""
    code, reader = frame.code, frame.reader
    while lanes > 1:
        lanes //= 2
        with reader.loop("l", lanes, t.VECTORIZED) as lane:
            other = code.let(load_element(total, lane + lanes, dtype))
            code.store(total, lane, to_stored(fold(code, op, load_element(total, lane, dtype), other, dtype)))
    return finalize(code, op, load_element(total, 0, dtype), dtype, count)


@lowers(*FOLDS, is_producer=True, reads_once=True)
def reduction(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower reductions: loops over the remaining axes around loops over the reduced ones."""
    r = Reduction.of(kernel, name, machine)
    (_along if r.is_along else _across)(r.frame, r.node, r.x, r.shape, r.reduced, r.lanes, r.emit)
    return r.frame.finish()


@dataclass(frozen=True)
class Reduction:
    """A reduction with merged axes."""

    frame: KernelBuilder
    shape: tuple[int, ...]
    reduced: tuple[int, ...]  # axes of ``shape``
    lanes: int  # of its vectors; 0 if the fused operations have none
    emit: Emit

    @staticmethod
    def of(kernel: Kernel, name: str, machine: Machine) -> Reduction:
        frame, node = KernelBuilder(kernel, name, machine), kernel.anchor
        x, axes = operand(node), node.attributes["axis"]
        fused = [n for n in kernel.nodes if n is not node]
        vectors = vectorizable(fused) or gathers_rows(fused)
        lanes = machine.lanes(max(x.dtype.bits, 32)) if vectors else 0
        groups = _joined(kernel, x, axes)
        shape = merge(frame, _read_alike(kernel, x), shape_of(x), groups)
        remaining_axes = {k: group[0] for k, group in enumerate(groups) if group[0] not in axes}
        reduced = tuple(k for k in range(len(groups)) if k not in remaining_axes)

        def emit(coordinates: dict[int, Any], result: t.Expr) -> None:
            index = _result_index(
                node, shape_of(x), axes, {remaining_axes[k]: i for k, i in coordinates.items() if k in remaining_axes}
            )
            frame.emit(index, result)

        return Reduction(frame, shape, reduced, lanes, emit)

    @property
    def node(self) -> Node:
        return self.frame.kernel.anchor

    @property
    def x(self) -> Value:
        return operand(self.node)

    @property
    def is_along(self) -> bool:
        """Whether the last axis is reduced: vectors hold partial results; else they run along the last axis."""
        return not self.shape or len(self.shape) - 1 in self.reduced

    @property
    def kept(self) -> list[int]:
        """The other axes of ``shape``."""
        return [k for k in range(len(self.shape)) if k not in self.reduced]

    @property
    def count(self) -> int:
        """The number of elements that one result reduces."""
        return math.prod(self.shape[k] for k in self.reduced)


def _read_alike(kernel: Kernel, x: Value) -> list[Value] | None:
    """Return the values that are read at the index of x or broadcast to it, or None if others are read, too."""
    producers, values, pending = kernel.producers, dict.fromkeys([x]), [x]
    while pending:
        node = producers.get(pending.pop())
        if node is None:
            continue
        if not is_plain(node):
            return None
        operands = [v for v in node.operands if v is not None and v not in values]
        values.update(dict.fromkeys(operands))
        pending += operands
    operands_elsewhere = (
        v for n in kernel.nodes if n is not kernel.anchor and n.result not in values for v in n.operands
    )
    return None if any(v in values for v in operands_elsewhere) else list(values)


def _joined(kernel: Kernel, x: Value, axes: tuple[int, ...]) -> list[list[int]]:
    """Group adjacent reduced axes, whose loops run as one: short rows cost more than their elements."""
    shape = shape_of(x)
    breaks = [k for k in range(len(shape)) if k not in axes or k - 1 not in axes]
    return merged(_read_alike(kernel, x), shape, breaks)


def _result_index(node: Node, shape: tuple[int, ...], axes: tuple[int, ...], coordinates: dict[int, Any]) -> Index:
    """Return the index of the result."""
    if node.attributes["keepdims"]:
        return tuple(0 if k in axes else coordinates[k] for k in range(len(shape)))
    return tuple(coordinates[k] for k in range(len(shape)) if k not in axes)


def last_size(shape: tuple[Any, ...]) -> Any:
    """Return the size of the last axis, as an expression if it is symbolic."""
    size = shape[-1] if shape else 1
    return size if isinstance(size, int) else t.index(size)


def _along(
    frame: KernelBuilder, node: Node, x: Value, shape: tuple[int, ...], axes: tuple[int, ...], lanes: int, emit: Emit
) -> None:
    op, dtype, code, reader = node.op, x.dtype, frame.code, frame.reader
    outer_axes = [k for k in range(len(shape)) if k not in axes]
    reduced_outer, inner = [k for k in axes if k != len(shape) - 1], last_size(shape)
    is_exact = isinstance(inner, int)
    count = math.prod(shape[k] for k in axes)
    work = math.prod(shape) * len(frame.kernel.nodes)
    if is_exact and 0 < inner < lanes:
        lanes = 1 << inner.bit_length() - 1
    sizes = [shape[k] for k in outer_axes]
    with reader.nest("", sizes, frame.kinds(sizes, work)) as positions:
        coordinates = dict(zip(outer_axes, positions, strict=True))
        # Independent sums hide the latency of an addition; short rows would spend more on adding these
        # up.
        unroll = UNROLL if lanes and (not is_exact or inner >= 2 * UNROLL * lanes) else 1
        width = unroll * max(lanes, 1)
        total = code.alloc("total", width, accumulator(dtype))
        with reader.loop("l", width, t.VECTORIZED if lanes else t.SERIAL) as lane:
            code.store(total, lane, to_stored(identity(op, dtype)))

        def accumulate(lane: Any, position: Any, rest: Index) -> None:
            full = {**coordinates, **dict(zip(reduced_outer, rest, strict=True)), len(shape) - 1: position}
            element = reader.at(x, tuple(full[k] for k in range(len(shape))))
            code.store(total, lane, to_stored(fold(code, op, load_element(total, lane, dtype), element, dtype)))

        if count != 0:
            with reader.nest("", [shape[k] for k in reduced_outer]) as rest:
                num_vectors = inner // lanes if lanes else 0
                for first, num_groups, group in (
                    (0, num_vectors // unroll, unroll),
                    (num_vectors - num_vectors % unroll, num_vectors % unroll, 1),
                ):
                    if num_groups:
                        with reader.loop("i", num_groups) as i:
                            for slot in range(group):
                                with reader.loop("j", lanes, t.VECTORIZED) as j:
                                    vector = i * group + (first + slot)
                                    position = reader.position(vector * lanes + j)
                                    accumulate(j + slot * lanes, position, rest)
                remaining = inner - num_vectors * lanes
                if is_exact and lanes:
                    for start, size in pieces(remaining, lanes):
                        with reader.loop("j", size, t.VECTORIZED) as j:
                            accumulate(j, reader.position(j + (num_vectors * lanes + start)), rest)
                elif remaining:
                    with reader.loop("k", remaining) as k:
                        accumulate(0, reader.position(k + num_vectors * lanes) if num_vectors else k, rest)
        result = reduce_lanes(frame, op, total, width, dtype, count)
        emit(coordinates, result)


def _across(
    frame: KernelBuilder, node: Node, x: Value, shape: tuple[int, ...], axes: tuple[int, ...], lanes: int, emit: Emit
) -> None:
    """Reduce other axes than the last one: accumulate blocks of the last axis."""
    op, dtype, code, reader = node.op, x.dtype, frame.code, frame.reader
    last = len(shape) - 1
    count = math.prod(shape[k] for k in axes)
    work = math.prod(shape) * len(frame.kernel.nodes)

    def block(coordinates: dict[int, Any], begin: Any, width: int, vector: bool) -> None:
        kind = t.VECTORIZED if vector else t.SERIAL
        total = code.alloc("total", width, accumulator(dtype))
        with reader.loop("l", width, kind) as lane:
            code.store(total, lane, to_stored(identity(op, dtype)))
        with reader.nest("", [shape[k] for k in axes]) as positions:
            element_coordinates = {**coordinates, **dict(zip(axes, positions, strict=True))}
            with reader.loop("j", width, kind) as j:
                full = {**element_coordinates, last: reader.position(begin + j)}
                element = reader.at(x, tuple(full[k] for k in range(len(shape))))
                code.store(total, j, to_stored(fold(code, op, load_element(total, j, dtype), element, dtype)))
        with reader.loop("l", width, kind) as lane:
            full = {**coordinates, last: reader.position(begin + lane)}
            result = finalize(code, op, code.let(load_element(total, lane, dtype)), dtype, count)
            emit(full, result)

    over_blocks(frame, shape, axes, lanes, work, block)


def over_blocks(
    frame: KernelBuilder, shape: tuple[int, ...], axes: tuple[int, ...], lanes: int, work: int, block: Block
) -> None:
    """Loop over all axes but ``axes``, the last one in blocks of vectors and a scalar remainder."""
    reader, last = frame.reader, len(shape) - 1
    outer_axes, inner = [k for k in range(last) if k not in axes], last_size(shape)
    if 0 in [shape[k] for k in (*outer_axes, last)]:
        return
    # A device has a thread for each element, instead of vectors.
    if frame.machine.launches:
        extents = [shape[k] for k in (*outer_axes, last)]
        with reader.nest("", extents, frame.kinds(extents, work)) as index:
            block(dict(zip(outer_axes, index, strict=False)), index[-1], 1, False)
        return
    if isinstance(inner, int):
        width = lanes * max(1, min(UNROLL, inner // lanes)) if lanes and inner >= lanes else 0
    else:
        width = lanes
    blocks = inner // width if width else 0
    sizes = [shape[k] for k in outer_axes]
    with reader.nest("", sizes, frame.kinds(sizes, work)) as positions:
        coordinates = dict(zip(outer_axes, positions, strict=True))
        # A single outer position leaves only the blocks to divide among threads.
        kind = frame.parallel(work) if math.prod(sizes) == 1 else t.SERIAL
        if blocks:
            with reader.loop("b", blocks, kind) as b:
                block(coordinates, b * width, width, True)
        remaining = inner - blocks * width
        if isinstance(inner, int) and lanes > 1:
            for start, size in pieces(remaining, lanes):
                block(coordinates, blocks * width + start, size, size > 1)
        elif remaining:
            with reader.loop("b", remaining) as b:
                block(coordinates, b + blocks * width, 1, False)


class Extreme:
    """Best element so far and its position, in every lane: the first of ties, nan before all numbers."""

    def __init__(self, frame: KernelBuilder, lanes: int) -> None:
        node = frame.kernel.anchor
        self.code, self.reader, self.dtype = frame.code, frame.reader, operand(node).dtype
        self.wins = "gt" if node.op is ops.argmax else "lt"
        self.best = self.code.alloc("best", lanes, accumulator(self.dtype))
        self.position = self.code.alloc("place", lanes, "int32")

    def begin(self, lane: Any, element: t.Expr, position: Any) -> None:
        self.code.store(self.best, lane, to_stored(element))
        self.code.store(self.position, lane, t.index(position))

    def consider(self, lane: Any, element: t.Expr, position: Any) -> None:
        """Compare with one more element, at a later position than all before."""
        element, current = self.code.let(to_stored(element)), self.code.let(t.load(self.best, lane))
        self._update(lane, self.beats(element, current), element, position)

    def beats(self, element: t.Expr, current: t.Expr) -> t.Expr:
        better = t.binary(self.wins, element, current)
        if not self.dtype.is_float:
            return better
        return better | t.isnan(element) & ~t.isnan(current)

    def merge(self, lane: Any) -> None:
        """Merge another lane into lane 0; the first of ties wins."""
        best, position = self.code.let(t.load(self.best, lane)), self.code.let(t.load(self.position, lane))
        current, is_earlier = self.code.let(t.load(self.best, 0)), position < t.load(self.position, 0)
        is_tie = ~self.beats(current, best)
        self._update(0, self.beats(best, current) | is_tie & is_earlier, best, position)

    def _update(self, lane: Any, better: t.Expr, element: t.Expr, position: Any) -> None:
        better = self.code.let(better, "better")
        self.code.store(self.best, lane, t.select(better, element, t.load(self.best, lane)))
        self.code.store(self.position, lane, t.select(better, t.index(position), t.load(self.position, lane)))


@lowers(ops.argmax, ops.argmin)
def positions(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``argmax`` and ``argmin``, vectorized along the last axis in either case."""
    frame = KernelBuilder(kernel, name, machine)
    node = kernel.anchor
    x, axis = operand(node), node.attributes["axis"]
    shape, lanes = shape_of(x), machine.lanes(max(x.dtype.bits, 32))
    values = _read_alike(kernel, x) if kernel.outputs == [node.result] else None
    groups = merged(values, shape, breaks=(axis, axis + 1))
    # Neighbors in the results are the lanes of vectors.
    if values is not None and axis < len(shape) - 1:
        shape, axis = merge(frame, values, shape, groups), groups.index([axis])
        frame.reader.shapes[node.result] = (*shape[:axis], *([1] * node.attributes["keepdims"]), *shape[axis + 1 :])
    (_search_along if axis == len(shape) - 1 else _search_across)(frame, node, shape, axis, lanes)
    return frame.finish()


def _search_across(frame: KernelBuilder, node: Node, shape: tuple[int, ...], axis: int, lanes: int) -> None:
    reader, x, last = frame.reader, operand(node), len(shape) - 1

    def block(coordinates: dict[int, Any], begin: Any, width: int, vector: bool) -> None:
        kind, extreme = t.VECTORIZED if vector else t.SERIAL, Extreme(frame, width)

        def element(r: Any, j: Any) -> t.Expr:
            full = {**coordinates, axis: r, last: reader.position(begin + j)}
            return reader.at(x, tuple(full[k] for k in range(len(shape))))

        with reader.loop("j", width, kind) as j:
            extreme.begin(j, element(0, j), 0)
        with reader.loop("r", shape[axis]) as r, reader.loop("j", width, kind) as j:
            extreme.consider(j, element(r, j), r)
        with reader.loop("j", width, kind) as j:
            full = {**coordinates, last: reader.position(begin + j)}
            frame.emit(_result_index(node, shape, (axis,), full), t.load(extreme.position, j))

    over_blocks(frame, shape, (axis,), lanes, math.prod(shape), block)


def _search_along(frame: KernelBuilder, node: Node, shape: tuple[int, ...], axis: int, lanes: int) -> None:
    reader, x, lead = frame.reader, operand(node), shape[:-1]
    lanes = lanes if isinstance(shape[axis], int) and shape[axis] >= lanes else 1
    num_vectors = shape[axis] // lanes
    with reader.nest("", lead, frame.kinds(lead, math.prod(shape))) as index:
        extreme = Extreme(frame, lanes)
        with reader.loop("j", lanes, t.VECTORIZED) as j:
            extreme.begin(j, reader.at(x, (*index, j)), j)
        with reader.loop("i", num_vectors) as i, reader.loop("j", lanes, t.VECTORIZED) as j:
            position = reader.position(i * lanes + j)
            extreme.consider(j, reader.at(x, (*index, position)), position)
        if lanes > 1:
            with reader.loop("l", lanes - 1) as lane:
                extreme.merge(lane + 1)
        if shape[axis] % lanes:
            with reader.loop("r", shape[axis] % lanes) as r:
                position = reader.position(r + num_vectors * lanes)
                extreme.consider(0, reader.at(x, (*index, position)), position)
        frame.emit(_result_index(node, shape, (axis,), dict(enumerate(index))), t.load(extreme.position, 0))
