"""Plugin of mithril-hub; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Export, hookimpl


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """``ml.from_pretrained`` and ``ml.generate``."""
    return [
        Export("from_pretrained", "mithril_hub.checkpoint.pretrained:from_pretrained"),
        Export("generate", "mithril_hub.generation.generate:generate"),
        Export("Session", "mithril_hub.generation.session:Session"),
    ]
