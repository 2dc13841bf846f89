"""``mithril docs [NAME]``: pages of the reference in the terminal or the browser, without a network."""

from __future__ import annotations

import re
import webbrowser
from pathlib import Path

import click

from mithril.graph import MithrilError
from mithril_tools.cli.output import console, json_option, print_json


@click.command()
@click.argument("name", required=False)
@click.option("--web", is_flag=True, help="Open the page in the browser.")
@click.option("--list", "listed", is_flag=True, help="List the names of all pages.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the HTML pages to this folder, without opening a browser.",
)
@json_option
def docs(name: str | None, web: bool, listed: bool, output: Path | None, as_json: bool) -> None:
    """Print the page of an operation, layer, option, error or pass; without a name, open the reference.

    NAME is written as in code: softmax, ml.ops.softmax, Linear, ml.Trainer, optimize_for, ShapeError,
    operator-fusion, mithril_passes. It can also name a guide, such as compiling.
    """
    from mithril_tools.reference import KINDS, find, html_pages, pages
    from mithril_tools.reference.catalog import suggestions

    if listed:
        names = {kind: list(pages(kind)) for kind in KINDS}
        if as_json:
            print_json(names)
        else:
            for kind, members in names.items():
                console().print(f"[bold]{KINDS[kind][0]}[/bold]: {', '.join(members)}", markup=True, highlight=False)
        return
    matches = find(name) if name else []
    if name and not matches:
        nearest = suggestions(name)
        hint = f"did you mean {' or '.join(map(repr, nearest))}?" if nearest else "see `mithril docs --list`"
        raise MithrilError(f"there is no page '{name}'", hint=hint)
    if name and not web and output is None:
        if as_json:
            print_json([{"kind": p.kind, "name": p.name, "text": p.text()} for p in matches])
        else:
            for page in matches:
                print_page(page.text())
        return
    index = html_pages.write(output)
    target = index.parent / html_pages.address(matches[0]) if matches else index
    click.echo(f"written: {target}")
    if output is None and not webbrowser.open(target.as_uri()):
        click.echo("no browser opened: open this file, or print a page with `mithril docs NAME`")


def print_page(text: str) -> None:
    """Print Markdown to the terminal; links between pages become their names."""
    from rich.markdown import Markdown

    plain = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)
    console().print(Markdown(plain, code_theme="ansi_dark", hyperlinks=False))
