"""The options of ``ml.compile`` that the compiled model reads when it is called."""

from __future__ import annotations

from mithril.backend import Positive
from mithril.plugins import Option

CALL_OPTIONS = (
    Option(
        "max_programs",
        Positive,
        64,
        "Maximum number of cached programs for calls with different shapes; the least recently used is evicted.",
        affects="shown",
    ),
    Option("seed", int, 0, "Seed for the initial parameters and random operations."),
)
