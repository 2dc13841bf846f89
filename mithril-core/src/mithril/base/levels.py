"""Stages of the pass pipeline, in execution order, and optimization levels."""

from mithril.base.deprecation import deprecated

STAGES = ("clean", "canonical", "fuse", "specialize", "precision", "layout", "memory", "final")
LEVELS = ("none", "low", "medium", "high")
PASS_LEVELS = LEVELS[1:]  # the lowest level that includes a pass


def stage_name(word: str) -> str:
    """Return the name of a stage for its name or its former name."""
    if word == "specialise":
        deprecated("the stage 'specialise'", "'specialize'", since="0.1")
        return "specialize"
    return word
