"""``ml.Tokenizer``: the tokenizer of a checkpoint, by the package ``tokenizers``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mithril.backend import checked
from mithril.base import InputError, UnsupportedError
from mithril.system import files
from mithril_hub.checkpoint.folder import locate, read_json, read_text
from mithril_hub.gguf.vocabulary import PREFIX, TEMPLATE, read_entries, tokenizer_json
from mithril_hub.text.chat_template import rendered


class Tokenizer:
    """Text to tokens and back, as ``tokenizer.json`` of a folder or repository, or a GGUF file, defines it."""

    @checked()
    def __init__(self, source: str | os.PathLike[str], *, revision: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise UnsupportedError(
                "text requires the package tokenizers, which is not installed",
                hint="pip install 'mithril-hub[text]', or pass numbers of tokens",
            ) from None
        path = Path(source)
        self.folder = path
        if path.suffix == ".gguf":
            self.settings, content = _of_gguf(path)
        else:
            self.folder = locate(source, revision)
            path = files.inside(self.folder, "tokenizer.json")
            if not path.is_file():
                raise InputError(
                    f"'{self.folder}' has no tokenizer.json", hint="pass numbers of tokens in place of text"
                )
            content = read_text(self.folder, "tokenizer.json")
            self.settings = _optional(self.folder, "tokenizer_config.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except BaseException as error:  # the library raises plain exceptions, and a panic of Rust is a BaseException
            if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
                raise
            raise InputError(f"'{path}' is not a readable tokenizer", facts=[str(error)[:200]]) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text; ``special`` adds those that begin or end a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, without special tokens unless ``special`` is set."""
        return str(self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=not special))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = True, **values: Any) -> list[int]:
        """Return the tokens of a conversation in the form that the checkpoint was trained with.

        Messages have a ``role`` and a ``content``. With ``prompt``, the result ends where an answer begins; ``values``
        are further variables of the template.
        """
        template = self.template
        if template is None:
            raise InputError(f"'{self.folder}' has no chat template", hint="encode(text)")
        tokens = {name: self._special(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        space = {**tokens, "messages": list(messages), "add_generation_prompt": prompt, **values}
        return self.encode(rendered(template, space), special=False)

    @property
    def template(self) -> str | None:
        """The chat template of the checkpoint."""
        template: Any = self.settings.get("chat_template")
        if (self.folder / "chat_template.jinja").is_file():
            template = read_text(self.folder, "chat_template.jinja")
        if isinstance(template, list):  # several templates by name
            template = next(
                (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
            )
        return template if isinstance(template, str) else None

    def _special(self, name: str) -> str:
        token = self.settings.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        return token if isinstance(token, str) else ""


def _of_gguf(path: Path) -> tuple[dict[str, Any], str]:
    """Return the settings and the tokenizer of a GGUF file."""
    entries = read_entries(path)
    content = tokenizer_json(entries, path)
    tokens = entries[f"{PREFIX}tokens"]
    settings: dict[str, Any] = {"chat_template": entries.get(TEMPLATE)}
    for key in ("bos", "eos"):
        n = entries.get(f"{PREFIX}{key}_token_id")
        if isinstance(n, int) and 0 <= n < len(tokens):
            settings[f"{key}_token"] = tokens[n]
    return settings, content


def _optional(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}
