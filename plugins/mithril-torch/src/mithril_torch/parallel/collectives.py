"""Lowering of collectives to ``torch.distributed`` calls on the group of a mesh axis."""

from __future__ import annotations

import torch

from mithril.backend import needs
from mithril_torch.lowering import table
from mithril_torch.parallel.worker import group_of

WORKER_IMPORTS = ("from mithril_torch.parallel.worker import group_of",)


@needs(imports=WORKER_IMPORTS)
def all_reduce(x, mesh, kind):  # type: ignore[no-untyped-def]
    """Return the sum, maximum or minimum over the group; 16-bit floats travel as 16 bits."""
    buffer = x.to(torch.uint8 if x.dtype == torch.bool else x.dtype, copy=True).contiguous()
    op = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}.get(kind)
    torch.distributed.all_reduce(buffer, op or torch.distributed.ReduceOp.MIN, group_of(mesh))
    return buffer.to(x.dtype)


@needs(imports=WORKER_IMPORTS)
def all_gather(x, mesh, parts, axis):  # type: ignore[no-untyped-def]
    """Return the shards of the group, concatenated along ``axis``."""
    local = x.contiguous()
    stored = {torch.bool: torch.uint8, torch.uint32: torch.int32}.get(x.dtype)  # collectives lack these dtypes
    local = local if stored is None else local.view(stored)
    shards = [torch.empty_like(local) for _ in range(parts)]
    torch.distributed.all_gather(shards, local, group_of(mesh))
    full = torch.cat(shards, axis)
    return full if stored is None else full.view(x.dtype)


@needs(imports=WORKER_IMPORTS)
def reduce_scatter(x, mesh, parts, axis):  # type: ignore[no-untyped-def]
    """Return this process's shard of the sum over the group."""
    shards = [part.contiguous() for part in x.chunk(parts, axis)]
    result = torch.empty_like(shards[0])
    torch.distributed.reduce_scatter(result, shards, torch.distributed.ReduceOp.SUM, group_of(mesh))
    return result


for _function in (all_reduce, all_gather, reduce_scatter):
    table.helper(_function, op=f"mesh.{_function.__name__}")
