"""Stages of the pass pipeline, in execution order, and optimization levels."""

STAGES = ("clean", "canonical", "fuse", "specialize", "precision", "layout", "memory", "final")
LEVELS = ("none", "low", "medium", "high")
PASS_LEVELS = LEVELS[1:]  # the lowest level that includes a pass
STAGE_ALIASES = {"specialise": "specialize"}  # earlier spellings, still accepted
