"""Fusion of several operations into those that backends compute at once."""

from __future__ import annotations

from mithril import PassSpec

FUSION = ("fusion", "operator_fusion")  # the names that select all fusion passes

PASSES = (
    PassSpec(
        "operator-fusion",
        "mithril_passes.fusion.composite_matching:operator_fusion",
        stage="fuse",
        level="medium",
        aliases=(
            "operator_fusion",
            "fusion",
        ),
        groups=FUSION,
        summary="Raise parts written out to activations, softmax, norms, linear, attention.",
    ),
    PassSpec(
        "batch-norm-folding",
        "mithril_passes.fusion.batch_norm:RULES",
        stage="fuse",
        level=None,
        options=("inference", "static_inference"),
        groups=FUSION,
        after=("operator-fusion",),
        summary="For inference: a batch norm goes into the weights of the product before it.",
    ),
    PassSpec(
        "sibling-products",
        "mithril_passes.fusion.horizontal_fusion:sibling_products",
        stage="specialize",
        level="high",
        favors="throughput",
        groups=FUSION,
        summary="Products of one operand with several weights as one product.",
    ),
    PassSpec(
        "linear-activation",
        "mithril_passes.fusion.horizontal_fusion:RULES",
        stage="specialize",
        level="medium",
        groups=FUSION,
        after=("sibling-products",),
        summary="Merge an activation into the linear before it.",
    ),
)
