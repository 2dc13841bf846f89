"""Sparse weights: magnitude pruning, and formats that store the elements that stay."""

from __future__ import annotations

from mithril import Export

EXPORTS = (Export("sparsify", "mithril_passes.sparsity.sparsify:sparsify"),)
