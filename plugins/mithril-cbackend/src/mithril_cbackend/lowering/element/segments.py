"""Joined, padded and gathered values in segments of an axis, in each of which all elements have one source.

Without segments an element of a joined value reads every operand, at clamped positions, and selects one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mithril import ops
from mithril.graph import Node, Value
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.vectorization import is_plain

# Nodes that may be written, over all segments: LLVM takes about a millisecond for a node in a loop of vectors.
MAX_WRITTEN = 256


@dataclass(frozen=True)
class Aligned:
    """A value that is read at the index of the results, moved along one axis."""

    value: Value
    shape: tuple[Any, ...]  # the shape that it is broadcast to
    start: int  # position of its first element in the results


@dataclass(frozen=True)
class Piece:
    """Elements of a value that neighbors in one operand are the sources of."""

    first: int
    size: int
    operand: int
    shift: int  # position of an element minus that of its source


@dataclass(frozen=True)
class Segments:
    """The segments of one axis of a kernel's results."""

    axis: int
    bounds: tuple[int, ...]  # the beginning of each segment, and the end
    pieces: dict[Node, list[Piece]]  # of the joined, padded and gathered values, at positions of the results
    aligned: tuple[Aligned, ...] | None  # None if axes cannot be merged

    def sources(self, position: int) -> dict[Node, Piece]:
        """Return the pieces of a position in the results; elements of padding have none."""
        pieces = ((node, p) for node, of_node in self.pieces.items() for p in of_node)
        return {node: p for node, p in pieces if p.first <= position < p.first + p.size}


def axis_of(node: Node, rank: int) -> int:
    """Return the axis of a joined or gathered value, or the last one of a padding, among the last axes of ``rank``."""
    axis = node.attributes.get("axis")
    if axis is None:
        axis = max((k for k, widths in enumerate(node.attributes["widths"]) if any(widths)), default=0)
    return int(axis) + rank - len(node.result.shape)


def pieces_of(kernel: Kernel, node: Node, axis: int) -> list[Piece]:
    """Return the pieces of a value along its axis."""
    if node.op is ops.take:
        return [Piece(first, size, 0, first - source) for first, size, source in kernel.runs[node]]
    if node.op is ops.pad:
        before = int(node.attributes["widths"][axis][0])
        return [Piece(before, shape_of(operand(node))[axis], 0, before)]
    sizes = [shape_of(operand(node, k))[axis] for k in range(len(node.operands))]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [Piece(start, n, k, start) for k, (start, n) in enumerate(zip(starts, sizes, strict=True))]


def segments_of(kernel: Kernel) -> Segments | None:
    """Return the segments of a kernel's results, or None if no value in pieces is read at their index."""
    shape, producers = shape_of(kernel.outputs[0]), kernel.producers
    rank, nodes = len(shape), [n for n in kernel.nodes if n.op in (ops.concat, ops.pad) or n in kernel.runs]
    if not nodes or 0 in shape:
        return None
    axis = max(axis_of(n, rank) for n in nodes)
    aligned, pieces, can_merge = dict[Aligned, None](), dict[Node, list[Piece]](), True
    pending = [Aligned(v, shape, 0) for v in kernel.outputs]
    while pending:
        place = pending.pop()
        if place in aligned:
            continue
        aligned[place] = None
        node = producers.get(place.value)
        if node is None:
            continue
        if is_plain(node):
            pending += [Aligned(v, place.shape, place.start) for v in node.operands if v is not None]
        elif node in nodes and axis_of(node, rank) == axis and shape_of(node.result) == place.shape:
            of_node = [replace(p, first=p.first + place.start) for p in pieces_of(kernel, node, axis)]
            if pieces.setdefault(node, of_node) != of_node:
                return None  # read at two positions
            read = [(operand(node, p.operand), place.start + p.shift) for p in of_node]
            pending += [Aligned(v, shape_of(v), start) for v, start in read]
            can_merge &= node.op is ops.concat
        else:
            can_merge = False
    bounds = {0, shape[axis], *(b for of_node in pieces.values() for p in of_node for b in (p.first, p.first + p.size))}
    if not pieces or not all(isinstance(b, int) for b in bounds):
        return None
    inner = tuple(sorted(b for b in bounds if 0 <= b <= shape[axis]))
    if (len(inner) - 1) * len(kernel.nodes) > MAX_WRITTEN:
        return None
    return Segments(axis, inner, pieces, tuple(aligned) if can_merge else None)
