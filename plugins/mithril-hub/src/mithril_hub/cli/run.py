"""``mithril run``: continue a prompt with a pretrained model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mithril.graph import InputError


@click.command()
@click.argument("source")
@click.argument("prompt")
@click.option("--backend", default="numpy", show_default=True, help="The backend that runs the model.")
@click.option("--max-new-tokens", default=64, show_default=True, help="The largest number of tokens.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the most probable token.")
@click.option("--top-k", type=int, help="Draw from the k most probable tokens.")
@click.option("--top-p", type=float, help="Draw from the most probable tokens of this total.")
@click.option("--seed", default=0, show_default=True, help="The seed of sampling.")
@click.option("--dtype", default="float32", show_default=True, help="The dtype of the parameters.")
@click.option("--chat/--no-chat", default=None, help="Whether PROMPT is a message; by default if there is a template.")
@click.option("--tokens", is_flag=True, help="PROMPT is a list of token numbers, and so is the output.")
def run(source: str, prompt: str, backend: str, dtype: str, chat: bool | None, tokens: bool, **settings: Any) -> None:
    """Continue PROMPT with the model of SOURCE: a folder, a repository, or a GGUF file."""
    import mithril as ml

    text = None if tokens else ml.Tokenizer(source)
    if text is None:
        numbers = _numbers(prompt)
    elif chat or (chat is None and text.template is not None):
        numbers = text.chat([{"role": "user", "content": prompt}])
    else:
        numbers = text.encode(prompt)
    room = len(numbers) + settings["max_new_tokens"]
    if Path(source).suffix == ".gguf":
        compiled = ml.load(source, backend=backend, context=room)
    else:
        model = ml.from_pretrained(source, dtype=dtype, cache=room)
        compiled = ml.compile(model, backend, inference=True)
    show = _shown(text.decode if text is not None else lambda new: " ".join(map(str, new)))
    ml.generate(compiled, numbers, on_token=show, **settings)
    click.echo()


def _numbers(prompt: str) -> list[int]:
    words = prompt.replace(",", " ").split()
    if not words or not all(w.isdigit() for w in words):
        raise InputError(f"--tokens: '{prompt}' is not a list of numbers", hint='mithril run FOLDER "5 17 42" --tokens')
    return [int(w) for w in words]


def _shown(decode: Callable[[list[int]], str]) -> Callable[[int, int], None]:
    """Return a callback that prints the text of each token when its characters are complete."""
    new: list[int] = []
    written = 0

    def show(row: int, token: int) -> None:
        nonlocal written
        new.append(token)
        text = decode(new)
        if not text.endswith("\ufffd"):  # a token can end within a character
            click.echo(text[written:], nl=False)
            written = len(text)

    return show
