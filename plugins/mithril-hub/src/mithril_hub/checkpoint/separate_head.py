"""Heads with weights of their own in checkpoints whose configuration says that they share the table of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril_hub.checkpoint.safetensors_file import Stored

HEAD = "lm_head.weight"
TABLES = ("embed_tokens.weight", "wte.weight", "shared.weight")
ROWS = 4096  # that are compared at once, because a table may have a gigabyte


def with_separate_head(settings: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Mapping[str, Any]:
    """Return the configuration for a head that differs from the table: as in transformers 5, the files decide.

    A model that was trained without tying may have a configuration that still says so.
    """
    head = next((x for name, x in tensors.items() if name.endswith(HEAD)), None)
    table = next((x for end in TABLES for name, x in tensors.items() if name.endswith(end)), None)
    if head is None or table is None or _equal(head, table):
        return settings
    tied = settings.get("tie_word_embeddings", True)
    # T5 without this setting scales the results of the decoder if its configuration says that weights are tied.
    scaled = {"scale_decoder_outputs": settings.get("scale_decoder_outputs", tied)}
    return {**settings, "tie_word_embeddings": False, **(scaled if settings.get("model_type") == "t5" else {})}


def _equal(one: Stored, other: Stored) -> bool:
    if one.shape != other.shape or np.dtype(one.dtype) != np.dtype(other.dtype):
        return False
    first, second = one.array(), other.array()
    return all(np.array_equal(first[k : k + ROWS], second[k : k + ROWS]) for k in range(0, len(first), ROWS))
