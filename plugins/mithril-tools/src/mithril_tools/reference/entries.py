"""Pages of options, passes, hooks, commands and public names."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Any

import mithril
from mithril import plugins
from mithril.compiler import option_rows
from mithril.plugins import HOOKS, WRAPPABLE, pip_hints
from mithril_tools.reference.author_examples import examples
from mithril_tools.reference.error_pages import error_classes
from mithril_tools.reference.page import Page, call_block, fence, first_line, prose, sections, signature_text, table

DESCRIPTORS = (
    "BackendSpec",
    "DeviceSpec",
    "PassSpec",
    "HardwareTarget",
    "MemoryLevel",
    "Found",
    "ProfilerSpec",
    "Option",
    "OpsSpec",
    "Lowering",
    "Export",
    "FrontendSpec",
    "FileFormat",
    "Architecture",
    "Command",
)


# -- options ---------------------------------------------------------------------------------------------------------
def option_pages() -> Iterator[Page]:
    """Yield the page of each keyword of ``ml.compile``."""
    for row in option_rows():
        yield Page("option", row["name"], row["help"], partial(option_text, row), row["owner"])


def option_text(row: dict[str, Any]) -> str:
    """Return the page of an option."""
    aliases = ", ".join(f"`{alias}`" for alias in row["aliases"])
    rows = [("accepts", row["type"]), ("default", f"`{row['default']}`"), ("owner", row["owner"])]
    call = fence(f"ml.compile(model, backend, {row['example'] or row['name'] + '=...'})")
    if aliases:
        rows.append(("aliases", aliases))
    return f"{call}\n\n{row['help']}\n\n{table(('property', 'value'), rows)}"


def with_example(row: dict[str, Any]) -> str:
    """Return the help of an option with its example."""
    return f"{row['help']} Example: `{row['example']}`." if row["example"] else str(row["help"])


# -- passes ----------------------------------------------------------------------------------------------------------
def pass_pages() -> Iterator[Page]:
    """Yield the page of each pass."""
    for name, entry in sorted(plugins.passes().items()):
        yield Page("pass", name, entry.spec.summary, partial(pass_text, entry), entry.plugin.distribution)


def pass_text(entry: Any) -> str:
    """Return the page of a pass: its place in the pipeline, the ways to select it, and its documentation."""
    spec = entry.spec
    level = f"from optimization_level '{spec.level}' on" if spec.level else "only by name or by an option"
    rows = [("distribution", entry.origin), ("stage", f"`{spec.stage}`"), ("runs", level)]
    for title, names in (
        ("other names", spec.aliases),
        ("groups", spec.groups),
        ("before", spec.before),
        ("after", spec.after),
        ("reads the options", spec.options),
    ):
        if names:
            rows.append((title, ", ".join(f"`{name}`" for name in names)))
    switch = fence(f'ml.compile(model, backend, optimizations={{"{spec.name}": False}})  # leave it out')
    loaded = plugins.load_pass(spec.name)
    documentation = _own_documentation(loaded, spec.loads.partition(":")[0])
    return f"{spec.summary}\n\n{table(('property', 'value'), rows)}\n\n{switch}\n\n{documentation}".rstrip()


def _own_documentation(loaded: Any, module: str) -> str:
    """Return the docstring of a pass, or of its module where the pass is a set of rules."""
    from importlib import import_module

    documentation = inspect.getdoc(loaded) if inspect.isroutine(loaded) or inspect.isclass(loaded) else None
    return prose(documentation or import_module(module).__doc__)


# -- hooks and commands ------------------------------------------------------------------------------------------------
def hook_pages() -> Iterator[Page]:
    """Yield the page of each hook."""
    from mithril.plugins import hooks

    for name in HOOKS:
        function = getattr(hooks, name)
        yield Page("hook", name, first_line(function.__doc__), partial(hook_text, name))


def hook_text(name: str) -> str:
    """Return a hook's signature, purpose and example."""
    from mithril.plugins import hooks

    function = getattr(hooks, name)
    words, example = _split(inspect.getdoc(function) or "")
    note = "\n\nMay be wrapped with `@hookimpl(wrapper=True)`." if name in WRAPPABLE else ""
    return f"{call_block(f'def {name}', function)}\n\n{words}{note}\n\n{fence(example)}"


def _split(documentation: str) -> tuple[str, str]:
    words, _, example = documentation.partition(">>> ")
    lines = [re.sub(r"^(>>> |\.\.\. |\.\.\.$)", "", line) for line in (">>> " + example).splitlines()]
    return prose(words), "\n".join(lines)


def declaration(cls: type) -> str:
    """Return the fields of a descriptor, as they are declared."""
    source = textwrap.dedent(inspect.getsource(cls))
    return source.partition("\n    def ")[0].rstrip()


def command_pages() -> Iterator[Page]:
    """Yield the help text of each command."""
    from mithril_tools import cli

    summaries = {name: summary for name, (_, summary) in cli.COMMANDS.items()}
    summaries |= {n: e.spec.summary for n, e in plugins.commands().items() if n not in summaries}
    for name, summary in sorted(summaries.items()):
        yield Page("command", f"mithril {name}", summary, partial(command_text, name))


def command_text(name: str) -> str:
    """Return the help text of a command as a block."""
    return fence(command_help(name), "")


def command_help(name: str) -> str:
    """Return the text that ``mithril NAME --help`` prints."""
    import click

    from mithril_tools import cli

    group = click.Context(cli.main, info_name="mithril", **cli.main.context_settings)
    command = cli._load(cli.COMMANDS[name][0]) if name in cli.COMMANDS else plugins.load_command(name)
    context = click.Context(command, info_name=name, parent=group, max_content_width=100, terminal_width=100)
    return str(command.get_help(context))


# -- public names ----------------------------------------------------------------------------------------------------
def class_pages() -> Iterator[Page]:
    """Yield the page of each name of the public face, with those that plugins add."""
    homes = {n: "mithril-core" for names in mithril._HOME.values() for n in names}
    homes |= {n: e.plugin.distribution for n, e in plugins.exports().items()}
    homes["CompiledModel"] = "mithril-core"
    for name, owner in sorted(homes.items()):
        if (owner in pip_hints.DISTRIBUTIONS or owner == "mithril-core") and name not in error_classes():
            yield Page("class", name, partial(_about, name), partial(class_text, name), owner)


def _about(name: str) -> str:
    return first_line(inspect.getdoc(public_value(name)))


def public_value(name: str) -> Any:
    """Return the object of a public name; ``CompiledModel`` is the class of that which ``ml.compile`` returns."""
    if name == "CompiledModel":
        from mithril.compiler import CompiledModel

        return CompiledModel
    return getattr(mithril, name)


def class_text(name: str) -> str:
    """Return signature, documentation and public methods of a name of the public face."""
    value = public_value(name)
    head = f"{call_block(f'ml.{name}', value)}\n\n{prose(inspect.getdoc(value))}"
    if name == "compile":
        # Two columns, since five do not fit into a narrow terminal.
        facts = "{} Accepts {}; the default is `{}`. Owner: {}."
        options = [
            [f"`{r['name']}`", facts.format(with_example(r), r["type"], r["default"], r["owner"])]
            for r in option_rows()
        ]
        return f"{head}\n\n{sections([('Options', table(('option', 'meaning'), options))])}"
    example = examples().get(("mithril", name), "")
    members = members_table(value) if inspect.isclass(value) else ""
    return f"{head}\n\n{sections([('Members', members), ('Example', example and fence(example))])}".rstrip()


def members_table(value: type) -> str:
    """Return the public methods and properties of a class as a table; empty if there are none."""
    rows = []
    for member, kind, definer, _ in inspect.classify_class_attrs(value):
        if member.startswith("_") or definer.__module__.partition(".")[0] in ("builtins", "enum"):
            continue
        # A name of other frameworks, whose access is an error with the way here.
        if not hasattr(value, member):
            continue
        attribute = inspect.getattr_static(value, member)
        summary = first_line(inspect.getdoc(attribute)) if kind != "data" else ""
        if kind in ("method", "class method", "static method"):
            rows.append((f"`{member}{signature_text(getattr(value, member))}`", summary))
        elif kind == "property":
            rows.append((f"`{member}`", summary))
    return table(("name", "meaning"), rows) if rows else ""
