"""Plugin of mithril-lora; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Export, hookimpl


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return ``ml.LoRA`` and ``ml.Adapter``."""
    return [Export("LoRA", "mithril_lora.adapters:LoRA"), Export("Adapter", "mithril_lora.adapters:Adapter")]
