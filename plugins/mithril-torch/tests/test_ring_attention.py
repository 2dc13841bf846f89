"""Attention over blocks of keys, combined, against one softmax over all keys."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("mithril_parallel", reason="graphs are cut by mithril-parallel")
from mithril_torch.parallel.ring_attention import block, block_gradients, combined

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}
LENGTH, SCALE = 5, 0.3


def by_one_softmax(q, k, v, causal):
    """Return attention in float64; the queries are those of the second block of keys."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(LENGTH + 1), float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("shared", [4, 2, 1])
@pytest.mark.parametrize(("dtype", "causal", "width"), list(itertools.product(TOLERANCES, (True, False), (8, 6))))
def test_two_blocks_equal_one_softmax(dtype, causal, width, shared):
    """Values of 8 features take the kernel of PyTorch, others products; the heads share keys and values."""
    torch.manual_seed(0)
    shapes = ((4, LENGTH, 8), (shared, 2 * LENGTH, 8), (shared, 2 * LENGTH, width), (4, LENGTH, width))
    q, k, v, g = (torch.randn(2, *shape, dtype=torch.float64).to(dtype) for shape in shapes)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = by_one_softmax(*exact, causal)
    gradients = torch.autograd.grad(expected, exact, g.double())
    blocks = list(zip(k.split(LENGTH, 2), v.split(LENGTH, 2), (False, causal), strict=True))
    parts = [block(q, keys, values, is_causal, SCALE) for keys, values, is_causal in blocks]
    total, sums = combined(*parts[0], *parts[1])
    y = total.to(dtype)
    slopes = [block_gradients(g, q, keys, values, y, sums, c, SCALE) for keys, values, c in blocks]
    actual = (
        slopes[0][0] + slopes[1][0],
        torch.cat([slopes[0][1], slopes[1][1]], 2),
        torch.cat([slopes[0][2], slopes[1][2]], 2),
    )
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    for left, right in zip((total, *actual), (expected, *gradients), strict=True):
        torch.testing.assert_close(left.double(), right, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
