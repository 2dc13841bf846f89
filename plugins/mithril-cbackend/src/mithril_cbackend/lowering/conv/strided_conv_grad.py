"""Input gradient of strided convolutions: one dense convolution per stride phase.

Pixels of the image at stride distance use the same elements of the kernel, at adjacent pixels of the cotangent.
No product has one of the zeros that a dilated cotangent would contain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as every
from typing import Any

from mithril import ops
from mithril.graph import Node, TensorType, Value, float32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.conv import im2col
from mithril_cbackend.lowering.conv.conv_weights import WeightMatrix
from mithril_cbackend.lowering.conv.padding import MAX_WRITTEN_PHASES, Layout
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine

MIN_PRODUCTS = 16  # channels of a group times phases; below, multiplying zeros is cheaper


@dataclass(frozen=True)
class Axis:
    """One axis of a phase: the kernel elements it uses, in reverse order, and the cotangent pixels."""

    first: Any  # first pixel of the image: a number, or an expression of the loop over phases
    size: int  # pixels of the image in this phase
    last: Any  # last element of the kernel
    step: int  # step between elements of the kernel
    count: int  # number of elements of the kernel
    before: int  # leading padding of the cotangent
    stride: int
    run: int = 1  # phases that follow, each one pixel and one element of the kernel later


def axis_of(first: int, image: int, kernel: int, stride: int, dilation: int, padding: int) -> Axis:
    """Return the axis of a phase.

    Pixel ``first + i * stride`` uses element k of the kernel at the cotangent's pixel
    ``i + (first + padding - k * dilation) / stride``, if that is an integer.
    """
    elements = [k for k in range(kernel) if (first + padding - k * dilation) % stride == 0]
    size = max(0, -(-(image - first) // stride))
    if not elements:
        return Axis(first, size, 0, 1, 0, 0, 1)
    step = elements[1] - elements[0] if len(elements) > 1 else 1
    return Axis(
        first,
        size,
        elements[-1],
        step,
        len(elements),
        (elements[-1] * dilation - first - padding) // stride,
        max(1, step * dilation // stride),
    )


def runs(axes: Sequence[Axis]) -> Iterator[Axis]:
    """Join adjacent phases of one axis that differ only in their first pixel and last element of the kernel."""
    pending: Axis | None = None
    for axis in axes:
        if pending is not None and axis == replace(
            pending, first=pending.first + pending.run, last=pending.last + pending.run, run=1
        ):
            pending = replace(pending, run=pending.run + 1)
            continue
        if pending is not None:
            yield pending
        pending = axis
    if pending is not None:
        yield pending


@dataclass(frozen=True)
class Phase:
    """Pixels of an image at stride distance with their plan, or None if they use no kernel element."""

    axes: tuple[Axis, ...]
    stride: tuple[int, ...]
    plan: im2col.Plan | None

    def pixel(self, index: Index) -> Index:
        return tuple(i * s + a.first for i, s, a in zip(index, self.stride, self.axes, strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)


@dataclass(frozen=True)
class Plan:
    """All phases of an input gradient."""

    batch: int
    channels: int
    phases: tuple[Phase, ...]

    def scratch(self, machine: Machine, constant_weights: bool) -> list[Value]:
        """Return the buffers, which the phases use in sequence."""
        buffers = [p.plan.scratch(machine, constant_weights) for p in self.phases if p.plan is not None]
        if not buffers:
            return []
        sizes = [max(shape_of(v)[0] for v in same_role) for same_role in zip(*buffers, strict=True)]
        return [Value(v.name, TensorType(float32, (n,))) for v, n in zip(buffers[0], sizes, strict=True)]

    def write(self, frame: KernelBuilder) -> None:
        for phase in self.phases:
            extents = [axis.run for axis in phase.axes]
            if math.prod(extents) == 1:
                self.write_phase(frame, phase)
                continue
            with frame.reader.nest("pqr", extents) as index:
                shifts = [frame.reader.position(i) for i in index]
                axes = [replace(a, first=i + a.first, last=i + a.last) for a, i in zip(phase.axes, shifts, strict=True)]
                self.write_phase(frame, replace(phase, axes=tuple(axes)))

    def write_phase(self, frame: KernelBuilder, phase: Phase) -> None:
        if phase.plan is None:
            self.emit_zeros(frame, phase)
        else:
            multiply(frame, phase, phase.plan)

    def emit_zeros(self, frame: KernelBuilder, phase: Phase) -> None:
        """Write zeros for pixels outside all windows."""
        with frame.reader.nest("bcyxz", (self.batch, self.channels, *phase.sizes)) as (image, channel, *index):
            frame.emit((image, channel, *phase.pixel(tuple(index))), t.const(0, "float32"))


def multiply(frame: KernelBuilder, phase: Phase, plan: im2col.Plan) -> None:
    def emit(image: Any, channel: Any, pixel: Any, element: t.Expr) -> None:
        index = frame.reader.split(pixel, phase.sizes)
        frame.emit((image, channel, *phase.pixel(index)), element)

    im2col.Columns(frame, plan, PhaseWeights(frame, phase, plan), emit, vector=False).write()


class PhaseWeights(WeightMatrix):
    """Kernel elements of one phase as a matrix."""

    covers_kernel = False

    def __init__(self, frame: KernelBuilder, phase: Phase, plan: im2col.Plan) -> None:
        super().__init__(frame, plan.out_channels, plan.inner, plan.elements)
        self.axes, self.shape = phase.axes, shape_of(operand(frame.kernel.anchor, 1))[2:]

    def weight(self, group: Any, channel: Any, *index: Any) -> t.Expr:
        reader = self.frame.reader
        tap = reader.split(index[1], tuple(a.count for a in self.axes))
        element = tuple(a.last - i * a.step for i, a in zip(tap, self.axes, strict=True))
        last = math.prod(self.shape) - 1
        return self.transposed(group, channel, index[0], last - reader.flat(element, self.shape))


def plan_of(node: Node, machine: Machine) -> Plan | None:
    """Return the plan, or None without strides or for so few channels that multiplying zeros is cheaper."""
    if node.op is not ops.conv_input_grad or max(node.attributes["stride"]) == 1:
        return None
    a, (batch, channels, *image) = node.attributes, shape_of(node.result)
    cotangent, kernel = shape_of(operand(node)), shape_of(operand(node, 1))[2:]
    # Depthwise gradients keep their zeros: moving the other pixels costs more than multiplying zeros
    # (commit c3ed18e3). That was measured with strides of 2; of 64 products of a stride of 8, 63 are zeros.
    if min(channels, cotangent[1]) * math.prod(a["stride"]) < MIN_PRODUCTS * a["groups"]:
        return None
    phases = []
    # Pixels of one phase use the same elements of the kernel. An image with zeros between the pixels
    # took four times as many products (commit e80a7a09).
    of_axes = [
        [axis_of(first, n, k, s, d, p[0]) for first in range(s)]
        for n, k, s, d, p in zip(image, kernel, a["stride"], a["dilation"], a["padding"], strict=True)
    ]
    # Phases that differ in their first pixel only are one loop: LLVM took 129 s for the 64 of a stride of 8.
    if math.prod(a["stride"]) > MAX_WRITTEN_PHASES:
        of_axes = [list(runs(axes)) for axes in of_axes]
    for axes in every(*of_axes):
        if any(x.size == 0 for x in axes):
            continue
        ones = (1,) * len(image)
        layout = Layout(
            cotangent[2:],
            ones,
            tuple(x.before for x in axes),
            ones,
            tuple(x.stride for x in axes),
            tuple(x.count for x in axes),
            tuple(x.size for x in axes),
        )
        plan = None
        if all(x.count for x in axes):
            groups = a["groups"]
            candidates = im2col.plans_for(
                batch, groups, channels // groups, cotangent[1] // groups, layout, backward=True
            )
            plan = min(candidates, key=lambda p: p.cost(machine, False))
        phases.append(Phase(axes, a["stride"], plan))
    return Plan(batch, channels, tuple(phases))
