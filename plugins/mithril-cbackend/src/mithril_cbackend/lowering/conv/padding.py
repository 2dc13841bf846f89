"""Padded images, flattened and split into one phase per step of the stride.

The pixels that an element of the kernel multiplies are contiguous, at a fixed offset from those of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as every
from typing import Any

from mithril import ops
from mithril.graph import Node, Size, Value, is_static
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder
from mithril_cbackend.lowering.matmul.microkernel import count

# The copies of more phases are loops: a stride of 16 along two axes has 256, for which LLVM took 19 to 31 s when each
# was written out. The limit leaves the programs of strides up to 3 unchanged; it was not tuned.
MAX_WRITTEN_PHASES = 9


@dataclass(frozen=True)
class Layout:
    """Layout of a padded image, flattened and split into stride phases."""

    image: tuple[int, ...]  # spatial sizes
    spread: tuple[int, ...]  # spacing of the image's pixels (the stride, for an input gradient), 1 otherwise
    before: tuple[int, ...]  # leading padding; negative where pixels are cropped
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    kernel: tuple[int, ...]
    result: tuple[int, ...]  # spatial sizes of the result

    @property
    def sizes(self) -> tuple[int, ...]:
        """Spatial sizes of one phase."""
        reach = [(k - 1) * d // s + 1 for k, d, s in zip(self.kernel, self.dilation, self.stride, strict=True)]
        return tuple(o + r - 1 + (1 if s > 1 else 0) for o, r, s in zip(self.result, reach, self.stride, strict=True))

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps between the phases that elements of the kernel read, along each axis."""
        axes = zip(self.kernel, self.stride, self.dilation, strict=True)
        return tuple(math.gcd(s, d) if k > 1 else s for k, s, d in axes)

    @property
    def phases(self) -> int:
        return math.prod(s // step for s, step in zip(self.stride, self.steps, strict=True))

    @property
    def channel(self) -> int:
        """Elements of one channel in all phases."""
        return self.phases * math.prod(self.sizes)

    @property
    def pixels(self) -> int:
        """Positions computed: those of the result, and the unused ones between its rows."""
        return self.result[0] * math.prod(self.sizes[1:])

    def offset(self, index: Index) -> Any:
        """Return the offset from a pixel of the result to the pixel that kernel element ``index`` multiplies."""
        phase: Any = 0
        flat: Any = 0
        for k, d, s, step, n in zip(index, self.dilation, self.stride, self.steps, self.sizes, strict=True):
            phase = phase * (s // step) + k * d % s // step
            flat = flat * n + k * d // s
        return phase * math.prod(self.sizes) + flat

    def rows(self, index: Index) -> Any:
        """Return the flat position of a pixel of the result."""
        total: Any = 0
        for i, n in zip(index, self.sizes, strict=True):
            total = total * n + i
        return total


def layout_of(node: Node) -> Layout:
    a = node.attributes
    if node.op is ops.conv_input_grad:
        image, kernel, result = shape_of(operand(node))[2:], shape_of(operand(node, 1))[2:], shape_of(node.result)[2:]
        before = tuple((k - 1) * d - p[0] for k, d, p in zip(kernel, a["dilation"], a["padding"], strict=True))
        return Layout(image, a["stride"], before, (1,) * len(image), a["dilation"], kernel, result)
    image = shape_of(operand(node))[2:]
    kernel = shape_of(operand(node, 1) if node.op is ops.conv else node.result)[2:]
    result = shape_of(node.result if node.op is ops.conv else operand(node, 1))[2:]
    before = tuple(p[0] for p in a["padding"])
    return Layout(image, (1,) * len(image), before, a["stride"], a["dilation"], kernel, result)


def overread(layout: Layout, width: int) -> int:
    """Return the number of elements after the last channel that vector loads may read."""
    if not is_static(layout.sizes):
        return 2 * width + math.prod(layout.sizes) + layout.channel  # offsets are positions in one channel
    return (
        2 * width
        + math.prod(layout.sizes)
        + max((layout.offset(index) for index in every(*map(range, layout.kernel))), default=0)
    )


def pad(frame: KernelBuilder, layout: Layout, x: Value, padded: Any, channels: int, overread: int) -> None:
    """Copy all channels to the padded buffer, with zeros around the pixels."""
    code, reader = frame.code, frame.reader
    batch = shape_of(x)[0]
    with frame.part("pad"):
        with reader.loop("c", batch * channels, frame.parallel(batch * channels * layout.channel)) as c:
            index = (c // channels, c % channels)
            pad_channel(frame, layout, x, padded, tuple(reader.position(k) for k in index), c * layout.channel)
        with reader.loop("i", overread) as i:
            code.store(padded, i + batch * channels * layout.channel, t.const(0, "float32"))


def pad_channel(frame: KernelBuilder, layout: Layout, x: Value, padded: Any, index: Index, base: Any) -> None:
    """Copy one channel of one image."""
    with frame.reader.loop("i", layout.channel) as i:
        frame.code.store(padded, base + i, t.const(0, "float32"))
    of_axes = [_copies(layout, axis) for axis in range(len(layout.image))]
    if layout.phases > MAX_WRITTEN_PHASES:
        of_axes = [list(_runs(copies)) for copies in of_axes]
    for copies in every(*of_axes):
        extents = [copy.run for copy in copies]
        if math.prod(extents) == 1:
            _copy_phase(frame, layout, x, padded, index, base, copies)
            continue
        with frame.reader.nest("pqr", extents) as shifts:
            shifted = [
                replace(copy, phase=i + copy.phase, start=frame.reader.position(i + copy.start))
                for copy, i in zip(copies, shifts, strict=True)
            ]
            _copy_phase(frame, layout, x, padded, index, base, shifted)


@dataclass(frozen=True)
class _Copy:
    """The pixels of one phase along one axis: every ``step``-th from ``start`` on; numbers, or expressions."""

    phase: Any  # number of the phase
    start: Any
    step: Any
    count: Any
    position: Any  # of the first pixel in its phase
    jump: Any  # between the positions of two pixels
    run: int = 1  # phases that follow, each one pixel later


def _copies(layout: Layout, axis: int) -> list[_Copy]:
    """Return the pixels of each phase along an axis, without phases that no pixel belongs to."""
    n, spread, before = layout.image[axis], layout.spread[axis], layout.before[axis]
    s, size, copies = layout.stride[axis], layout.sizes[axis], []
    # the padded position of pixel i is before + i * spread = position * s + p, where s or spread is 1
    for number, p in enumerate(range(0, s, layout.steps[axis])):
        if not (isinstance(n, int) and isinstance(size, int)):
            first = max(0, count(-before, spread)) if s == 1 else max(0, count(before - p, s)) * s + p - before
            position = (before + first * spread - p) // s
            copies.append(_Copy(number, first, s, _covered(n, size, first, s, position, spread), position, spread))
            continue
        covered = [
            i for i in range(n) if (before + i * spread - p) % s == 0 and 0 <= (before + i * spread - p) // s < size
        ]
        if covered:
            step = covered[1] - covered[0] if len(covered) > 1 else 1
            jump = step * spread // s if len(covered) > 1 else 1
            position = (before + covered[0] * spread - p) // s
            copies.append(_Copy(number, covered[0], step, len(covered), position, jump))
    return copies


def _runs(copies: Sequence[_Copy]) -> Iterator[_Copy]:
    """Join phases whose pixels differ by one in their start only; those of open sizes are not compared."""
    pending: _Copy | None = None
    for copy in copies:
        if pending is not None and isinstance(copy.count, int):
            following = replace(pending, phase=pending.phase + pending.run, start=pending.start + pending.run, run=1)
            if copy == following:
                pending = replace(pending, run=pending.run + 1)
                continue
        if pending is not None:
            yield pending
        pending = copy
    if pending is not None:
        yield pending


def _copy_phase(
    frame: KernelBuilder, layout: Layout, x: Value, padded: Any, index: Index, base: Any, copies: Sequence[_Copy]
) -> None:
    """Copy the pixels of one phase."""
    reader = frame.reader
    counts = [copy.count for copy in copies]
    number: Any = 0
    for copy, s, step in zip(copies, layout.stride, layout.steps, strict=True):
        number = number * (s // step) + copy.phase

    def source(inner: Index) -> Any:
        pixel = tuple(i * copy.step + copy.start for i, copy in zip(inner, copies, strict=True))
        return reader.flat((*index, *pixel), shape_of(x))

    def target(inner: Index) -> Any:
        flat: Any = 0
        for i, copy, size in zip(inner, copies, layout.sizes, strict=True):
            flat = flat * size + (i * copy.jump + copy.position)
        return base + (flat + number * math.prod(layout.sizes))

    with reader.nest("yxz", counts[:-1]) as row:

        def copy_each() -> None:
            with reader.loop("k", counts[-1]) as k:
                frame.code.store(padded, target((*row, k)), t.load(reader.buffers[x], source((*row, k))))

        def copy_vectors() -> None:
            _copy_every_second(frame, reader.buffers[x], source((*row, 0)), padded, target((*row, 0)), counts[-1])

        # A stride of two takes every second pixel, which two loads and a shuffle do for a vector;
        # others are rare.
        if copies[-1].step == 2 and copies[-1].jump == 1 and frame.machine.lanes() > 1:
            reader.either(counts[-1] >= frame.machine.lanes(), copy_vectors, copy_each)
        else:
            copy_each()


def _covered(n: Size, size: Size, first: int, step: int, position: int, jump: int) -> t.Expr:
    """Return how many of every ``step``-th pixel from ``first`` on exist and fit every ``jump``-th padded position."""
    pixels = (t.index(n) + (step - 1 - first)) // step
    fitting = (t.index(size) + (jump - 1 - position)) // jump
    number = t.select(pixels < fitting, pixels, fitting)
    return t.select(number > 0, number, t.index(0))


def _copy_every_second(
    frame: KernelBuilder, source: Any, source_start: Any, target: Any, target_start: Any, size: int
) -> None:
    """Copy every second element of a row in vectors; the last vector ends with the row and may overlap."""
    lanes, code = frame.machine.lanes(), frame.code
    even_lanes = [2 * k if 2 * k < lanes else 2 * k + 1 for k in range(lanes)]  # lanes of two overlapping vectors

    def copy_vector(first: Any) -> None:
        begin = source_start + first * 2
        a, b = (t.load(source, t.vector(begin + k, lanes)) for k in (0, lanes - 1))
        code.store(target, t.vector(target_start + first, lanes), t.shuffle(a, b, even_lanes))

    with frame.reader.loop("v", size // lanes) as v:
        copy_vector(v * lanes)
    if size % lanes:
        copy_vector(size - lanes)
