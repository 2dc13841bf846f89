"""Losses over classes that are split over the model axis: no process has the logits of all classes.

Such a loss consists of ``log_softmax`` along the classes and the lookup of the class of each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard

from mithril.backend import needs
from mithril.graph import Node
from mithril_torch.lowering import table
from mithril_torch.parallel.collectives import _all_reduce, of_parts

IMPORTS = ("from mithril_torch.parallel.classes import log_softmax_of_parts, looked_up_in_parts",)


def _is_split(node: Node) -> bool:
    return "classes" in node.tags


@needs(imports=IMPORTS)
def log_softmax(x, axis):  # type: ignore[no-untyped-def]
    """Return the log-softmax of the parts of all processes."""
    return log_softmax_of_parts(x, axis)


@needs(imports=IMPORTS)
def take_along_axis(x, indices, axis):  # type: ignore[no-untyped-def]
    """Return the elements at the indices, which count through the parts of all processes."""
    return looked_up_in_parts(x, indices, axis)


for _function in (log_softmax, take_along_axis):
    table.helper(_function, op=_function.__name__, when=_is_split)


def log_softmax_of_parts(x: Any, axis: int) -> Any:
    """Return the log-softmax along an axis that is split, in the same parts."""
    axis %= x.ndim
    if not isinstance(x, DTensor) or tuple(x.placements) != (Shard(axis),):
        return torch.log_softmax(x.full_tensor() if isinstance(x, DTensor) else x, axis)
    y = _LogSoftmax.apply(x.to_local(), axis, x.device_mesh.get_group())
    return of_parts(y, x.device_mesh, x.placements)


def looked_up_in_parts(x: Any, indices: Any, axis: int) -> Any:
    """Return the elements at the indices, complete in each process."""
    axis %= x.ndim
    positions = (indices.full_tensor() if isinstance(indices, DTensor) else indices).to(torch.int64)
    if not isinstance(x, DTensor) or tuple(x.placements) != (Shard(axis),):
        return torch.take_along_dim(x.full_tensor() if isinstance(x, DTensor) else x, positions, axis)
    local = x.to_local()
    count = local.shape[axis]
    positions = (
        torch.where(positions < 0, positions + x.shape[axis], positions) - x.device_mesh.get_local_rank() * count
    )
    is_here = (positions >= 0) & (positions < count)
    elements = torch.take_along_dim(local, positions.clamp(0, count - 1), axis)
    y = _Sum.apply(torch.where(is_here, elements, 0.0), x.device_mesh.get_group())
    return of_parts(y, x.device_mesh, [Replicate()])


class _LogSoftmax(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx, x, axis, group):  # type: ignore[no-untyped-def]
        shifted = x - _all_reduce(x.amax(axis, keepdim=True), group, "max")
        y = shifted - _all_reduce(shifted.exp().sum(axis, keepdim=True), group).log()
        ctx.axis, ctx.group = axis, group
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (y,) = ctx.saved_tensors
        return gradient - y.exp() * _all_reduce(gradient.sum(ctx.axis, keepdim=True), ctx.group), None, None


class _Sum(torch.autograd.Function):  # type: ignore[misc]
    """The sum of parts, from which all processes continue with the same value."""

    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None
