"""Lowering of collectives to ``torch.distributed`` calls on the group of a mesh axis, with their transposes.

Autograd of a program of several processes is exact if each collective is differentiated as the linear function of the
values of all processes that it is: a gradient is then the sum over the objectives of all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mithril.backend import needs
from mithril_torch.lowering import table
from mithril_torch.parallel.layout import MODEL
from mithril_torch.parallel.meshes import group_of

IMPORTS = (
    "from mithril_torch.parallel.collectives import exchanged, gathered, reduced, scattered",
    "from mithril_torch.parallel.collectives import with_cotangent, with_split",
)
STORED = {torch.bool: torch.uint8, torch.uint32: torch.int32}  # collectives lack these dtypes


@needs(imports=IMPORTS)
def all_reduce(x, mesh, kind):  # type: ignore[no-untyped-def]
    """Return the sum, maximum or minimum over the group; 16-bit floats travel as 16 bits."""
    return reduced(x, mesh, kind)


@needs(imports=IMPORTS)
def all_gather(x, mesh, parts, axis):  # type: ignore[no-untyped-def]
    """Return the shards of the group, concatenated along ``axis``."""
    return gathered(x, mesh, parts, axis)


@needs(imports=IMPORTS)
def reduce_scatter(x, mesh, parts, axis):  # type: ignore[no-untyped-def]
    """Return this process's shard of the sum over the group."""
    return scattered(x, mesh, parts, axis)


@needs(imports=IMPORTS)
def all_to_all(x, mesh, parts, split, axis):  # type: ignore[no-untyped-def]
    """Return the parts of the group along ``axis``, concatenated, of one part along ``split``."""
    return exchanged(x, mesh, parts, split, axis)


@needs(imports=IMPORTS)
def constrain(x, split):  # type: ignore[no-untyped-def]
    """Return the value split over the model axis as the text says."""
    return with_split(x, split)


@needs(imports=IMPORTS)
def cotangent(x, mesh, scale):  # type: ignore[no-untyped-def]
    """Return the value; its cotangent is summed over the group, if any, and scaled."""
    return with_cotangent(x, mesh, scale)


for _function in (cotangent, all_reduce, all_gather, all_to_all, reduce_scatter, constrain):
    table.helper(_function, op=f"mesh.{_function.__name__}")


def reduced(x: Any, mesh: str, kind: str) -> Any:
    return _on_local(_Reduced, x, group_of(mesh), kind)


def gathered(x: Any, mesh: str, parts: int, axis: int) -> Any:
    return _on_local(_Exchanged, x, _all_gather, _reduce_scatter, group_of(mesh), parts, axis)


def scattered(x: Any, mesh: str, parts: int, axis: int) -> Any:
    return _on_local(_Exchanged, x, _reduce_scatter, _all_gather, group_of(mesh), parts, axis)


def exchanged(x: Any, mesh: str, parts: int, split: int, axis: int) -> Any:
    return _on_local(_Exchanged, x, _all_to_all, _all_to_all_back, group_of(mesh), parts, split, axis)


def with_cotangent(x: Any, mesh: str, scale: float) -> Any:
    return _on_local(_WithCotangent, x, group_of(mesh) if mesh else None, scale)


def with_split(x: Any, split: str) -> Any:
    """Return a ``DTensor`` redistributed over the model axis; ``split`` names the axis of the mesh for each axis."""
    if not hasattr(x, "to_local"):
        return x
    from torch.distributed.tensor import Replicate, Shard

    axes = split.split()
    return x.redistribute(placements=[Shard(axes.index(MODEL)) if MODEL in axes else Replicate()])


def _on_local(function: Any, x: Any, *arguments: Any) -> Any:
    """Apply a collective; a tensor that is split over another axis of the mesh exchanges its local part."""
    if not hasattr(x, "to_local"):
        return function.apply(x, *arguments)
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    local = x.redistribute(placements=placements).to_local()
    return of_parts(function.apply(local, *arguments), x.device_mesh, placements)


def of_parts(local: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """Return the ``DTensor`` of equal parts on a mesh of one axis.

    DTensor infers strides from those of the part, which are arbitrary along an axis of length 1 (PyTorch 2.13).
    """
    from torch.distributed.tensor import DTensor

    shape = [n * mesh.size() if placements[0].is_shard(k) else n for k, n in enumerate(local.shape)]
    stride = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _all_reduce(x: torch.Tensor, group: Any, kind: str = "sum") -> torch.Tensor:
    buffer = x.to(STORED.get(x.dtype, x.dtype), copy=True).contiguous()
    dist.all_reduce(buffer, getattr(dist.ReduceOp, kind.upper()), group)
    return buffer.to(x.dtype)


def _all_gather(x: torch.Tensor, group: Any, parts: int, axis: int) -> torch.Tensor:
    local, stored = x.contiguous(), STORED.get(x.dtype)
    local = local if stored is None else local.view(stored)
    shards = [torch.empty_like(local) for _ in range(parts)]
    dist.all_gather(shards, local, group)
    full = torch.cat(shards, axis)
    return full if stored is None else full.view(x.dtype)


def _reduce_scatter(x: torch.Tensor, group: Any, parts: int, axis: int) -> torch.Tensor:
    shards = [part.contiguous() for part in x.chunk(parts, axis)]
    result = torch.empty_like(shards[0])
    dist.reduce_scatter(result, shards, dist.ReduceOp.SUM, group)
    return result


def _all_to_all(x: torch.Tensor, group: Any, parts: int, split: int, axis: int) -> torch.Tensor:
    stored = STORED.get(x.dtype)
    parcels = torch.stack((x if stored is None else x.contiguous().view(stored)).chunk(parts, split))
    received = torch.empty_like(parcels)
    dist.all_to_all_single(received, parcels, group=group)
    full = torch.cat(tuple(received), axis)
    return full if stored is None else full.view(x.dtype)


def _all_to_all_back(x: torch.Tensor, group: Any, parts: int, split: int, axis: int) -> torch.Tensor:
    return _all_to_all(x, group, parts, axis, split)


class _Reduced(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx, x, group, kind):  # type: ignore[no-untyped-def]
        y = _all_reduce(x, group, "sum" if kind == "total" else kind)
        ctx.group, ctx.kind = group, kind
        if kind not in ("sum", "total"):
            ctx.save_for_backward(x, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if ctx.kind == "total":
            return gradient * dist.get_world_size(ctx.group), None, None
        total = _all_reduce(gradient, ctx.group)
        if ctx.kind != "sum":  # equal extrema share the gradient
            x, y = ctx.saved_tensors
            is_extremum = (x == y).to(gradient.dtype)
            total = total * is_extremum / _all_reduce(is_extremum, ctx.group)
        return total, None, None


class _WithCotangent(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx, x, group, scale):  # type: ignore[no-untyped-def]
        ctx.group, ctx.scale = group, scale
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        total = gradient if ctx.group is None else _all_reduce(gradient, ctx.group)
        return total * ctx.scale, None, None


class _Exchanged(torch.autograd.Function):  # type: ignore[misc]
    """A collective whose transpose is another one."""

    @staticmethod
    def forward(ctx, x, collective, transpose, *arguments):  # type: ignore[no-untyped-def]
        ctx.transpose, ctx.arguments = transpose, arguments
        return collective(x, *arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return ctx.transpose(gradient, *ctx.arguments), None, None, *(None for _ in ctx.arguments)
