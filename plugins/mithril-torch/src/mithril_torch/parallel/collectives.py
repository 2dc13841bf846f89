"""Lowering of collectives to ``torch.distributed`` calls on the group of a mesh axis."""

from __future__ import annotations

import torch

from mithril.backend import needs
from mithril_torch.lowering import table
from mithril_torch.parallel.worker import group_of, transfer_dtype

WORKER_IMPORTS = ("from mithril_torch.parallel.worker import transfer_dtype, group_of",)


@needs(imports=WORKER_IMPORTS)
def all_reduce(x, mesh, kind):  # type: ignore[no-untyped-def]
    """Return the sum, maximum or minimum over the group; 16-bit floats are summed in float32."""
    buffer = x.to(transfer_dtype(x.dtype, kind), copy=True).contiguous()
    op = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}.get(kind)
    torch.distributed.all_reduce(buffer, op or torch.distributed.ReduceOp.MIN, group_of(mesh))
    return buffer.to(x.dtype)


@needs(imports=WORKER_IMPORTS)
def all_gather(x, mesh, parts, axis):  # type: ignore[no-untyped-def]
    """Return the shards of the group, concatenated along ``axis``."""
    local = x.contiguous()
    local = local.view(torch.uint8) if x.dtype == torch.bool else local
    shards = [torch.empty_like(local) for _ in range(parts)]
    torch.distributed.all_gather(shards, local, group_of(mesh))
    full = torch.cat(shards, axis)
    return full.view(torch.bool) if x.dtype == torch.bool else full


@needs(imports=WORKER_IMPORTS)
def reduce_scatter(x, mesh, parts, axis):  # type: ignore[no-untyped-def]
    """Return this process's shard of the sum over the group."""
    shards = [part.contiguous() for part in x.to(transfer_dtype(x.dtype, "sum")).chunk(parts, axis)]
    result = torch.empty_like(shards[0])
    torch.distributed.reduce_scatter(result, shards, torch.distributed.ReduceOp.SUM, group_of(mesh))
    return result.to(x.dtype)


for _function in (all_reduce, all_gather, reduce_scatter):
    table.helper(_function, op=f"mesh.{_function.__name__}")
