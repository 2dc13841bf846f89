"""Attention whose queries, keys and values are split along the positions: keys and values pass around a ring.

Each process reads the keys and values of one other while it receives the next ones, so that none has all positions.
The partial results are combined by the logarithms of their sums of weights, which are exact: the result is that of one
softmax. Gradients pass around the ring with the keys and values that they belong to. Keys and values that several heads
share are exchanged once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mithril.backend import needs
from mithril_torch.lowering import table
from mithril_torch.parallel.collectives import of_parts
from mithril_torch.parallel.meshes import group_of

Tensors = tuple[torch.Tensor, ...]
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
GRADIENT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@needs(imports=("from mithril_torch.parallel.ring_attention import attend",))
def ring_attention(q, k, v, mesh, causal, scale):  # type: ignore[no-untyped-def]
    """Return the attention of this process's queries over the keys of all processes of the group."""
    return attend(q, k, v, mesh, causal, scale)


table.helper(ring_attention, op="mesh.ring_attention")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mesh: str, causal: bool, scale: float | None) -> Any:
    if hasattr(q, "to_local"):
        return _on_heads(q, k, v, mesh, causal, scale)
    return _Ring.apply(q, k, v, group_of(mesh), causal, q.shape[-1] ** -0.5 if scale is None else scale)


def _on_heads(q: Any, k: Any, v: Any, *arguments: Any) -> Any:
    """Attend with the heads of this process, if all operands are split along them."""
    from torch.distributed.tensor import Replicate, Shard

    heads = all(getattr(x, "placements", None) == (Shard(1),) for x in (q, k, v))
    places = [Shard(1) if heads else Replicate()]
    parts = [x.redistribute(placements=places).to_local() if hasattr(x, "to_local") else x for x in (q, k, v)]
    return of_parts(attend(*parts, *arguments), q.device_mesh, places)


class _Ring(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx, q, k, v, group, causal, scale):  # type: ignore[no-untyped-def]
        ring, q = Ring(group), q.contiguous()
        total = sums = None
        for source, (keys, values) in ring.turns((k, v)):
            # Keys of later positions: no query of this process may read them. They are still passed on.
            if causal and source > ring.rank:
                continue
            part, part_sums = block(q, keys, values, causal and source == ring.rank, scale)
            total, sums = (part, part_sums) if total is None else combined(total, sums, part, part_sums)
        assert total is not None
        y = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.ring, ctx.causal, ctx.scale = ring, causal, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        q, k, v, y, sums = ctx.saved_tensors
        ring, g = ctx.ring, g.contiguous()
        of_query, *of_others = (torch.zeros_like(x, dtype=_wide(x)) for x in (q, k, v))
        for source, (keys, values) in ring.turns((k, v)):
            if not ctx.causal or source <= ring.rank:
                is_causal = ctx.causal and source == ring.rank
                parts = block_gradients(g, q, keys, values, y, sums, is_causal, ctx.scale)
                of_query += parts[0]
                of_others = [total + x for total, x in zip(of_others, parts[1:], strict=True)]
            # to the process that has these keys and values next
            of_others = ring.passed(tuple(x.to(operand.dtype) for x, operand in zip(of_others, (k, v), strict=True)))
        return of_query.to(q.dtype), *of_others, None, None, None


class Ring:
    """The processes of a group in a circle: each sends to the next one, and receives from the previous one."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def turns(self, tensors: Tensors) -> Any:
        """Yield the rank of each process with its tensors, from this one backwards. The next ones travel."""
        tensors = tuple(x.contiguous() for x in tensors)
        for turn in range(self.size):
            is_last = turn == self.size - 1
            # Sent before the caller computes, so that the next keys travel during the computation.
            works, following = ((), tensors) if is_last else self._send(tensors)
            yield (self.rank - turn) % self.size, tensors
            for work in works:
                work.wait()
            tensors = following

    def passed(self, tensors: Tensors) -> Tensors:
        """Send tensors to the next process, and return those of the previous one."""
        works, received = self._send(tuple(x.contiguous() for x in tensors))
        for work in works:
            work.wait()
        return received

    def _send(self, tensors: Tensors) -> tuple[Any, Tensors]:
        received = tuple(torch.empty_like(x) for x in tensors)
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=following) for x in tensors]
        operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=previous) for x in received]
        return dist.batch_isend_irecv(operations), received


# -- one block of keys -------------------------------------------------------------------------------------------------
def combined(y: Any, sums: Any, part: Any, part_sums: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over the keys of both results, and the logarithms of its sums of weights."""
    # Weights of both parts are renormalized by the log of their common sum, as in online softmax,
    # without overflow.
    total = torch.logaddexp(sums, part_sums)
    old, new = ((x - total).exp().unsqueeze(-1) for x in (sums, part_sums))
    return y * old + part * new, total


def block(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over a block of keys, at least as float32, and the logarithms of its sums of weights."""
    k, v = _for_heads(k, q), _for_heads(v, q)
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        y, sums = KERNEL(q, k, v, 0.0, causal, scale=scale)
        return y.to(_wide(q)), sums
    scores = _scores(q, k, causal, scale)
    sums = scores.logsumexp(-1)
    return (scores - sums.unsqueeze(-1)).exp() @ v.to(_wide(v)), sums


def block_gradients(g: Any, q: Any, k: Any, v: Any, y: Any, sums: Any, causal: bool, scale: float) -> Tensors:
    """Return the gradients for queries, keys and values of a block; ``y`` and ``sums`` are those of all blocks."""
    shared = k.shape[1]
    k, v = _for_heads(k, q), _for_heads(v, q)
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        of_query, *of_others = GRADIENT(g, q, k, v, y, sums, 0.0, causal, scale=scale)
    else:
        weights = (_scores(q, k, causal, scale) - sums.unsqueeze(-1)).exp()
        g, q, k, v, y = (x.to(_wide(x)) for x in (g, q, k, v, y))
        slopes = weights * (g @ v.mT - (g * y).sum(-1, keepdim=True)) * scale
        of_query, of_others = slopes @ k, [slopes.mT @ q, weights.mT @ g]
    return of_query, *(x.unflatten(1, (shared, -1)).sum(2, dtype=_wide(x)) for x in of_others)


def _for_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return keys or values for every head of the queries, of which several may share them."""
    heads = q.shape[1] // x.shape[1]
    return x if heads == 1 else x.repeat_interleave(heads, 1)


def _scores(q: Any, k: Any, causal: bool, scale: float) -> torch.Tensor:
    scores = q.to(_wide(q)) @ k.to(_wide(k)).mT * scale
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, float("-inf"))


def _wide(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums: float32 for few bits, that of the tensor otherwise."""
    return torch.promote_types(x.dtype, torch.float32)
