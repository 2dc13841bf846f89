"""Gradient checkpointing: less memory, more computation."""

from __future__ import annotations

from typing import Literal

from mithril import Option, PassSpec
from mithril.backend import Positive

PASSES = (
    PassSpec(
        "gradient-checkpointing",
        "mithril_passes.memory.checkpointing:gradient_checkpointing",
        stage="memory",
        level=None,
        options=("gradient_checkpointing",),
        summary="Forget values the backward part needs, and compute them again.",
    ),
)

OPTIONS = (
    Option("gradient_checkpointing", bool, False, "Recompute values in the backward pass instead of storing them."),
    Option(
        "checkpoint_segments",
        Positive | None,
        None,
        "Number of segments to recompute; None selects the number that minimizes memory.",
        example="4",
    ),
    Option(
        "checkpoint_policy",
        Literal["nothing", "dots", "dots_with_no_batch_dims"] | None,
        None,
        "Recompute equal layers one by one, except for stored products: of none, of all, or of weights (as in JAX).",
        example='"dots"',
    ),
)
