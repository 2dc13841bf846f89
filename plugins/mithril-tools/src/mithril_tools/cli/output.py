"""Tables for users and JSON for scripts; a table that is too wide for the terminal becomes one block per row."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def _json_only(context: click.Context, option: click.Parameter, is_json: bool) -> bool:
    """Send everything but the JSON to stderr, including the output of C libraries that plugins import."""
    if is_json and sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    return is_json


json_option = click.option("--json", "as_json", is_flag=True, is_eager=True, callback=_json_only, help="Print JSON.")

_STYLES = {
    "loaded": "green",
    "ready": "green",
    "found": "cyan",
    "registered": "cyan",
    "disabled": "dim",
    "broken": "red",
    "incompatible": "red",
    "clash": "red",
    "failed": "red",
}


def console() -> Console:
    """Return a console as wide as the terminal, or wide enough for unbroken lines without one."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=160)
    return console


def print_json(data: Any) -> None:
    """Print data as indented JSON."""
    click.echo(json.dumps(data, indent=2))


def show(rows: Sequence[Mapping[str, str]], columns: Sequence[str], out: Console) -> None:
    """Print rows as a table, or as blocks headed by the first column if a table would break words."""
    widths = [max([len(column), *(len(word) for row in rows for word in row[column].split())]) for column in columns]
    if sum(widths) + 2 * len(columns) > out.width or (out.width < 72 and len(columns) > 3):
        _show_blocks(rows, columns, out)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*(Text(row[column], style=_STYLES.get(row[column], "")) for column in columns))
    out.print(table)


def _show_blocks(rows: Sequence[Mapping[str, str]], columns: Sequence[str], out: Console) -> None:
    for row in rows:
        out.print(Text(row[columns[0]], style="bold"))
        for column in columns[1:]:
            if row[column]:
                text = Text.assemble((f"{column}: ", "dim"), (row[column], _STYLES.get(row[column], "")))
                out.print(Padding(text, (0, 0, 0, 2)))
