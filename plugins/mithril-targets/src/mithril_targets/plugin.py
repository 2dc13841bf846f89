"""What mithril-targets adds to mithril; importing this module reads nothing of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Found, HardwareTarget, hookimpl


@hookimpl
def mithril_targets() -> Sequence[HardwareTarget]:
    """All hardware that the project knows."""
    from mithril_targets.catalog import all_targets

    return all_targets()


@hookimpl
def mithril_detect_targets() -> Sequence[Found]:
    """What of it this machine has."""
    from mithril_targets.catalog import detected

    return detected()
