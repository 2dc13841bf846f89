"""Plugin of mithril-serve; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Command, Export, hookimpl


@hookimpl
def mithril_commands() -> Sequence[Command]:
    """Return the command ``serve``."""
    return [Command("serve", "mithril_serve.cli:serve", "Serve a model over HTTP.")]


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return ``compiled.serve``."""
    return [Export("serve", "mithril_serve.serving:serve", on="CompiledModel")]
