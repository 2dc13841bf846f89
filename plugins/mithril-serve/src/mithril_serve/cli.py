"""``mithril serve``: a model over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mithril.graph import InputError, MithrilError


@click.command()
@click.argument("source")
@click.option("--backend", default="numpy", show_default=True, help="The backend that runs the model.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", default=8000, show_default=True, help="The port to listen at.")
@click.option("--name", help="The name of the model in requests; by default that of the folder or file.")
@click.option("--context", default=2048, show_default=True, help="The largest number of tokens of a text.")
@click.option("--dtype", default="float32", show_default=True, help="The dtype of the parameters of a folder.")
@click.option("--rows", default=8, show_default=True, help="Texts that are generated at once, and the largest batch.")
@click.option("--queue", default=64, show_default=True, help="Requests that wait; further ones are refused.")
@click.option("--seconds", default=300.0, show_default=True, help="The longest time of a request.")
def serve(source: str, backend: str, host: str, port: int, name: str | None, context: int, **options: Any) -> None:
    """Serve the model of SOURCE: a folder, a repository, a GGUF file, or another file that mithril reads."""
    from mithril_serve.limits import Limits
    from mithril_serve.serving import application, run

    limits = Limits(rows=options["rows"], queue=options["queue"], seconds=options["seconds"])
    compiled, tokenizer = loaded(source, backend, context, options["dtype"])
    name = name or Path(source).stem
    app = application(compiled, name=name, tokenizer=tokenizer, limits=limits)
    click.echo(f"serving {name} at http://{host}:{port} ({'with' if tokenizer else 'without'} a tokenizer)")
    run(app, host, port, limits)


def loaded(source: str, backend: str, context: int, dtype: str) -> tuple[Any, Any]:
    """Return a compiled model, and its tokenizer if there is one."""
    import mithril as ml
    from mithril_hub.model import Decoder

    if Path(source).suffix == ".gguf":
        try:
            compiled = ml.load(source, backend=backend, context=context)
        except InputError:  # an encoder has no cache
            compiled = ml.load(source, backend=backend)
        return compiled, _tokenizer(source)
    if Path(source).is_file():
        return ml.compile(source, backend, inference=True), None
    model = ml.from_pretrained(source, dtype=dtype)
    if not isinstance(model, Decoder):
        return ml.compile(model, backend, inference=True), _tokenizer(source)
    model = ml.from_pretrained(source, dtype=dtype, cache=context)
    return ml.compile(model, backend, inference=True), _tokenizer(source)


def _tokenizer(source: str) -> Any:
    """Return the tokenizer of a model; without one prompts are numbers of tokens."""
    import mithril as ml

    try:
        return ml.Tokenizer(source)
    except MithrilError:
        return None
