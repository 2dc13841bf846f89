"""Removal of superfluous operations, constant folding and algebra."""

from __future__ import annotations

from mithril import PassSpec

PASSES = (
    PassSpec(
        "dead-code",
        "mithril_passes.cleaning.cleanup:dead_code_elimination",
        stage="clean",
        level="low",
        aliases=("dead_code_elimination",),
        summary="Drop unused operations, constants and region results.",
    ),
    PassSpec(
        "constant-folding",
        "mithril_passes.cleaning.cleanup:constant_folding",
        stage="clean",
        level="low",
        aliases=("constant_folding",),
        after=("dead-code",),
        summary="Evaluate expressions of constants.",
    ),
    PassSpec(
        "common-subexpression",
        "mithril_passes.cleaning.cleanup:common_subexpression",
        stage="clean",
        level="low",
        aliases=("common_subexpression",),
        after=("constant-folding",),
        summary="Compute equal expressions once.",
    ),
    PassSpec(
        "simplify",
        "mithril_passes.cleaning.simplify:EXACT",
        stage="canonical",
        level="low",
        summary="Algebra that holds bit for bit: reshapes, transposes, casts, neutral elements.",
    ),
    PassSpec(
        "fast-math",
        "mithril_passes.cleaning.simplify:APPROXIMATE",
        stage="canonical",
        level="high",
        after=("simplify",),
        summary="Algebra that may change the last places.",
    ),
    PassSpec(
        "quantize-pairs",
        "mithril_passes.cleaning.simplify:QUANTIZE_PAIRS",
        stage="canonical",
        level=None,
        summary="Drop dequantize(quantize(x)): changes values, so only on request.",
    ),
    PassSpec(
        "late-constant-folding",
        "mithril_passes.cleaning.cleanup:late_constant_folding",
        stage="final",
        level=None,
        options=("static_inference",),
        summary="Fold expressions of bound parameters that other passes introduced.",
    ),
)
