"""Plugin of mithril-compat."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Command, hookimpl


@hookimpl
def mithril_commands() -> Sequence[Command]:
    """``mithril migrate``."""
    loads = "mithril_compat.migration.command:migrate"
    return [Command("migrate", loads, "Rewrite programs of mithril's predecessor in today's spelling.")]
