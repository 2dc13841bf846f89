"""Pooling of images whose channels are neighbors, and copies of images to int8x4 groups of channels."""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril.graph import uint8
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import between, clamped, conjunction, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import load, to_storage
from mithril_cbackend.lowering.element.vectorization import pieces, vectorizable
from mithril_cbackend.lowering.int8x4.byte_operations import int8x4_of_pixels, max_pool_last, sum_pool_bytes
from mithril_cbackend.lowering.rows import reductions


@lowers(max_pool_last, sum_pool_bytes, is_producer=True, computes_terms=True)
def byte_pooling(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``c.max_pool_last`` and ``c.sum_pool_bytes``: vectors of channels."""
    frame = KernelBuilder(kernel, name, machine)
    node, reader = kernel.anchor, frame.reader
    height, width, channels = shape_of(node.result)[1:]
    is_alone = kernel.outputs == [node.result] and node.result.dtype is uint8
    lanes = machine.lanes(8 if is_alone else 32)
    vector = vectorizable([n for n in kernel.nodes if n is not node])
    loops = (shape_of(node.result)[0], height, width)
    work = math.prod(shape_of(node.result)) * math.prod(node.attributes["kernel"])
    with reader.nest("nyx", loops, frame.kinds(loops, work)) as pixel:
        vectors = channels // lanes
        if vectors:
            with reader.loop("v", vectors) as v:
                _window(frame, pixel, v * lanes, lanes if vector else 1, lanes)
        for start, size in pieces(channels - vectors * lanes, lanes):
            _window(frame, pixel, vectors * lanes + start, size if vector else 1, size)
    return frame.finish()


def _window(frame: KernelBuilder, pixel: Any, start: Any, lanes: int, size: int) -> None:
    """Combine the elements of the window of a pixel in ``size`` channels."""
    node, reader, code = frame.kernel.anchor, frame.reader, frame.code
    a, is_max = node.attributes, node.op is max_pool_last
    dtype = node.result.dtype
    _, height, width, _ = shape = shape_of(operand(node))
    image = reader.buffers[operand(node)]
    total = code.alloc("total", size, reductions.accumulator(dtype))
    kind = t.VECTORIZED if lanes > 1 else t.SERIAL
    with reader.loop("j", size, kind) as j:
        code.store(total, j, reductions.identity(ops.max if is_max else ops.sum, dtype))
    with reader.several("ab", a["kernel"]) as taps:
        for tap in taps:
            positions, conditions = [], []
            for i, k, n, s, (before, after) in zip(
                pixel[1:], tap, (height, width), a["stride"], a["padding"], strict=True
            ):
                position: Any = i * s + k - before
                if before or after:
                    position = reader.position(position)
                    conditions.append(between(position, 0, n))
                    position = clamped(reader, position, 0, n - 1)  # in the window, as padding is smaller
                positions.append(position)
            is_inside = code.let(conjunction(conditions), "inside") if conditions and not is_max else None
            place = reader.position(t.index(reader.flat((pixel[0], *positions, 0), shape)))
            with reader.loop("j", size, kind) as j:
                element, best = load(image, place + (start + j), operand(node).dtype), t.load(total, j)
                if is_max:
                    code.store(total, j, reductions.fold(code, ops.max, best, element, dtype))
                    continue
                number = t.cast(element, dtype.name)
                if is_inside is not None:
                    number = t.select(is_inside, number, t.const(a["zero"], dtype.name))
                code.store(total, j, best + number)
    with reader.loop("j", size, kind) as j:
        frame.emit((*pixel, start + j), t.load(total, j))


@lowers(int8x4_of_pixels, reads_once=True)
def pixel_int8x4(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``c.int8x4_of_pixels``: vectors of pixels, of which each int8x4 group has a few channels."""
    frame = KernelBuilder(kernel, name, machine)
    node, reader = kernel.anchor, frame.reader
    x = operand(node)
    (batch, channels, height, width), int8x4s = shape_of(x), shape_of(node.result)[3]
    lanes = machine.lanes() if vectorizable([n for n in kernel.nodes if n is not node]) else 1
    loops = (batch, height)
    per = node.attributes["per"]
    full, bits = channels // per, 32 // per

    def int8x4(index: Any, first: Any, elements: int) -> t.Expr:
        result: Any = None
        for k in range(elements):
            element = to_storage(frame.code, reader.at(x, (index[0], first + k, *index[1:])), x.dtype)
            part = t.cast(element, "uint32")
            part = part << t.const(bits * k, "uint32") if k else part
            result = part if result is None else result | part
        assert isinstance(result, t.Expr)
        return result

    def emit(n: Any, y: Any, w: Any, elements: int) -> None:
        aligned = width // lanes * lanes
        for start, size, step in ((0, aligned, lanes), (aligned, width - aligned, 1)):
            if not isinstance(size, int) or size > 0:
                with reader.loop("v", size // step) as v, reader.loop("j", step, t.VECTORIZED) as j:
                    column = v * step + (j + start)
                    frame.write(node.result, (n, y, column, w), int8x4((n, y, column), w * per, elements))

    with reader.nest("ny", loops, frame.kinds(loops, batch * channels * height * width)) as (n, y):
        if full:
            with reader.loop("w", full) as w:
                emit(n, y, w, per)
        if int8x4s > full:
            emit(n, y, full, channels - full * per)
    return frame.finish()
