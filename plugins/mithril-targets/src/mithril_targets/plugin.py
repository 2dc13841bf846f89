"""Plugin of mithril-targets; importing this module does not inspect the machine."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Found, HardwareTarget, hookimpl


@hookimpl
def mithril_targets() -> Sequence[HardwareTarget]:
    """Return all targets."""
    from mithril_targets.catalog import all_targets

    return all_targets()


@hookimpl
def mithril_detect_targets() -> Sequence[Found]:
    """Return the targets present on this machine."""
    from mithril_targets.catalog import detected

    return detected()
