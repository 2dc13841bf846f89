"""Plugin of mithril-array."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Export, hookimpl


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """``ml.array_api``."""
    return [Export("array_api", "mithril_array.namespace:array_api")]
