"""Prompts: a list of tokens, or a batch of such lists, in any form in which users have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.backend import to_numpy
from mithril.graph import InputError

HIGHEST = int(np.iinfo(np.int32).max)  # of tokens, which models read as int32


def is_token(x: Any) -> bool:
    """Whether ``x`` is a number of a token."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def read_prompts(prompt: Any) -> tuple[list[list[int]], bool]:
    """Return prompts as lists of tokens, and whether there is only one, outside of a batch."""
    if prompt is None or isinstance(prompt, (str, bytes)) or is_token(prompt):
        raise InputError(
            f"generate: a prompt is a list of tokens, got {str(prompt)[:80]!r}",
            hint="encode text with ml.Tokenizer(folder).encode(text)" if isinstance(prompt, str) else None,
        )
    if isinstance(prompt, Mapping) or hasattr(prompt, "input_ids"):
        raise InputError(
            f"generate: a prompt is a list of tokens, got a {type(prompt).__name__}",
            hint="pass its tokens: prompt['input_ids']",
        )
    rows = _listed(prompt)
    single = bool(rows) and all(isinstance(t, (int, np.integer)) for t in rows)
    batch = [rows] if single else [_listed(r) for r in rows]
    if any(isinstance(t, Mapping) and "role" in t for t in rows):
        raise InputError(
            "generate: a prompt is a list of tokens, got messages",
            hint="tokenizer = ml.Tokenizer(folder); pass tokenizer.chat(messages)",
        )
    for row in batch:
        if not row or not all(map(is_token, row)):
            raise InputError("generate: a prompt is a list of at least one token", facts=[f"got {str(row)[:80]}"])
        if not 0 <= min(row) <= max(row) <= HIGHEST:
            raise InputError(f"generate: token {min(row) if min(row) < 0 else max(row)} of a prompt is out of range")
    if not batch:
        raise InputError("generate: there is no prompt", hint="pass a list of tokens, or a list of such lists")
    return [[int(t) for t in row] for row in batch], single


def check_vocabulary(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Raise InputError if a prompt has a token that the model does not know."""
    top = max(max(p) for p in prompts)
    if top >= vocabulary:
        raise InputError(
            f"generate: token {top} of a prompt is out of range",
            facts=[f"the vocabulary of the model has {vocabulary} tokens"],
        )


def _listed(row: Any) -> list[Any]:
    """Return the elements of a list or an array."""
    if hasattr(row, "shape"):
        elements = to_numpy(row).tolist()
        return elements if isinstance(elements, list) else [elements]
    return list(row) if hasattr(row, "__iter__") else [row]
