"""Tensors of several shapes and dtypes that the processes of a group send to each other at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

Form = tuple[tuple[int, ...], torch.dtype]


def exchange(
    messages: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Form]], group: Any, device: torch.device
) -> list[list[torch.Tensor]]:
    """Send ``messages[r]`` to process ``r`` of the group; return the tensors of each process, of the expected forms."""
    if len(messages) == 1:
        return [list(messages[0])]
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    packed = [torch.cat([empty, *map(_bytes, tensors)]) for tensors in messages]
    sizes = [[prod(shape) * dtype.itemsize for shape, dtype in forms] for forms in expected]
    totals = [sum(row) for row in sizes]
    incoming = torch.empty(sum(totals), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, torch.cat(packed), totals, [len(m) for m in packed], group=group)
    received = []
    for message, row, forms in zip(incoming.split(totals), sizes, expected, strict=True):
        parts = message.split(row) if row else ()
        received.append([_aligned(p, t).view(t).view(shape) for p, (shape, t) in zip(parts, forms, strict=True)])
    return received


def _aligned(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes at an address that a tensor of this dtype can have."""
    return x.clone() if x.storage_offset() % dtype.itemsize else x


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
