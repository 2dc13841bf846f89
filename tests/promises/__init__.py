"""The ledger of promises: each promise of five documents, with a probe that observes its effect on each engine."""

from __future__ import annotations

ENGINES = ("numpy", "torch", "jax", "mlx", "c", "ggml")
