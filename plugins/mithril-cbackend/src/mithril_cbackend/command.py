"""``mithril tune-c``: schedule search from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mithril_tools.cli.models import compile_options, load_model, program_options, random_inputs


@click.command()
@program_options
@click.option("--seconds", default=60.0, show_default=True, help="Approximate search time.")
@click.option("--trials", type=int, help="Maximum number of schedules per operation; all by default.")
@click.option("--threads", type=int, help="Number of threads of the programs; all by default.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="File for CBackend(schedules=...), created or extended."
)
def tune(
    model: str, seconds: float, trials: int | None, threads: int | None, output: Path | None, **options: Any
) -> None:
    """Search schedules for a model's large operations and cache the fastest for level high."""
    import mithril as ml
    from mithril_cbackend.schedule.offline_tuning import tune_offline

    settings = compile_options(**options)
    network = load_model(model)
    compiled = ml.compile(network, "c", num_threads=threads, **settings)
    inputs = random_inputs(network, settings, 0)
    compiled.evaluate(compiled.randomize_params(0, inputs), inputs)
    result = tune_offline(compiled, seconds=seconds, trials=trials)
    click.echo(str(result))
    if output is not None:
        result.save(output)
