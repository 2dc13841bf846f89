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
    ]
