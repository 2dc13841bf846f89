"""The gradient of the image of a convolution with strides: a dense convolution for each phase of the strides.

The pixels of the image that lie a stride apart all meet the same elements of the kernel, at neighboring pixels of the
cotangent. Nothing is multiplied with the zeros that a stride would put between these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product as every
from typing import Any

from mithril import ops
from mithril.base import TensorType, float32
from mithril.ir import Node, Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.conv import im2col
from mithril_cbackend.lowering.conv.conv_weights import WeightMatrix
from mithril_cbackend.lowering.conv.padding import Layout
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of
from mithril_cbackend.lowering.element.kernel_builder import Frame, Machine

MIN_CHANNELS = 4  # channels of a group


@dataclass(frozen=True)
class Axis:
    """What an axis of a phase meets: elements of the kernel, the last one first, at pixels ``apart`` of each other."""

    first: int  # pixel of the image
    size: int  # pixels of the image, a stride apart
    last: int  # element of the kernel
    step: int  # between elements
    count: int  # of elements
    before: int  # pixels of the cotangent missing in front
    apart: int


def axis_of(first: int, image: int, kernel: int, stride: int, dilation: int, padding: int) -> Axis:
    """Pixel ``first + i * stride`` meets element k at the cotangent's pixel ``i + (first + padding - k * dilation) /
    stride``, where that is whole."""
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


@dataclass(frozen=True)
class Phase:
    """The pixels of an image that lie a stride apart: their plan, or None where they meet nothing."""

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
    """The phases of a gradient."""

    batch: int
    channels: int
    phases: tuple[Phase, ...]

    def scratch(self, machine: Machine, constant_weights: bool) -> list[Value]:
        """One phase uses the buffers after the other."""
        buffers = [p.plan.scratch(machine, constant_weights) for p in self.phases if p.plan is not None]
        if not buffers:
            return []
        sizes = [max(shape_of(v)[0] for v in same_role) for same_role in zip(*buffers, strict=True)]
        return [Value(v.name, TensorType(float32, (n,))) for v, n in zip(buffers[0], sizes, strict=True)]

    def write(self, frame: Frame) -> None:
        for phase in self.phases:
            if phase.plan is None:
                self.emit_zeros(frame, phase)
            else:
                multiply(frame, phase, phase.plan)

    def emit_zeros(self, frame: Frame, phase: Phase) -> None:
        """Pixels between the windows."""
        with frame.reader.nest("bcyxz", (self.batch, self.channels, *phase.sizes)) as (image, channel, *index):
            frame.emit((image, channel, *phase.pixel(tuple(index))), t.const(0, "float32"))


def multiply(frame: Frame, phase: Phase, plan: im2col.Plan) -> None:
    def emit(image: Any, channel: Any, pixel: Any, element: t.Expr) -> None:
        index = frame.reader.split(pixel, phase.sizes)
        frame.emit((image, channel, *phase.pixel(index)), element)

    im2col.Columns(frame, plan, PhaseWeights(frame, phase, plan), emit, vector=False).write()


class PhaseWeights(WeightMatrix):
    """The elements of the kernels that a phase meets."""

    covers_kernel = False

    def __init__(self, frame: Frame, phase: Phase, plan: im2col.Plan) -> None:
        super().__init__(frame, plan.out_channels, plan.inner, plan.elements)
        self.axes, self.shape = phase.axes, shape_of(operand(frame.kernel.anchor, 1))[2:]

    def weight(self, group: Any, channel: Any, *index: Any) -> t.Expr:
        reader = self.frame.reader
        tap = reader.split(index[1], tuple(a.count for a in self.axes))
        element = tuple(a.last - i * a.step for i, a in zip(tap, self.axes, strict=True))
        last = math.prod(self.shape) - 1
        return self.transposed(group, channel, index[0], last - reader.flat(element, self.shape))


def plan_of(node: Node, machine: Machine) -> Plan | None:
    """None for what has no strides, and where channels are so few that zeros cost less than moving the rest."""
    if node.op is not ops.conv_input_grad or max(node.attributes["stride"]) == 1:
        return None
    a, (batch, channels, *image) = node.attributes, shape_of(node.result)
    cotangent, kernel = shape_of(operand(node)), shape_of(operand(node, 1))[2:]
    if min(channels, cotangent[1]) < MIN_CHANNELS * a["groups"]:
        return None
    phases = []
    for first in every(*map(range, a["stride"])):
        axes = tuple(
            axis_of(f, n, k, s, d, p[0])
            for f, n, k, s, d, p in zip(first, image, kernel, a["stride"], a["dilation"], a["padding"], strict=True)
        )
        if any(x.size == 0 for x in axes):
            continue
        ones = (1,) * len(image)
        layout = Layout(
            cotangent[2:],
            ones,
            tuple(x.before for x in axes),
            ones,
            tuple(x.apart for x in axes),
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
