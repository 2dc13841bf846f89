"""Convolutions and their gradients as shifted products over a padded copy of the image.

A tile of accumulators (channels by vectors of pixels) reads the padded image at an offset that depends only on the
element of the kernel, and needs no bounds checks. Results after the end of a row are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Node, TensorType, Value, attributes_text, float32, is_static
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.conv import (
    conv_weight_grad,
    im2col,
    image_blocks,
    plans_by_size,
    strided_conv_grad,
    winograd,
)
from mithril_cbackend.lowering.conv.conv_weights import stream_cycles, transpose_weights, transposed_weights
from mithril_cbackend.lowering.conv.padding import Layout, layout_of, overread, pad, pad_channel
from mithril_cbackend.lowering.element.element_reader import Index, operand, shape_of, typical
from mithril_cbackend.lowering.element.kernel import Kernel, lowers
from mithril_cbackend.lowering.element.kernel_builder import PRODUCTS, KernelBuilder, Machine
from mithril_cbackend.lowering.element.vectorization import vectorizable
from mithril_cbackend.lowering.matmul import naive_contractions
from mithril_cbackend.lowering.matmul.microkernel import PREFETCH, count
from mithril_cbackend.lowering.packings import Packing

Dense = plans_by_size.Dense
# Below it the simple loops are good enough; the figure is that of the first version.
MIN_PRODUCTS = 1 << 13  # smaller convolutions use simple loops


def is_supported(node: Node) -> bool:
    """Whether the templates support the node: float32, and enough work."""
    if node.result.dtype is not float32 or any(
        0 in shape_of(v) for v in (*node.operands, node.result) if v is not None
    ):
        return False
    layout = layout_of(node)
    work = typical(math.prod(layout.result)) * math.prod(layout.kernel) * _channels(node)
    return work >= MIN_PRODUCTS


def _channels(node: Node) -> int:
    """Return the number of products per pixel and element of the kernel."""
    name, first = node.op.name, shape_of(operand(node))
    if name == "conv_weight_grad":
        shape = shape_of(node.result)
        return typical(shape[0] * shape[1] * first[0])
    weights = shape_of(operand(node, 1))
    return typical(weights[0] * weights[1] * first[0])


def _width(layout: Layout, machine: Machine, rows: int) -> int:
    """Return the number of pixels in a tile."""
    # At most 16 accumulators, as in products.
    vectors = 2 if rows > 4 else 4
    if not isinstance(layout.pixels, int):
        return vectors * machine.lanes()
    # A tile wider than the image would compute pixels that are dropped.
    while vectors > 1 and layout.pixels <= machine.lanes() * (vectors - 1):
        vectors -= 1
    return vectors * machine.lanes()


def _rows(node: Node) -> int:
    """Return the number of channels in a tile."""
    groups = node.attributes["groups"]
    out_channels = shape_of(node.result)[1] // groups
    return next(r for r in (8, 6, 7, 5, 4, 3, 2, 1) if out_channels % r == 0) if out_channels % 8 else 8


def exclusive_channels(node: Node) -> bool:
    """Whether each channel of the image is used by only one block, which then pads the channel itself."""
    groups = node.attributes["groups"]
    return bool(groups > 1 and shape_of(node.result)[1] // groups == _rows(node))


DIRECT = "direct"


def signature(node: Node) -> str:
    """Return the key of the schedule: everything that the best one depends on."""
    types = " ".join(str(v.type) for v in node.operands if v is not None)
    return f"{node.op.name} {types} {attributes_text(node.attributes, {})}"


def schedules(node: Node, machine: Machine, max_per_kind: int = 3) -> list[str]:
    """Return the schedules worth measuring: direct tiles, and the cheapest plans of each other kind."""
    if (
        node.op is ops.conv_weight_grad
        or not is_supported(node)
        or strided_conv_grad.plan_of(node, machine) is not None
    ):
        return []

    def cheapest(plans: Sequence[Dense]) -> list[str]:
        return [str(p) for p in sorted(plans, key=lambda p: p.cost(machine, True))[:max_per_kind]]

    by_channel = [p for p in im2col.plans(node) if p.by_channel]
    by_pixel = [p for p in im2col.plans(node) if not p.by_channel]
    return [DIRECT, *cheapest(by_pixel), *cheapest(by_channel), *cheapest(winograd.plans(node, machine))]


def cheaper_plan(
    kernel: Kernel, machine: Machine, constant_weights: bool
) -> Dense | strided_conv_grad.Plan | plans_by_size.BySize | None:
    """Return a plan of another template that costs less than direct tiles, or None if there is none."""
    node, layout = kernel.anchor, layout_of(kernel.anchor)
    if not im2col.is_supported(kernel) or (node.op is not ops.conv and not is_static(layout.image)):
        return None
    strided = strided_conv_grad.plan_of(node, machine)
    if strided is not None:
        return strided
    plans: list[Dense] = [*im2col.plans(node), *winograd.plans(node, machine)]
    schedule = machine.schedules.get(signature(node))
    if schedule is not None:
        return next((p for p in plans if str(p) == schedule), None)
    # ``optimize_size`` is for memory of microcontrollers: scratch decides, time only between equal
    # ones (three layers of 32 x 32 pixels: 231 kB of arena instead of 592 kB, commit bc8b267b).
    if machine.compact:
        sizes = {p: elements(p.scratch(machine, constant_weights)) for p in plans}
        smallest = min(plans, key=lambda p: (sizes[p], examples(node)[0].cost(p, machine, constant_weights)))
        return smallest if sizes[smallest] < elements(buffers(node, machine, constant_weights)) else None
    selection: list[Dense | None] = [None, *plans]  # None: direct tiles
    sizes_of = examples(node)
    costs = [[e.cost(p, machine, constant_weights) for p in selection] for e in sizes_of]
    # A second plan would store all weights twice, each in its own order.
    if constant_weights or len(costs) == 1:  # constant weights are packed for one plan
        sums = [sum(row[k] / min(row) for row in costs) for k in range(len(selection))]
        return selection[sums.index(min(sums))]
    channels = shape_of(node.result)[1]
    cycles = [[c * e.pixels * channels for c in row[1:]] for e, row in zip(sizes_of, costs, strict=True)]
    plan: Dense | plans_by_size.BySize = plans_by_size.selected(plans, [e.measures for e in sizes_of], cycles)
    return plan


def examples(node: Node) -> list[Example]:
    """Return the sizes for which plans are compared."""
    layout, batch = layout_of(node), shape_of(node.result)[0]
    if is_static(layout.image):
        return [Example(node, n, layout) for n in ((batch,) if isinstance(batch, int) else image_blocks.BATCHES)]
    batches = (batch,) if isinstance(batch, int) else image_blocks.BATCHES
    return [Example(node, n, image_blocks.example(layout, side)) for n in batches for side in image_blocks.SIDES]


@dataclass(frozen=True)
class Example:
    """A convolution with known sizes."""

    node: Node
    batch: int
    layout: Layout

    @property
    def measures(self) -> tuple[int, ...]:
        return plans_by_size.measures(self.batch, self.layout.result)

    @property
    def pixels(self) -> int:
        return self.batch * math.prod(self.layout.result)

    def cost(self, plan: Dense | None, machine: Machine, constant_weights: bool) -> float:
        """Estimate the cycles per element of the result of a plan, or of direct tiles."""
        if isinstance(plan, im2col.OpenPlan | winograd.OpenPlan):
            return plan.cost_of(self.layout, self.batch, machine, constant_weights)
        if plan is not None:
            exact = replace(plan, batch=self.batch, images=min(plan.images, self.batch))
            return exact.cost(machine, constant_weights)
        rows, depth = _rows(self.node), _depth(self.node)
        width = _width(layout_of(self.node), machine, rows)
        vectors = width // machine.lanes()
        # Two products take as long as two loads, of which those of pixels cross cache lines: tiles of one or two rows,
        # as of a prime number of channels, wait for them.
        loads = max(1.0, (2 * vectors + rows) / (vectors * rows))
        # The constants 1.08, 2 and 1 put direct tiles on the scale of ``im2col.Plan.cost``.
        waste = count(self.layout.pixels, width) * width / math.prod(self.layout.result)
        ordering = 0 if constant_weights else 2 * depth / self.pixels
        channels = shape_of(self.node.result)[1]
        kernels = stream_cycles(math.prod(shape_of(operand(self.node, 1)))) / (self.pixels * channels)
        return float(1.08 * waste * loads * depth / (2 * machine.lanes()) + ordering + kernels + 1)


def _depth(node: Node) -> int:
    """Return the number of products in the sum of one result."""
    channels = shape_of(operand(node))[1] // node.attributes["groups"]
    return int(channels * math.prod(layout_of(node).kernel))


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return the padded image and the other scratch buffers of the selected plan."""
    node, constant_weights = kernel.anchor, bool(kernel.prepared)
    if not is_supported(node):
        return []
    if node.op is ops.conv_weight_grad:
        return conv_weight_grad.plan_of(node).scratch(machine)
    plan = cheaper_plan(kernel, machine, constant_weights)
    if plan is not None:
        return [*plan.scratch(machine, constant_weights), *transposed_weights(node, machine)]
    return buffers(node, machine, constant_weights)


def elements(scratch: Sequence[Value]) -> int:
    return sum(typical(math.prod(shape_of(v))) for v in scratch)


def buffers(node: Node, machine: Machine, constant_weights: bool) -> list[Value]:
    """Return the buffers of direct tiles: the padded image, a row of tiles per thread, packed kernels."""
    layout = layout_of(node)
    batch, channels = shape_of(operand(node))[:2]
    width, rows = _width(layout, machine, _rows(node)), _rows(node)
    images = machine.threads * (channels // node.attributes["groups"]) if exclusive_channels(node) else batch * channels
    out_channels = shape_of(node.result)[1]
    scratch = [
        _buffer("padded", images * layout.channel + overread(layout, width)),
        _buffer("tiles", machine.threads * rows * count(layout.pixels, width) * width),
    ]
    if not constant_weights:
        depth = math.prod(layout.kernel) * (channels // node.attributes["groups"])
        scratch.append(_buffer("kernels", out_channels * depth))
    return scratch


def packing(kernel: Kernel, weights: np.ndarray[Any, Any], machine: Machine) -> Packing | None:
    """Return the order in which the plan reads constant kernels, or None if that is their own."""
    node = kernel.anchor
    if not is_supported(node) or node.op is not ops.conv or weights.dtype != operand(node, 1).dtype.numpy:
        return None
    plan = cheaper_plan(kernel, machine, True)
    if plan is not None:
        assert isinstance(plan, Dense)
        return plan.packing(machine)
    return Packing("tiles", (node.attributes["groups"], _rows(node)))


def _buffer(name: str, size: int) -> Value:
    return Value(name, TensorType(float32, (size,)))


# -- forward, and the gradient of the image -----------------------------------------------------------------------
@lowers(ops.conv, ops.conv_input_grad, is_producer=True, scratch=scratch, packing=packing)
def convolution(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``conv`` and ``conv_input_grad``."""
    node = kernel.anchor
    if not is_supported(node):
        simple = naive_contractions.conv if node.op is ops.conv else naive_contractions.conv_input_grad
        return simple(kernel, name, machine)
    frame = KernelBuilder(kernel, name, machine)
    layout, x, w = layout_of(node), operand(node), operand(node, 1)
    plan = cheaper_plan(kernel, machine, constant_weights=w in kernel.prepared)
    if plan is not None:
        if node.op is ops.conv_input_grad:
            transpose_weights(frame)
        plan.write(frame)
        return frame.finish()
    groups, rows = node.attributes["groups"], _rows(node)
    batch, channels = shape_of(x)[:2]
    out_channels, inner = shape_of(node.result)[1] // groups, channels // groups
    width, lanes = _width(layout, machine, rows), machine.lanes()
    padded, tiles, *ordered = (frame.outputs[v] for v in kernel.scratch)
    kernels = ordered[0] if ordered else frame.reader.buffers[kernel.prepared[w][0]]
    reader, code = frame.reader, frame.code
    elements = math.prod(layout.kernel)
    blocks, pixels = out_channels // rows, count(layout.pixels, width)
    work = batch * groups * out_channels * inner * layout.pixels * elements // PRODUCTS

    exclusive = exclusive_channels(node)
    if not exclusive:
        pad(frame, layout, x, padded, channels, overread(layout, width))
    if ordered:
        _order_kernels(frame, node, w, kernels, groups, blocks, rows, inner, layout)

    with frame.share("block", batch * groups * blocks, work) as (worker, item):
        image, block = reader.split(item, (batch, groups * blocks))
        group = reader.position(block // blocks) if groups > 1 else 0
        first = group * inner
        if exclusive:
            with reader.loop("c", inner) as c:
                base = (worker * inner + c) * layout.channel
                pad_channel(frame, layout, x, padded, (image, first + c), base)
        lead = worker * inner if exclusive else image * channels + first
        first = code.let(t.index(lead * layout.channel), "first")
        length = pixels * width
        begin = worker * (rows * length)
        with reader.loop("tile", pixels) as tile:
            pixel = tile * width
            total = code.alloc("total", rows * width, "float32")
            slots = [(r, v, (r * (width // lanes) + v) * lanes) for r in range(rows) for v in range(width // lanes)]
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                for _, _, slot in slots:
                    code.store(total, j + slot, t.const(0, "float32"))
            with reader.loop("c", inner) as c:
                image_start = first + c * layout.channel + pixel
                weights_start = (block * inner + c) * (elements * rows)
                with reader.several("abc", layout.kernel) as taps:
                    for tap in taps:
                        tap_number = reader.flat(tap, layout.kernel)
                        offset = code.let(t.index(layout.offset(tap)), "offset")
                        tap_start = weights_start + tap_number * rows
                        # Kernels that this call has ordered are still in the cache; packed ones come from memory.
                        if not ordered:
                            code.prefetch(kernels, tap_start + PREFETCH)
                        factors = [code.let(t.load(kernels, tap_start + r), "w") for r in range(rows)]
                        with reader.loop("j", lanes, t.VECTORIZED) as j:
                            for r, v, slot in slots:
                                pixel_offset = image_start + offset + (j + v * lanes)
                                product = factors[r] * t.load(padded, pixel_offset)
                                accumulator = j + slot
                                code.store(total, accumulator, t.load(total, accumulator) + product)
            with reader.loop("j", lanes, t.VECTORIZED) as j:
                for r, v, slot in slots:
                    row = begin + r * length
                    pixel_offset = row + pixel + (j + v * lanes)
                    code.store(tiles, pixel_offset, t.load(total, j + slot))
        _emit_block(frame, node, layout, image, block, rows, tiles, begin, length)
    return frame.finish()


def _order_kernels(
    frame: KernelBuilder,
    node: Node,
    w: Value,
    kernels: Any,
    groups: int,
    blocks: int,
    rows: int,
    inner: int,
    layout: Layout,
) -> None:
    """Pack the kernels in the order in which the tiles read them: [block, channel, element, channel of the tile]."""
    reader, code = frame.reader, frame.code
    backward = node.op is ops.conv_input_grad
    sizes = layout.kernel
    count = math.prod(sizes)
    out_channels = blocks * rows
    with reader.loop("block", groups * blocks) as block, reader.loop("c", inner) as c, reader.loop("r", rows) as r:
        group = reader.position(block // blocks) if groups > 1 else 0
        block_in_group = reader.position(block - group * blocks if groups > 1 else block)
        row = block_in_group * rows + r
        with reader.nest("abc", sizes) as index:
            target = ((block * inner + c) * count + reader.flat(index, sizes)) * rows + r
            if backward:  # exchange the channels and flip the kernel
                flipped = tuple(n - 1 - i for i, n in zip(index, sizes, strict=True))
                source = (group * inner + c, row, *flipped)
            else:
                source = (group * out_channels + row, c, *index)
            code.store(kernels, target, reader.at(w, source))


def _emit_block(
    frame: KernelBuilder,
    node: Node,
    layout: Layout,
    image: Any,
    block: Any,
    rows: int,
    tiles: Any,
    begin: Any,
    length: int,
) -> None:
    """Emit the rows of a block's results, without the positions between rows."""
    lanes = frame.machine.lanes()
    reader, epilogue = frame.reader, [n for n in frame.kernel.nodes if n is not node]
    *outer, inner = layout.result
    num_vectors = inner // lanes if vectorizable(epilogue) else 0
    rest = inner - num_vectors * lanes
    with reader.loop("r", rows) as r:
        channel = block * rows + r
        base = begin + r * length

        def emit_pixel(outer_index: Index, column: Any) -> None:
            offset = base + layout.rows((*outer_index, column))
            frame.emit((image, channel, *outer_index, column), t.load(tiles, offset))

        with reader.nest("yx", outer) as outer_index:
            if num_vectors != 0:
                with reader.loop("v", num_vectors) as v, reader.loop("j", lanes, t.VECTORIZED) as j:
                    emit_pixel(outer_index, v * lanes + j)
            if rest != 0:
                with reader.loop("k", rest) as k:
                    emit_pixel(outer_index, k + num_vectors * lanes)


# -- the gradient of the kernel -----------------------------------------------------------------------------------
@lowers(ops.conv_weight_grad, scratch=scratch)
def weight_gradient(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``conv_weight_grad``."""
    node = kernel.anchor
    if not is_supported(node):
        return naive_contractions.conv_weight_grad(kernel, name, machine)
    frame = KernelBuilder(kernel, name, machine)
    conv_weight_grad.plan_of(node).write(frame)
    return frame.finish()
