"""Element-wise kernels: fused chains of element-wise operations and data movement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from mithril import ops
from mithril.graph import Node, Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.dynamic_slices import update_starts
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.repetition import repeat_elements, repetition
from mithril_cbackend.lowering.element.segments import Segments, segments_of
from mithril_cbackend.lowering.element.transpose import final_transpose, transpose_squares
from mithril_cbackend.lowering.element.vectorization import is_plain, pieces, vectorizable

# Nodes of a kernel whose rows, shorter than a vector, are several vectors: LLVM takes about a millisecond for a node in
# a loop of vectors.
SMALL = 8


def aligned_values(kernel: Kernel) -> list[Value] | None:
    """Return the values that are read at the results' index or broadcast to it, or None if others are read, too.

    The traversal stops at the anchor of a template and at reshapes, which change the index. A value that is read on
    both sides of a reshape has two shapes, so its axes cannot be merged.
    """
    producers = {v: n for v, n in kernel.producers.items() if n is not kernel.anchor or kernel.template is elementwise}
    aligned, pending, elsewhere = dict.fromkeys(kernel.outputs), list(kernel.outputs), list[Value]()
    while pending:
        node = producers.get(pending.pop())
        if node is None:
            continue
        operands = [v for v in node.operands if v is not None]
        if node.op is ops.reshape:
            elsewhere += operands
        elif is_plain(node):
            pending += [v for v in operands if v not in aligned]
            aligned.update(dict.fromkeys(operands))
        else:
            return None
    return None if any(v in aligned for v in _upstream(producers, elsewhere)) else list(aligned)


def _upstream(producers: Mapping[Value, Node], values: Iterable[Value]) -> set[Value]:
    """Return the values and their ancestors in the kernel."""
    pending, reached = list(values), set[Value]()
    while pending:
        value = pending.pop()
        if value not in reached:
            reached.add(value)
            node = producers.get(value)
            pending += [v for v in node.operands if v is not None] if node is not None else []
    return reached


def merged(values: Sequence[Value] | None, shape: tuple[int, ...], breaks: Sequence[int] = ()) -> list[list[int]]:
    """Group adjacent axes of ``shape`` that each value has in full or not at all; no group spans a break."""
    return grouped(None if values is None else [(shape_of(v), shape) for v in values], len(shape), breaks)


def grouped(
    shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] | None, rank: int, breaks: Sequence[int] = ()
) -> list[list[int]]:
    """Group adjacent axes that each shape has in full or not at all, relative to the one that it is broadcast to."""
    if shapes is None or any(len(s) > rank for s, _ in shapes):
        return [[k] for k in range(rank)]
    groups: list[list[int]] = []
    pairs = [((1,) * (rank - len(s)) + s, full) for s, full in shapes]
    for k in range(rank):
        if groups and k not in breaks and all(_covers_all_or_none(s, full, [*groups[-1], k]) for s, full in pairs):
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


def _covers_all_or_none(value_shape: tuple[int, ...], shape: tuple[int, ...], axes: list[int]) -> bool:
    """Whether a value has all of the axes in full, or none of them."""
    return all(value_shape[k] == shape[k] for k in axes) or all(value_shape[k] == 1 for k in axes)


def merge(
    frame: KernelBuilder, values: Sequence[Value] | None, shape: tuple[int, ...], groups: list[list[int]]
) -> tuple[int, ...]:
    """Assign all values shapes in which each group is one axis, and return ``shape`` with merged axes."""
    if values is None or len(groups) == len(shape):
        return shape
    for v in values:
        full = (1,) * (len(shape) - len(v.shape)) + shape_of(v)
        frame.reader.shapes[v] = tuple(math.prod(full[k] for k in group) for group in groups)
    return tuple(math.prod(shape[k] for k in group) for group in groups)


def elementwise(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Generate one loop nest over the results, which all have the same shape."""
    frame = KernelBuilder(kernel, name, machine)
    node = None if machine.launches else final_transpose(kernel, machine.lanes())
    if node is not None:
        transpose_squares(frame, node)
        return frame.finish()
    node = None if machine.launches else repetition(kernel, machine.lanes())
    if node is not None:
        repeat_elements(frame, node)
        return frame.finish()
    parts = None if machine.launches else segments_of(kernel)
    if parts is not None:
        over_segments(frame, parts)
        return frame.finish()
    shape = shape_of(kernel.outputs[0])
    values = aligned_values(kernel)
    extents = merge(frame, values, shape, merged(values, shape))
    over_elements(frame, kernel.outputs, extents, vectorizable(kernel.nodes))
    return frame.finish()


def update_in_place(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Generate the loops of a slice that is written into its operand: nothing else of the result is touched."""
    frame = KernelBuilder(kernel, name, machine)
    node, reader = kernel.anchor, frame.reader
    update = operand(node, 1)
    shape = shape_of(update)
    if 0 in shape:
        return frame.finish()
    vectors = vectorizable([n for n in kernel.nodes if n is not node]) and update.dtype.bits >= 32
    begin = update_starts(reader, node, 0) if node.op is ops.dynamic_update_slice else []

    def body(index: Index) -> None:
        place = tuple(reader.position(b + i) for b, i in zip(begin, index, strict=True))
        frame.write(node.result, place, reader.at(update, index))

    if machine.launches:
        with reader.nest("", shape, frame.kinds(shape, math.prod(shape))) as index:
            begin = begin or update_starts(reader, node, index[0] if index else 0)
            body(index)
        return frame.finish()
    with reader.nest("", shape[:-1]) as outer:
        begin = begin or update_starts(reader, node, outer[0] if outer else 0)
        if shape:
            inner_loop(frame, outer, shape[-1], machine.lanes(update.dtype.bits) if vectors else 0, body)
        else:
            body(())
    return frame.finish()


def over_elements(frame: KernelBuilder, results: Sequence[Value], extents: Sequence[int], vectors: bool) -> None:
    """Generate loops that store all elements of the results; the innermost is vectorized if possible."""
    if 0 in extents:
        return
    # Elements of less than 32 bits are computed in 32.
    lanes = min(frame.machine.lanes(v.dtype.bits if v.dtype.bits >= 32 else 32) for v in results)
    outer, inner = list(extents[:-1]), extents[-1] if extents else 1
    work = math.prod(extents) * len(frame.kernel.nodes)

    def body(index: Index) -> None:
        for v in results:
            frame.write(v, index, frame.reader.at(v, index))

    if not extents:
        body(())
        return
    if frame.machine.launches:
        with frame.reader.nest("", extents, frame.kinds(extents, work)) as index:
            body(index)
        return
    if len(outer) == 0 and vectors:  # one long row: parallelize over its vectors
        inner_loop(frame, (), inner, lanes, body, frame.parallel(work))
        return
    with frame.reader.nest("", outer, frame.kinds(outer, work)) as index:
        inner_loop(frame, index, inner, lanes if vectors else 0, body)


def over_segments(frame: KernelBuilder, segments: Segments) -> None:
    """Generate loops over the outer axes, and in them a loop over each segment."""
    kernel, reader = frame.kernel, frame.reader
    shape, values = shape_of(kernel.outputs[0]), segments.aligned
    pairs = None if values is None else [(shape_of(a.value), a.shape) for a in values]
    groups = grouped(pairs, len(shape), breaks=(segments.axis,))
    extents = merge(frame, None if values is None else [a.value for a in values], shape, groups)
    axis = next(k for k, group in enumerate(groups) if group[0] == segments.axis)
    scale = extents[axis] // shape[segments.axis]  # elements of the axes that are merged with it
    lanes = min(frame.machine.lanes(max(v.dtype.bits, 32)) for v in kernel.outputs)
    vectors = vectorizable([n for n in kernel.nodes if n not in segments.pieces])
    outer, work = extents[:axis], math.prod(extents) * len(kernel.nodes)
    kind = frame.parallel(work) if math.prod(outer) == 1 else t.SERIAL

    def body(index: Index) -> None:
        for v in kernel.outputs:
            frame.write(v, index, reader.at(v, index))

    with reader.nest("", outer, frame.kinds(outer, work)) as lead:
        for low, high in pairwise(segments.bounds):
            pieces = segments.sources(low)
            reader.sources = {n: (axis, p.operand, p.shift * scale) for n, p in pieces.items()}
            is_vector = vectors and all(n.op is ops.concat or n in pieces for n in segments.pieces)
            *middle, inner = [(high - low) * scale, *extents[axis + 1 :]]

            def moved(index: Index, first: int = low * scale) -> None:
                position = reader.position(index[len(lead)] + first)
                body((*lead, position, *index[len(lead) + 1 :]))

            with reader.nest("", middle, {0: kind}) as index:
                inner_loop(
                    frame, (*lead, *index), inner, lanes if is_vector else 0, moved, t.SERIAL if middle else kind
                )
    reader.sources = {}


def inner_loop(frame: KernelBuilder, index: Index, inner: int, lanes: int, body: Any, kind: Any = t.SERIAL) -> None:
    """Generate the loop over the last axis: full vectors, of which the last one may overlap the one before.

    The body only writes results, so that an element may be computed twice. A row that is shorter than a vector is
    several shorter ones, if the kernel is small; a rest whose length is known at run time only is a scalar loop.
    """
    num_vectors, rest = (inner // lanes, inner % lanes) if lanes else (0, inner)

    def vector(first: int, size: int) -> None:
        with frame.reader.loop("j", size, t.VECTORIZED if size > 1 else t.SERIAL) as j:
            body((*index, frame.reader.position(j + first) if first else j))

    if num_vectors != 0:
        with frame.reader.loop("i", num_vectors, kind) as i, frame.reader.loop("j", lanes, t.VECTORIZED) as j:
            body((*index, frame.reader.position(i * lanes + j)))
    has_known_rest = isinstance(inner, int) and lanes and rest
    if has_known_rest and inner > lanes:
        vector(inner - lanes, lanes)
    elif has_known_rest and len(frame.kernel.nodes) <= SMALL:
        for first, size in pieces(inner, lanes):
            vector(first, size)
    elif rest != 0:
        with frame.reader.loop("k", rest) as k:
            body((*index, frame.reader.position(k + num_vectors * lanes)) if num_vectors != 0 else (*index, k))
