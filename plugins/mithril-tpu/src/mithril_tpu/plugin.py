"""What mithril-tpu adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Found, HardwareTarget, hookimpl


@hookimpl
def mithril_targets() -> Sequence[HardwareTarget]:
    """All hardware that the project knows."""
    from mithril_tpu.targets import all_targets

    return all_targets()


@hookimpl
def mithril_detect_targets() -> Sequence[Found]:
    """What of it this machine has."""
    from mithril_tpu.targets import detected

    return detected()
