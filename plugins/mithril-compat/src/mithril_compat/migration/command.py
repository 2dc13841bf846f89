"""``mithril migrate``: rewrite programs of the predecessor."""

from __future__ import annotations

import difflib
from pathlib import Path

import click
import libcst as cst

from mithril_compat.migration.codemod import migrated


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--diff", is_flag=True, help="Print the changes, and write nothing.")
def migrate(files: tuple[Path, ...], diff: bool) -> None:
    """Rewrite FILES, programs of mithril's predecessor, in today's spelling.

    Places without an exact equivalent stay, are listed with today's way, and make the exit code 1.
    """
    remaining = 0
    for file in files:
        source = file.read_text(encoding="utf-8")
        try:
            result = migrated(source)
        except cst.ParserSyntaxError as error:
            raise click.ClickException(f"{file} is not valid Python: {error.message}") from None
        if diff:
            before, after = source.splitlines(keepends=True), result.source.splitlines(keepends=True)
            click.echo("".join(difflib.unified_diff(before, after, str(file), str(file))), nl=False)
        elif result.source != source:
            file.write_text(result.source, encoding="utf-8")
        click.echo(
            f"{file}: {'changed' if result.source != source else 'unchanged'}, {len(result.remaining)} to decide"
        )
        for place in result.remaining:
            click.echo(f"{file}:{place}")
        remaining += len(result.remaining)
    if remaining:
        click.get_current_context().exit(1)
