"""What mithril-passes adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import PassSpec, hookimpl


@hookimpl
def mithril_passes() -> Sequence[PassSpec]:
    """The standard passes."""
    cleaning = "mithril_passes.cleaning:"
    return [
        PassSpec(
            "dead-code",
            cleaning + "dead_code_elimination",
            stage="clean",
            level="low",
            aliases=("dead_code_elimination", "dead_code"),
            summary="Drop what no output needs.",
        ),
        PassSpec(
            "constant-folding",
            cleaning + "constant_folding",
            stage="clean",
            level="low",
            aliases=("constant_folding",),
            after=("dead-code",),
            summary="Compute now what depends on constants only.",
        ),
        PassSpec(
            "common-subexpression",
            cleaning + "common_subexpression",
            stage="clean",
            level="low",
            aliases=("common_subexpression", "common_subexpression_elimination", "cse"),
            after=("constant-folding",),
            summary="Compute equal expressions once.",
        ),
        PassSpec(
            "simplify",
            "mithril_passes.simplify:EXACT",
            stage="canonical",
            level="low",
            aliases=("algebraic_simplification",),
            summary="Algebra that holds bit for bit: reshapes, transposes, casts, neutral elements.",
        ),
        PassSpec(
            "fast-math",
            "mithril_passes.simplify:APPROXIMATE",
            stage="canonical",
            level="high",
            aliases=("fast_math",),
            after=("simplify",),
            summary="Algebra that may change the last places.",
        ),
        PassSpec(
            "operator-fusion",
            "mithril_passes.raising:RULES",
            stage="fuse",
            level="medium",
            aliases=("operator_fusion", "fusion"),
            summary="Raise parts written out to activations, softmax, norms, linear, attention.",
        ),
        PassSpec(
            "linear-activation",
            "mithril_passes.merging:RULES",
            stage="specialise",
            level="medium",
            aliases=("linear_activation",),
            summary="Merge an activation into the linear before it.",
        ),
    ]
