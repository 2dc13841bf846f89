"""``mithril bench`` and ``mithril cache``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mithril import plugins
from mithril.graph import InputError, PluginError
from mithril_tools.cli.models import compile_options, load_model, program_options, random_inputs
from mithril_tools.cli.output import console, json_option, print_json, show

COLUMNS = ("backend", "batch", "median", "fastest", "spread", "items/s", "memory")


@click.command()
@program_options
@click.option("--backends", default="", metavar="NAMES", help="Comma-separated names; all installed ones by default.")
@click.option("--batches", default="", metavar="1,8,32", help="Batch sizes to measure (first axis of the inputs).")
@click.option("--iterations", default=100, show_default=True, help="Number of measured calls.")
@click.option("--warmup", default=10, show_default=True, help="Number of warm-up calls.")
@click.option("--operations", is_flag=True, help="Also show the time of each operation, by layer.")
@json_option
def bench(
    model: str,
    backends: str,
    batches: str,
    iterations: int,
    warmup: int,
    operations: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Time a model on installed backends, for one or several batch sizes."""
    import mithril as ml
    from mithril.backend import format_bytes

    settings = compile_options(**options)
    instance = load_model(model)
    inputs = random_inputs(instance, settings, 0)
    names = [n for n in backends.split(",") if n] or sorted(plugins.backends(), key=lambda n: (n != "numpy", n))
    if not names:
        raise PluginError("no backend is installed", hint="pip install mithril-numpy")
    sizes = _sizes(batches)
    config = ml.BenchmarkConfig(warmup_iterations=warmup, benchmark_iterations=iterations)
    rows, data, tables = [], [], []
    for name in names:
        compiled = ml.compile(instance, name, **settings)
        report = ml.run_benchmark(compiled, inputs, config, batch_sizes=sizes or None)
        for batch, result in report.items() if sizes else [(report.batch_size, report)]:
            rows.append(
                {
                    "backend": name,
                    "batch": str(batch),
                    "median": f"{1e3 * result.latency:.3f} ms",
                    "fastest": f"{1e3 * result.fastest:.3f} ms",
                    "spread": f"{100 * result.spread:.0f}%",
                    "items/s": f"{result.throughput:.4g}",
                    "memory": format_bytes(result.memory_usage),
                }
            )
            data.append(
                {
                    "backend": name,
                    "batch": batch,
                    "latency": result.latency,
                    "fastest": result.fastest,
                    "throughput": result.throughput,
                    "memory_usage": result.memory_usage,
                }
            )
        if operations:
            with ml.profile() as prof:
                compiled.evaluate(compiled.randomize_params(0, inputs), inputs)
            tables.append((name, str(prof.execution_breakdown)))
    if as_json:
        print_json(data)
        return
    show(rows, COLUMNS, console())
    for name, table in tables:
        click.echo(f"\n{name}\n{table}")


def _sizes(text: str) -> list[int]:
    parts = [part for part in text.split(",") if part]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"--batches {text}: expected sizes", hint="--batches 1,8,32")
    return [int(part) for part in parts]


@click.command()
@click.argument("action", type=click.Choice(["info", "clear"]))
@click.option(
    "--dir", "folder", type=click.Path(file_okay=False, path_type=Path), help="Directory of the cache (cache_dir)."
)
@json_option
def cache(action: str, folder: Path | None, as_json: bool) -> None:
    """Show or clear the disk cache of cache=True."""
    from mithril.backend import format_bytes
    from mithril.system import Store

    store = Store(folder)
    if action == "clear":
        count = store.clear()
        if as_json:
            print_json({"removed": count})
        else:
            click.echo(f"removed {count} {'entry' if count == 1 else 'entries'} from {store.folder}")
        return
    info = store.info()
    if as_json:
        print_json({"folder": str(info.folder), "entries": info.entries, "bytes": info.bytes, "limit": info.limit})
    else:
        click.echo(
            f"{info.entries} entries, {format_bytes(info.bytes)} of at most {format_bytes(info.limit)}, "
            f"in {info.folder}"
        )
