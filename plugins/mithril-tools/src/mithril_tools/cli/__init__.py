"""The ``mithril`` command line: a table of subcommands, imported when they run; plugins add others with a hook."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from mithril import __version__
from mithril.graph import MithrilError, closest

# name: (module:function, one line of help). A new command is one row here.
COMMANDS = {
    "backends": (
        "mithril_tools.cli.listing:backends",
        "List backends: installed, usable, and how to install the others.",
    ),
    "bench": ("mithril_tools.cli.bench:bench", "Time a model on installed backends, for one or several batch sizes."),
    "cache": ("mithril_tools.cli.bench:cache", "Show or clear the disk cache of cache=True."),
    "calibrate": (
        "mithril_tools.cli.calibrate:calibrate",
        "Measure the samples that ml.estimate predicts running times from.",
    ),
    "compile": ("mithril_tools.cli.models:compile_command", "Compile MODEL and print the generated program."),
    "demo": (
        "mithril_tools.cli.demo:demo",
        "Run one model on every installed backend: compared results, timings, a picture of the graph.",
    ),
    "describe": (
        "mithril_tools.cli.describe:describe",
        "List the names that an installed DISTRIBUTION provides.",
    ),
    "diff": (
        "mithril_tools.cli.models:diff_command",
        "Run MODEL on several backends, after each pass, or next to its source, and report the first op that differs.",
    ),
    "docs": (
        "mithril_tools.cli.docs:docs",
        "Print the page of an operation, layer, option, error or pass; without a name, open the reference.",
    ),
    "doctor": (
        "mithril_tools.cli.doctor:doctor",
        "Report versions, devices, threads, and why a plugin did not load.",
    ),
    "explain": (
        "mithril_tools.cli.models:explain_command",
        "Show the decisions of compiling MODEL, the effect of each pass, and why a fusion did not fire.",
    ),
    "export": (
        "mithril_tools.cli.models:export_command",
        "Write MODEL with its parameters as TARGET: a folder of C, an ONNX or GGUF file, a page for browsers.",
    ),
    "new-plugin": (
        "mithril_tools.cli.new_plugin:new_plugin",
        "Write a complete distribution with tests: operation, layer, pass, backend and other kinds.",
    ),
    "options": ("mithril_tools.cli.listing:options", "List every keyword of ml.compile, with its owner."),
    "passes": (
        "mithril_tools.cli.listing:passes",
        "List passes in the order in which they run, and the pipeline of each level.",
    ),
    "plugins": (
        "mithril_tools.cli.listing:plugins",
        "List the installed plugins, the things they provide, and their state.",
    ),
    "stubs": (
        "mithril_tools.cli.describe:stubs",
        "Write type stubs of mithril, including the names and options of all installed plugins.",
    ),
}


def _load(loads: str) -> click.Command:
    module, _, name = loads.partition(":")
    command: click.Command = getattr(import_module(module), name)
    return command


class Commands(click.Group):
    """A group that knows only the names of its commands until one is run."""

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
            suggestions = closest(name, self.list_commands(ctx))
            hint = f"did you mean '{suggestions[0]}'?" if suggestions else "`mithril --help` lists all commands."
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
    """Compile, run and inspect mithril models; every backend, pass and tool is a plugin."""
    from mithril import plugins

    plugins.reserve("mithril_commands", COMMANDS)
    if disable_plugins:
        plugins.reload(disable=disable_plugins.split(","))
        names = {word.strip().lower() for word in disable_plugins.split(",")}
        for name in plugins.default.loader.unknown_disabled():
            # MITHRIL_DISABLE_PLUGINS may be set for several environments: only names of the option must exist.
            if name in names:
                suggestions = closest(name, [n for p in plugins.found() for n in (p.name, p.distribution)])
                hint = f"did you mean '{suggestions[0]}'?" if suggestions else "`mithril plugins` lists all plugins."
                raise click.UsageError(f"--disable-plugins: no plugin is named '{name}'; {hint}")
