"""The table of model families: the layer for a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril.base import InputError, UnsupportedError, closest
from mithril_hub.decoder.families import FAMILIES as DECODERS, decoder_config
from mithril_hub.model import Decoder, Pretrained


def build(settings: Mapping[str, Any], *, dtype: str, cache: int | None) -> tuple[Pretrained, tuple[str, ...]]:
    """Return the model of a configuration, without weights, and the roots of names that files may leave out."""
    text = settings.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) and settings.get("model_type") == "gemma3" else None
    kind = kind or settings.get("model_type")
    if kind in DECODERS:
        config = decoder_config(settings)
        return Decoder(config, cache=cache, dtype=dtype), (config.names.root, "language_model.")
    if not isinstance(kind, str):
        raise InputError("config.json names no model_type", hint="it is not the configuration of a model")
    similar = closest(kind, DECODERS, 1)
    raise UnsupportedError(
        f"models of the type '{kind}' are not supported",
        facts=[f"supported: {', '.join(sorted(DECODERS))}"],
        hint=f"if its layers are those of '{similar[0]}', set model_type in config.json" if similar else None,
    )
