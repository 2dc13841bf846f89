"""Writes the reference parts of docs/plugins.md, cli.md and options.md from the code; ``--check`` only compares.

Each page keeps its hand-written beginning, up to the line that marks where the reference starts.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
DESCRIPTORS = (
    "BackendSpec",
    "PassSpec",
    "HardwareTarget",
    "Found",
    "ProfilerSpec",
    "Option",
    "OpsSpec",
    "Lowering",
    "Export",
    "FrontendSpec",
    "FileFormat",
    "Command",
)
MARK = "<!-- from here on written by docs/render.py -->"


def hooks() -> str:
    """Render every hook with its signature, purpose and example; then the descriptors."""
    from mithril.plugins import HOOKS, WRAPPABLE, hooks, specs

    parts = []
    for name in HOOKS:
        function = getattr(hooks, name)
        words, example = _split(inspect.getdoc(function) or "")
        note = "\n\nMay be wrapped with `@hookimpl(wrapper=True)`." if name in WRAPPABLE else ""
        signature = str(inspect.signature(function)).replace("'", "")
        parts.append(
            f"## `{name}`\n\n```python\ndef {name}{signature}\n```\n\n{words}{note}\n\n```python\n{example}\n```"
        )
    parts.append("## Descriptors\n\nAll are importable from `mithril`.")
    for name in DESCRIPTORS:
        parts.append(f"### `{name}`\n\n```python\n{_declaration(getattr(specs, name))}\n```")
    return "\n\n".join(parts)


def _split(documentation: str) -> tuple[str, str]:
    words, _, example = documentation.partition(">>> ")
    lines = [re.sub(r"^(>>> |\.\.\. |\.\.\.$)", "", line) for line in (">>> " + example).splitlines()]
    return words.strip().replace("``", "`"), "\n".join(lines)


def _declaration(cls: type) -> str:
    source = textwrap.dedent(inspect.getsource(cls))
    return source.partition("\n    def ")[0].rstrip()


def commands() -> str:
    """Render the help text of each command of mithril's own distributions."""
    import click

    from mithril import plugins
    from mithril_tools import cli

    group = click.Context(cli.main, info_name="mithril", **cli.main.context_settings)

    def help_of(name: str, command: click.Command) -> str:
        context = click.Context(command, info_name=name, parent=group, max_content_width=100, terminal_width=100)
        return command.get_help(context)

    commands = {name: cli._load(loads) for name, (loads, _) in cli.COMMANDS.items()}
    commands |= {name: plugins.load_command(name) for name, e in plugins.commands().items() if e.plugin.first_party}
    return "\n\n".join(
        f"## `mithril {n}`\n\n```\n{help_of(n, command)}\n```" for n, command in sorted(commands.items())
    )


def options() -> str:
    """Render a table of options per installed owner."""
    from mithril.compiler import option_rows

    owners: dict[str, list[str]] = {}
    for row in option_rows():
        default = row["default"].replace("|", "\\|")
        aliases = f" Also: {', '.join(f'`{alias}`' for alias in row['aliases'])}." if row["aliases"] else ""
        line = f"| `{row['name']}` | {row['type']} | `{default}` | {row['help']}{aliases} |"
        owners.setdefault(row["owner"], []).append(line)
    head = "| option | accepts | default | meaning |\n|---|---|---|---|\n"
    ordered = sorted(owners, key=lambda owner: (owner != "mithril-core", owner))
    return "\n\n".join(f"## {owner}\n\n{head}" + "\n".join(owners[owner]) for owner in ordered)


PAGES = {"plugins.md": hooks, "cli.md": commands, "options.md": options}


def page(name: str) -> tuple[Path, str, str]:
    """Return the path of a page, its current text, and its generated text."""
    path = DOCS / name
    text = path.read_text()
    begin, mark, _ = text.partition(MARK)
    if not mark:
        raise SystemExit(f"{path} lacks the line {MARK}")
    return path, text, f"{begin}{MARK}\n\n{PAGES[name]()}\n"


def architecture() -> tuple[Path, str, str]:
    """Return path, present text and expected text of the page with the drawing of the rooms."""
    from drawing import drawing

    path, begin, end = DOCS / "architecture.md", "<!-- drawn by docs/drawing.py -->", "<!-- end of the drawing -->"
    text = path.read_text()
    before, _, rest = text.partition(begin)
    return path, text, f"{before}{begin}\n{drawing()}\n{end}{rest.partition(end)[2]}"


def stubs() -> dict[str, tuple[Path, str, str]]:
    """Return path, present text and expected text of the stubs of the public face and of the rooms."""
    from mithril_tools.stubs import face_stub, room_stub

    core = DOCS.parent / "mithril-core/src/mithril"
    rooms = sorted(path.parent.name for path in core.glob("*/__init__.py") if "lazy_exports(" in path.read_text())
    texts = {core / "__init__.pyi": face_stub()}
    texts |= {core / room / "__init__.pyi": room_stub(f"mithril.{room}") for room in rooms}
    return {
        str(path.relative_to(core.parent)): (path, path.read_text() if path.exists() else "", text)
        for path, text in texts.items()
    }


def main() -> int:
    stale = []
    pages = {**{name: page(name) for name in PAGES}, "architecture.md": architecture(), **stubs()}
    for name, (path, text, expected) in pages.items():
        if text != expected:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(expected)
    if stale:
        print(("stale: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
