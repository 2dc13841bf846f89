"""Templates of devices in place of those of the CPU: a thread for each element, without blocks and private buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mithril import ops
from mithril.graph import Node
from mithril_cbackend import tir as t
from mithril_cbackend.devices.model import DeviceMachine, DeviceModel
from mithril_cbackend.graph import foreign, fusion
from mithril_cbackend.lowering.conv import direct_convolution
from mithril_cbackend.lowering.element.element_reader import conjunction, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel, Template
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.lowering.element.storage_dtypes import computed, rounded
from mithril_cbackend.lowering.matmul import expert_products, matmul, naive_contractions as naive
from mithril_cbackend.lowering.pool import pooling
from mithril_cbackend.lowering.rows import fused_rows, reductions

CONTRACTIONS = {
    ops.matmul: naive.matmul,
    ops.dot: naive.dot,
    ops.conv: naive.conv,
    ops.conv_input_grad: naive.conv_input_grad,
    ops.conv_weight_grad: naive.conv_weight_grad,
}


def contraction(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower products and convolutions: a thread sums for one element of the result."""
    return CONTRACTIONS[kernel.anchor.op](kernel, name, machine)


def window(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower pools: a thread reduces one window."""
    frame = KernelBuilder(kernel, name, machine)
    node, code, reader = kernel.anchor, frame.code, frame.reader
    x, a, dtype = operand(node), node.attributes, node.result.dtype
    op = ops.max if node.op is ops.max_pool else ops.sum
    shape, result = shape_of(x), shape_of(node.result)
    with reader.nest("", result, frame.kinds(result, math.prod(result))) as index:
        total = code.alloc("total", 1, reductions.accumulator(dtype))
        code.store(total, 0, reductions.to_stored(reductions.identity(op, dtype)))
        with reader.nest("abcdef", a["kernel"]) as offset:
            dilation = a.get("dilation", (1,) * len(offset))
            position, conditions = pooling.element_in_window(
                frame, index[2:], offset, shape[2:], a["stride"], a["padding"], dilation
            )
            current = reductions.load_element(total, 0, dtype)
            element = reductions.fold(code, op, current, reader.at(x, (*index[:2], *position)), dtype)
            if conditions:
                element = t.select(conjunction(conditions), element, current)
            code.store(total, 0, reductions.to_stored(element))
        element = reductions.load_element(total, 0, dtype)
        if node.op is ops.avg_pool:
            element = element / t.cast(pooling.window_size(frame, index[2:], a, shape[2:]), computed(dtype))
        frame.write(node.result, index, rounded(code, element, dtype))
    return frame.finish()


def rows(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower softmax, norms and other mixes of row reductions: a thread passes over one row several times."""
    frame = KernelBuilder(kernel, name, machine)
    code, reader = frame.code, frame.reader
    shape, passes = shape_of(kernel.outputs[0]), fused_rows.passes_of(kernel)
    lead, width, last = shape[:-1], shape[-1], len(passes.folds) - 1
    with reader.nest("", lead, frame.kinds(lead, math.prod(shape))) as index:
        for k, folds in enumerate(passes.folds):
            totals = {n: code.alloc("total", 1, reductions.accumulator(operand(n).dtype)) for n in folds}
            for n, total in totals.items():
                code.store(total, 0, reductions.identity(n.op, operand(n).dtype))
            with reader.loop("i", width) as i:
                for n, total in totals.items():
                    x, dtype = reader.at(operand(n), (*index, i)), operand(n).dtype
                    code.store(total, 0, reductions.fold(code, n.op, t.load(total, 0), x, dtype))
                for v in kernel.outputs if k == last else []:
                    frame.write(v, (*index, i), reader.at(v, (*index, i)))
            for n, total in totals.items():
                result = reductions.finalize(code, n.op, t.load(total, 0), operand(n).dtype, width)
                reader.define(n.result, (*index, 0), code.let(result, n.result.name))
            for v in passes.per_row[k]:
                reader.at(v, (*index, 0))
    return frame.finish()


@dataclass(frozen=True)
class TemplateMachine(DeviceMachine):
    """A device with these templates."""

    templates: ClassVar[Mapping[Template, Template]] = {
        matmul.matmul: contraction,
        direct_convolution.convolution: contraction,
        direct_convolution.weight_gradient: contraction,
        pooling.max_pool: window,
        pooling.average_pool: window,
        fused_rows.rows: rows,
    }


def machine(model: DeviceModel, fuse: bool) -> DeviceMachine:
    return TemplateMachine(model=model, fuse=fuse)


def lowers(node: Node) -> bool:
    """Whether a kernel computes the node, or the host runs its regions."""
    if node.op in expert_products.OPERATIONS:
        return False
    return foreign.plugin_lowering(node) is not None or fusion.lowers(node)
