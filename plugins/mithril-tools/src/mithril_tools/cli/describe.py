"""``mithril describe`` and ``mithril stubs``: names that distributions provide, as data and as types."""

from __future__ import annotations

from pathlib import Path

import click

from mithril import plugins
from mithril.graph import PluginError, closest
from mithril_tools.cli.output import console, json_option, print_json, show


@click.command()
@click.argument("distribution")
@json_option
def describe(distribution: str, as_json: bool) -> None:
    """List the names that an installed DISTRIBUTION provides.

    With --json, print an entry of registry.json, from which mithril-core looks up the distribution of a
    missing name.
    """
    from mithril_tools.known import entry

    installed = sorted({plugin.distribution for plugin in plugins.found()})
    if distribution not in installed:
        suggestions = closest(distribution, installed)
        raise PluginError(
            f"no plugin of a distribution '{distribution}' is installed",
            facts=[f"installed: {', '.join(installed) or 'none'}"],
            hint=f"did you mean '{suggestions[0]}'?" if suggestions else f"pip install {distribution}",
        )
    names = entry(distribution)
    if as_json:
        print_json({distribution: names})
        return
    show([{"kind": kind, "names": ", ".join(members)} for kind, members in names.items()], ["kind", "names"], console())


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def stubs(folder: Path) -> None:
    """Write type stubs of mithril, including the names and options of all installed plugins.

    FOLDER/mithril gets every module of the package. pyright reads the folder typings/ by default
    (name it under "ignore" in pyrightconfig.json); mypy does where mypy_path names the folder.
    """
    from mithril_tools.stubs import write_installed_stubs

    click.echo(f"written: {write_installed_stubs(folder)}")
