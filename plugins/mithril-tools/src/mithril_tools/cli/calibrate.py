"""``mithril calibrate``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from mithril import plugins
from mithril.graph import PluginError
from mithril_tools.cli.output import console, json_option, print_json, show

COLUMNS = ("backend", "samples", "products", "other", "error", "took")


@click.command()
@click.option("--backends", default="", metavar="NAMES", help="Comma-separated names; all installed ones by default.")
@click.option(
    "--rounds", type=click.IntRange(min=3), default=10, show_default=True, help="Number of measurement rounds."
)
@click.option("--dir", "folder", type=click.Path(file_okay=False, path_type=Path), help="Directory for the results.")
@json_option
def calibrate(backends: str, rounds: int, folder: Path | None, as_json: bool) -> None:
    """Measure the samples that ml.estimate predicts running times from.

    Runs small models of the common kinds, and copies of their operations. The results are stored and stay valid until
    the machine or a version changes.
    """
    import mithril as ml
    from mithril.compiler import format_si

    names = [n for n in backends.split(",") if n] or sorted(plugins.backends())
    if not names:
        raise PluginError("no backend is installed", hint="pip install mithril-numpy")
    rows, data = [], []

    def progress(line: str) -> None:
        click.echo(line, err=True)

    for name in names:
        progress(f"backend {name}")
        start = time.perf_counter()
        model = ml.calibrate(name, store=folder or True, rounds=rounds, progress=progress)
        took = time.perf_counter() - start
        rows.append(
            {
                "backend": name,
                "samples": str(len(model.samples)),
                "products": f"{format_si(model.flops_per_second)}FLOP/s",
                "other": f"{format_si(model.bytes_per_second)}B/s",
                "error": f"{100 * model.relative_error:.0f}%",
                "took": f"{took:.0f} s",
            }
        )
        data.append(
            {
                "backend": name,
                "samples": len(model.samples),
                "flops_per_second": model.flops_per_second,
                "bytes_per_second": model.bytes_per_second,
                "relative_error": model.relative_error,
                "seconds": took,
            }
        )
    if as_json:
        print_json(data)
        return
    show(rows, COLUMNS, console())
    click.echo("apart: nine of ten of the models measured are told no farther off than this")
