"""How exchanges between devices are written: calls of ``torch.distributed`` on the group of a mesh axis."""

from __future__ import annotations

import torch

from mithril.backend import needs
from mithril_torch.lowering import table
from mithril_torch.parallel.worker import exchanged_as, group_of

OF_RANKS = ("from mithril_torch.parallel.worker import exchanged_as, group_of",)


@needs(imports=OF_RANKS)
def all_reduce(x, mesh, kind):  # type: ignore[no-untyped-def]
    """The sum, or the largest or smallest, over the group; 16 bits are summed in 32."""
    made = x.to(exchanged_as(x.dtype, kind), copy=True).contiguous()
    op = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}.get(kind)
    torch.distributed.all_reduce(made, op or torch.distributed.ReduceOp.MIN, group_of(mesh))
    return made.to(x.dtype)


@needs(imports=OF_RANKS)
def all_gather(x, mesh, parts, axis):  # type: ignore[no-untyped-def]
    """The parts of the group side by side."""
    given = x.contiguous()
    given = given.view(torch.uint8) if x.dtype == torch.bool else given
    made = [torch.empty_like(given) for _ in range(parts)]
    torch.distributed.all_gather(made, given, group_of(mesh))
    whole = torch.cat(made, axis)
    return whole.view(torch.bool) if x.dtype == torch.bool else whole


@needs(imports=OF_RANKS)
def reduce_scatter(x, mesh, parts, axis):  # type: ignore[no-untyped-def]
    """The sum over the group, of which each keeps its part."""
    given = [part.contiguous() for part in x.to(exchanged_as(x.dtype, "sum")).chunk(parts, axis)]
    made = torch.empty_like(given[0])
    torch.distributed.reduce_scatter(made, given, torch.distributed.ReduceOp.SUM, group_of(mesh))
    return made.to(x.dtype)


for _function in (all_reduce, all_gather, reduce_scatter):
    table.helper(_function, op=f"mesh.{_function.__name__}")
