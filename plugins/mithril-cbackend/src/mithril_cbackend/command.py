"""``mithril tune-c``: the search for schedules from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mithril_tools.cli.models import compile_options, load_model, model_options, random_inputs


@click.command()
@model_options
@click.option("--seconds", default=60.0, show_default=True, help="About how long to search.")
@click.option("--trials", type=int, help="The most schedules to try for an operation; all of them unless given.")
@click.option("--threads", type=int, help="Threads that programs will run on; all unless given.")
@click.option("--output", type=click.Path(path_type=Path), help="A file for CBackend(schedules=...), made or extended.")
def tune(
    model: str, seconds: float, trials: int | None, threads: int | None, output: Path | None, **options: Any
) -> None:
    """Search the schedules of a model's large operations, and keep what wins for level high."""
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
