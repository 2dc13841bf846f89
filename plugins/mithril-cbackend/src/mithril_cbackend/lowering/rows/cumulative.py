"""Cumulative sums and products, and sorting along an axis."""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril.graph import DType, TensorType, Value, int32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import rounded
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.rows import reductions


@lowers(ops.cumsum, ops.cumprod, reads_once=True)
def cumulative(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``cumsum`` and ``cumprod``, vectorized over the last axis if the cumulative axis is another one."""
    frame = KernelBuilder(kernel, name, machine)
    node, code, reader = kernel.anchor, frame.code, frame.reader
    x, axis = operand(node), node.attributes["axis"]
    op, dtype, shape = ops.sum if node.op is ops.cumsum else ops.prod, x.dtype, shape_of(x)
    work = math.prod(shape) * len(kernel.nodes)

    def run(coordinates: dict[int, Any], begin: Any, width: int, vector: bool) -> None:
        """Accumulate along the axis for ``width`` neighbors of the last axis."""
        kind = t.VECTORIZED if vector else t.SERIAL
        total = code.alloc("total", width, reductions.accumulator(dtype))
        with reader.loop("j", width, kind) as j:
            code.store(total, j, reductions.identity(op, dtype))
        with reader.loop("r", shape[axis]) as r, reader.loop("j", width, kind) as j:
            position = shape[axis] - 1 - r if node.attributes["reverse"] else r
            full = {len(shape) - 1: reader.position(begin + j), **coordinates, axis: position}
            index = tuple(full[k] for k in range(len(shape)))
            previous = code.let(t.load(total, j), "before")
            current = code.let(reductions.fold(code, op, previous, reader.at(x, index), dtype), "after")
            frame.write(node.result, index, rounded(code, previous if node.attributes["exclusive"] else current, dtype))
            code.store(total, j, current)

    if axis == len(shape) - 1:
        with reader.nest("", shape[:-1], frame.kinds(shape[:-1], work)) as index:
            run(dict(enumerate(index)), 0, 1, False)
    else:
        vectors = vectorizable([n for n in kernel.nodes if n is not node])
        lanes = machine.lanes(max(dtype.bits, 32)) if vectors else 0
        reductions.over_blocks(frame, shape, (axis,), lanes, work, run)
    return frame.finish()


def comes_before(a: t.Expr, b: t.Expr, dtype: DType, descending: bool) -> t.Expr:
    """Whether a precedes b in the sorted order; nan is last in either direction."""
    if dtype.is_bool:
        a, b = t.cast(a, "uint8"), t.cast(b, "uint8")
    first = t.binary("gt" if descending else "lt", a, b)
    if not dtype.is_float:
        return first
    return first | t.isnan(b) & ~t.isnan(a)


def sort_buffer(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return the scratch buffer: two arrays of positions along the axis."""
    length = shape_of(operand(kernel.anchor))[kernel.anchor.attributes["axis"]]
    return [Value("scratch", TensorType(int32, (2 * length,)))]


@lowers(ops.sort, ops.argsort, scratch=sort_buffer)
def sorting(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``sort`` and ``argsort`` as a stable bottom-up merge sort of positions."""
    frame = KernelBuilder(kernel, name, machine)
    node, code, reader = kernel.anchor, frame.code, frame.reader
    x, axis, descending = operand(node), node.attributes["axis"], node.attributes["descending"]
    shape, n = shape_of(x), shape_of(x)[axis]
    scratch = frame.outputs[kernel.scratch[0]]
    outer_axes = [k for k in range(len(shape)) if k != axis]
    passes = max(n - 1, 0).bit_length()
    with reader.nest("", [shape[k] for k in outer_axes]) as outer_index:
        coordinates = dict(zip(outer_axes, outer_index, strict=True))

        def index_of(position: Any) -> Index:
            return tuple({**coordinates, axis: position}[k] for k in range(len(shape)))

        with reader.loop("i", n) as i:
            code.store(scratch, i, t.index(i))
        for k in range(passes):
            source, target = (0, n) if k % 2 == 0 else (n, 0)
            _merge(
                frame, scratch, source, target, 1 << k, n, lambda p, q: _before(frame, x, index_of, p, q, descending)
            )
        sorted_at = n if passes % 2 else 0
        with reader.loop("i", n) as i:
            position = code.let(t.load(scratch, i + sorted_at), "place")
            frame.write(
                node.result, index_of(i), position if node.op is ops.argsort else reader.at(x, index_of(position))
            )
    return frame.finish()


def _before(frame: KernelBuilder, x: Any, index_of: Any, p: t.Expr, q: t.Expr, descending: bool) -> t.Expr:
    a, b = frame.reader.at(x, index_of(p)), frame.reader.at(x, index_of(q))
    return comes_before(a, b, x.dtype, descending)


def _merge(frame: KernelBuilder, scratch: Any, source: int, target: int, width: int, n: int, precedes: Any) -> None:
    """Merge each two adjacent sorted runs of ``width`` positions into one."""
    code, reader = frame.code, frame.reader

    def minimum(a: t.Expr, b: int) -> t.Expr:
        return t.select(a < b, a, t.index(b))

    with reader.loop("run", -(-n // (2 * width))) as run:
        begin = code.let(t.index(run * (2 * width)), "begin")
        middle = code.let(minimum(begin + width, n), "middle")
        end = code.let(minimum(begin + 2 * width, n), "end")
        left, right = code.alloc("left", 1, "int32"), code.alloc("right", 1, "int32")
        code.store(left, 0, begin)
        code.store(right, 0, middle)
        with reader.loop("k", end - begin) as k:
            i, j = code.let(t.load(left, 0), "i"), code.let(t.load(right, 0), "j")
            p = code.let(t.load(scratch, minimum(i, n - 1) + source), "p")
            q = code.let(t.load(scratch, minimum(j, n - 1) + source), "q")
            stays = (j >= end) | ~precedes(q, p)
            first = code.let((i < middle) & stays, "first")
            code.store(scratch, begin + k + target, t.select(first, p, q))
            code.store(left, 0, t.select(first, i + 1, i))
            code.store(right, 0, t.select(first, j, j + 1))
