"""Plugin of mithril-hub; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Architecture, Command, Export, FileFormat, hookimpl

GGUF = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "phi3")


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return ``ml.from_pretrained``, ``ml.generate`` and their classes."""
    return [
        Export("from_pretrained", "mithril_hub.checkpoint.pretrained:from_pretrained"),
        Export("push_to_hub", "mithril_hub.checkpoint.upload:push_to_hub"),
        Export("open_weights", "mithril_hub.checkpoint.open_weights:open_weights"),
        Export("generate", "mithril_hub.generation.generate:generate"),
        Export("Tokenizer", "mithril_hub.text.tokenizer:Tokenizer"),
        Export("Session", "mithril_hub.generation.session:Session"),
    ]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """Folders of Hugging Face."""
    return [
        FileFormat(
            "huggingface",
            saves="mithril_hub.checkpoint.writing:export",
            loads="mithril_hub.checkpoint.pretrained:load",
            models="mithril_hub.checkpoint.pretrained:from_pretrained",
            summary="a folder that transformers and ml.from_pretrained read",
            marker="config.json",
        )
    ]


@hookimpl
def mithril_architectures() -> Sequence[Architecture]:
    """Return the model families of GGUF files."""
    return [
        Architecture(name, loads="mithril_hub.gguf.reading:load", saves="mithril_hub.gguf.writing:save")
        for name in GGUF
    ] + [Architecture("bert", loads="mithril_hub.gguf.bert:load", saves="mithril_hub.gguf.bert:save")]


@hookimpl
def mithril_commands() -> Sequence[Command]:
    """Return the commands ``run`` and ``convert``."""
    return [
        Command("run", "mithril_hub.cli.run:run", "Continue a prompt with a pretrained model."),
        Command("convert", "mithril_hub.cli.convert:convert", "Write a pretrained model in another file format."),
    ]
