"""The ``mithril`` command line: a table of sub-commands, each imported when it is run; plugins add theirs by hook."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from mithril import __version__
from mithril.base.errors import MithrilError, closest

# name: (where it lives, one line of help). A new command of the core is one row here.
COMMANDS = {
    "backends": ("mithril_tools.cli.listing:backends", "Backends: installed, usable, and how to get the others."),
    "bench": ("mithril_tools.cli.bench:bench", "Time a model on installed backends, for one or several batch sizes."),
    "cache": ("mithril_tools.cli.bench:cache", "What cache=True has kept on disk: info, clear."),
    "calibrate": ("mithril_tools.cli.calibrate:calibrate", "Measure what estimates of running times are made from."),
    "compile": ("mithril_tools.cli.models:compile_command", "Compile a model and print what was generated."),
    "demo": (
        "mithril_tools.cli.demo:demo",
        "One model on every installed backend: results compared, timings, a picture of the graph.",
    ),
    "diff": (
        "mithril_tools.cli.models:diff_command",
        "A model on several backends, or after each pass: the first operation that departs.",
    ),
    "doctor": (
        "mithril_tools.cli.doctor:doctor",
        "This machine: versions, devices, threads, and why a plugin did not load.",
    ),
    "explain": (
        "mithril_tools.cli.models:explain_command",
        "What was decided while a model was compiled, and why a fusion did not fire.",
    ),
    "new-plugin": (
        "mithril_tools.cli.new_plugin:new_plugin",
        "Write a complete distribution with tests: pass, backend, target, profiler or op.",
    ),
    "options": ("mithril_tools.cli.listing:options", "Every keyword of ml.compile, with its owner."),
    "passes": (
        "mithril_tools.cli.listing:passes",
        "Passes in the order in which they run, and the pipeline of each level.",
    ),
    "plugins": ("mithril_tools.cli.listing:plugins", "Installed plugins: what they bring, and their state."),
}


def _load(loads: str) -> click.Command:
    module, _, name = loads.partition(":")
    command: click.Command = getattr(import_module(module), name)
    return command


class Commands(click.Group):
    """A group that knows its commands by name only, until one is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from mithril import plugins

        return sorted({*COMMANDS, *plugins.commands()})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        from mithril import plugins

        if name in COMMANDS:
            return _load(COMMANDS[name][0])
        if name in plugins.commands():
            command: click.Command = plugins.load_command(name)
            return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None:
            near = closest(name, self.list_commands(ctx))
            hint = f"did you mean '{near[0]}'?" if near else "`mithril --help` lists all commands."
            raise click.UsageError(f"unknown command '{name}'; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from mithril import plugins

        added = plugins.commands()
        rows = [
            (name, COMMANDS[name][1] if name in COMMANDS else f"{added[name].spec.summary} [{added[name].origin}]")
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MithrilError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mithril")
@click.option("--disable-plugins", metavar="NAMES", default="", help="Plugins to leave out: a,b or * for all of them.")
def main(disable_plugins: str) -> None:
    """A model is written once as a graph; everything that happens to it afterwards is a plugin."""
    from mithril import plugins

    plugins.reserve("mithril_commands", COMMANDS)
    if disable_plugins:
        plugins.reload(disable=disable_plugins.split(","))
        asked = {word.strip().lower() for word in disable_plugins.split(",")}
        for name in plugins.default.loader.unknown_disabled():
            if name in asked:  # not those of MITHRIL_DISABLE_PLUGINS, which serves several environments
                near = closest(name, [n for p in plugins.found() for n in (p.name, p.distribution)])
                hint = f"did you mean '{near[0]}'?" if near else "`mithril plugins` lists all plugins."
                raise click.UsageError(f"--disable-plugins: no plugin is named '{name}'; {hint}")
