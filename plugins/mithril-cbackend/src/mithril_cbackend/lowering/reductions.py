"""Reductions over axes: sums, products, extremes, truth, positions of extremes."""

from __future__ import annotations

import math
from typing import Any

from mithril.graph import Node, Value
from mithril.types import DType
from mithril_cbackend import tir as t
from mithril_cbackend.kernel import Kernel
from mithril_cbackend.lowering import scalars
from mithril_cbackend.lowering.dtypes import computed, rounded
from mithril_cbackend.lowering.elementwise import vectorisable
from mithril_cbackend.lowering.frame import Frame, Machine
from mithril_cbackend.lowering.reader import Index, operand, shape_of

FOLDS = ("sum", "mean", "prod", "max", "min", "any", "all")


def start(op: str, dtype: DType) -> t.Expr:
    """What a reduction of nothing gives."""
    if op in ("any", "all"):
        return t.const(op == "all", "bool")
    if op in ("max", "min"):
        sign = -1 if op == "max" else 1
        value = sign * math.inf if dtype.is_float else dtype.limits[0 if op == "max" else 1]
        return t.const(value, computed(dtype))
    return t.const(1 if op == "prod" else 0, computed(dtype))


def fold(code: t.Code, op: str, total: t.Expr, x: t.Expr, dtype: DType) -> t.Expr:
    """One more element."""
    if op in ("any", "all"):
        return t.binary("or" if op == "any" else "and", total, x)
    if op in ("max", "min"):
        return scalars.extreme("gt" if op == "max" else "lt", code.let(x), code.let(total), dtype)
    return scalars.RULES["mul" if op == "prod" else "add"](code, total, x, dtype)


def finished(code: t.Code, op: str, total: t.Expr, dtype: DType, count: int) -> t.Expr:
    if op == "mean":
        total = t.binary("div", total, t.const(count, computed(dtype)))
    return rounded(code, total, dtype)


def accumulator(dtype: DType) -> str:
    """Bools are accumulated as bytes."""
    return "uint8" if dtype.is_bool else computed(dtype)


def held(x: t.Expr) -> t.Expr:
    return t.cast(x, "uint8") if t.dtype_of(x) == "bool" else x


def read(buffer: t.Buffer, at: Any, dtype: DType) -> t.Expr:
    x = t.load(buffer, at)
    return t.binary("ne", x, t.const(0, "uint8")) if dtype.is_bool else x


def gathered(frame: Frame, op: str, total: Any, lanes: int, dtype: DType, count: int) -> t.Expr:
    """What the lanes of an accumulator come to: halves are folded together until one element is left."""
    code, reader = frame.code, frame.reader
    while lanes > 1:
        lanes //= 2
        with reader.loop("l", lanes, t.VECTORIZED) as lane:
            other = code.let(read(total, t.iadd(lane, lanes), dtype))
            code.store(total, lane, held(fold(code, op, read(total, lane, dtype), other, dtype)))
    return finished(code, op, read(total, 0, dtype), dtype, count)


def reduction(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Any axes: loops over what is kept, inside them loops over what is reduced.

    Where the last axis is reduced, vectors of partial results run along it; else they run along what is kept.
    """
    frame = Frame(kernel, name, machine)
    node = kernel.anchor
    x, axes = operand(node), node.attributes["axis"]
    shape = shape_of(x)
    vectors = vectorisable([n for n in kernel.nodes if n is not node])
    lanes = machine.lanes(max(x.dtype.bits, 32)) if vectors else 0
    if not shape or len(shape) - 1 in axes:
        _along(frame, node, x, shape, axes, lanes)
    else:
        _across(frame, node, x, shape, axes, lanes)
    return frame.finish()


def _kept(node: Node, shape: tuple[int, ...], axes: tuple[int, ...], at: dict[int, Any]) -> Index:
    """The result's position."""
    if node.attributes["keepdims"]:
        return tuple(0 if k in axes else at[k] for k in range(len(shape)))
    return tuple(at[k] for k in range(len(shape)) if k not in axes)


def _along(frame: Frame, node: Node, x: Value, shape: tuple[int, ...], axes: tuple[int, ...], lanes: int) -> None:
    op, dtype, code, reader = node.op.name, x.dtype, frame.code, frame.reader
    kept = [k for k in range(len(shape)) if k not in axes]
    outer, inner = [k for k in axes if k != len(shape) - 1], shape[-1] if shape else 1
    count = math.prod(shape[k] for k in axes)
    work = math.prod(shape) * len(frame.kernel.nodes)
    lanes = lanes if inner >= lanes else 0
    sizes = [shape[k] for k in kept]
    with reader.nest("", sizes, frame.kinds(sizes, work)) as positions:
        at = dict(zip(kept, positions, strict=True))
        width = max(lanes, 1)
        total = code.alloc("total", width, accumulator(dtype))
        with reader.loop("l", width, t.VECTORIZED if lanes else t.SERIAL) as lane:
            code.store(total, lane, held(start(op, dtype)))

        def take(lane: Any, place: Any, rest: Index) -> None:
            full = {**at, **dict(zip(outer, rest, strict=True)), len(shape) - 1: place}
            element = reader.at(x, tuple(full[k] for k in range(len(shape))))
            code.store(total, lane, held(fold(code, op, read(total, lane, dtype), element, dtype)))

        if count:
            with reader.nest("", [shape[k] for k in outer]) as rest:
                whole = inner // lanes if lanes else 0
                if whole:
                    with reader.loop("i", whole) as i, reader.loop("j", lanes, t.VECTORIZED) as j:
                        take(j, reader.position(t.iadd(t.imul(i, lanes), j)), rest)
                left = inner - whole * lanes
                if left:
                    with reader.loop("k", left) as k:
                        take(0, reader.position(t.iadd(k, whole * lanes)) if whole else k, rest)
        made = gathered(frame, op, total, width, dtype, count)
        frame.emit(_kept(node, shape, axes, at), made)


def _across(frame: Frame, node: Node, x: Value, shape: tuple[int, ...], axes: tuple[int, ...], lanes: int) -> None:
    """The last axis is kept: blocks of it are accumulated side by side."""
    op, dtype, code, reader = node.op.name, x.dtype, frame.code, frame.reader
    last = len(shape) - 1
    kept = [k for k in range(len(shape)) if k not in axes and k != last]
    count, inner = math.prod(shape[k] for k in axes), shape[-1]
    work = math.prod(shape) * len(frame.kernel.nodes)

    def block(at: dict[int, Any], begin: Any, width: int, vector: bool) -> None:
        kind = t.VECTORIZED if vector else t.SERIAL
        total = code.alloc("total", width, accumulator(dtype))
        with reader.loop("l", width, kind) as lane:
            code.store(total, lane, held(start(op, dtype)))
        with reader.nest("", [shape[k] for k in axes]) as positions:
            there = {**at, **dict(zip(axes, positions, strict=True))}
            with reader.loop("j", width, kind) as j:
                full = {**there, last: reader.position(t.iadd(begin, j))}
                element = reader.at(x, tuple(full[k] for k in range(len(shape))))
                code.store(total, j, held(fold(code, op, read(total, j, dtype), element, dtype)))
        with reader.loop("l", width, kind) as lane:
            full = {**at, last: reader.position(t.iadd(begin, lane))}
            made = finished(code, op, code.let(read(total, lane, dtype)), dtype, count)
            frame.emit(_kept(node, shape, axes, full), made)

    if 0 in [shape[k] for k in (*kept, last)]:
        return
    width = lanes * max(1, min(4, inner // lanes)) if lanes and inner >= lanes else 0
    blocks = inner // width if width else 0
    sizes = [shape[k] for k in kept]
    with reader.nest("", sizes, frame.kinds(sizes, work)) as positions:
        at = dict(zip(kept, positions, strict=True))
        kind = frame.parallel(work) if math.prod(sizes) == 1 else t.SERIAL
        if blocks:
            with reader.loop("b", blocks, kind) as b:
                block(at, t.imul(b, width), width, True)
        left = inner - blocks * width
        if left:
            with reader.loop("b", left) as b:
                block(at, t.iadd(b, blocks * width), 1, False)


def positions(kernel: Kernel, name: str, machine: Machine) -> Any:
    """argmax and argmin: the first of equals, nan before all."""
    frame = Frame(kernel, name, machine)
    node, code, reader = kernel.anchor, frame.code, frame.reader
    x, axis = operand(node), node.attributes["axis"]
    shape, dtype = shape_of(x), operand(node).dtype
    kept = [k for k in range(len(shape)) if k != axis]
    wins = "gt" if node.op.name == "argmax" else "lt"
    sizes = [shape[k] for k in kept]
    with reader.nest("", sizes, frame.kinds(sizes, math.prod(shape))) as found:
        at = dict(zip(kept, found, strict=True))
        best, place = code.alloc("best", 1, accumulator(dtype)), code.alloc("place", 1, "int32")
        first = tuple({**at, axis: 0}[k] for k in range(len(shape)))
        code.store(best, 0, held(reader.at(x, first)))
        code.store(place, 0, t.index(0))
        with reader.loop("r", shape[axis]) as r:
            element = reader.at(x, tuple({**at, axis: r}[k] for k in range(len(shape))))
            known = t.load(best, 0)
            element = held(element)
            better = t.binary(wins, element, known)
            if dtype.is_float:
                both = t.binary("and", t.isnan(element), t.logical_not(t.isnan(known)))
                better = t.binary("or", better, both)
            with code.when(code.let(better, "better")):
                code.store(best, 0, element)
                code.store(place, 0, t.index(r))
        frame.emit(_kept(node, shape, (axis,), at), t.load(place, 0))
    return frame.finish()
