"""Rows that are routed to experts of other processes: an all-to-all sends each to the process of its expert, and back.

Processes exchange the numbers of rows of each expert first, so that each receives the rows of its experts only. They
are stored in a buffer with place for all rows of the group, as static shapes require; no product is computed for the
rest. Autograd sends cotangents the other way. All processes take part in all exchanges, also with no row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mithril.backend import needs
from mithril_torch.lowering import table
from mithril_torch.parallel.meshes import group_of

IMPORT = "from mithril_torch.parallel.routed_rows import returned, sent"


@needs(imports=(IMPORT,))
def to_experts(x, experts, mesh, parts, count):  # type: ignore[no-untyped-def]
    """Return the rows for the experts of this process, their numbers, and how many each process has sent to each."""
    return sent(x, experts, mesh, parts, count)


@needs(imports=(IMPORT,))
def from_experts(y, experts, counts, mesh, parts, count):  # type: ignore[no-untyped-def]
    """Return the results of the experts in the order of the rows of this process."""
    return returned(y, experts, counts, mesh, parts, count)


for _function in (to_experts, from_experts):
    table.helper(_function, op=f"mesh.{_function.__name__}")


def sent(x: torch.Tensor, experts: torch.Tensor, mesh: str, parts: int, count: int) -> tuple[torch.Tensor, ...]:
    group, numbers = group_of(mesh), experts.reshape(-1)
    order, outgoing = _grouped(numbers, parts * count)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    capacity = parts * numbers.shape[0]
    local = torch.arange(count, device=x.device).repeat(parts).repeat_interleave(incoming)
    local = torch.nn.functional.pad(local, (0, capacity - local.shape[0]), value=count).to(experts.dtype)
    sizes = _by_process(outgoing, parts), _by_process(incoming, parts)
    rows = x.reshape(-1, x.shape[-1])[order.div(experts.shape[-1], rounding_mode="floor")]
    return _Sent.apply(rows, *sizes, group, capacity), local, incoming.to(torch.int32)


def returned(y: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor, mesh: str, parts: int, count: int) -> Any:
    order, outgoing = _grouped(experts.reshape(-1), parts * count)
    sizes = _by_process(counts, parts), _by_process(outgoing, parts)
    rows = _Sent.apply(y[: sum(sizes[0])], *sizes, group_of(mesh), sum(sizes[1]))
    zeros = y.new_zeros(experts.numel(), y.shape[-1])  # the results of experts that no process has
    return zeros.index_copy(0, order, rows).reshape(*experts.shape, y.shape[-1])


def _grouped(numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows with an expert, ordered by its number, and how many each expert has."""
    numbers = numbers.to(torch.int64)  # PyTorch cannot compare uint32
    valid = torch.where((numbers >= 0) & (numbers < count), numbers, count)
    counts = torch.bincount(valid, minlength=count + 1)[:count]
    return torch.argsort(valid, stable=True)[: int(counts.sum())], counts


def _by_process(counts: torch.Tensor, parts: int) -> list[int]:
    sizes: list[int] = counts.reshape(parts, -1).sum(1).tolist()
    return sizes


class _Sent(torch.autograd.Function):  # type: ignore[misc]
    """Rows in the order of their receivers, exchanged for those in the order of their senders, and zeros."""

    @staticmethod
    def forward(ctx, rows, outgoing, incoming, group, capacity):  # type: ignore[no-untyped-def]
        ctx.arguments = incoming, outgoing, group, rows.shape[0]
        return _exchanged(rows, outgoing, incoming, group, capacity)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        incoming, *_ = ctx.arguments
        return _exchanged(gradient[: sum(incoming)], *ctx.arguments), None, None, None, None


def _exchanged(rows: torch.Tensor, outgoing: list[int], incoming: list[int], group: Any, capacity: int) -> torch.Tensor:
    buffer = rows.new_zeros(capacity, rows.shape[1])
    dist.all_to_all_single(buffer[: sum(incoming)], rows.contiguous(), incoming, outgoing, group=group)
    return buffer
