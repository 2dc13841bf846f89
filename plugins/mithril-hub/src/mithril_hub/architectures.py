"""The table of model families: the layer for a ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mithril.graph import InputError, UnsupportedError, closest
from mithril_hub.decoder.families import FAMILIES as DECODERS, decoder_config
from mithril_hub.encoder.clip import clip_network
from mithril_hub.encoder.image import image_network
from mithril_hub.encoder.network import Network
from mithril_hub.encoder.t5 import t5_network
from mithril_hub.encoder.text import text_network
from mithril_hub.encoder.whisper import whisper_network
from mithril_hub.model import Decoder, Pretrained
from mithril_hub.settings import check_generator, check_settings

NETWORKS: dict[str, Callable[[Mapping[str, Any], str], Network]] = {
    "bert": text_network,
    "roberta": text_network,
    "xlm-roberta": text_network,
    "camembert": text_network,
    "distilbert": text_network,
    "vit": image_network,
    "clip": clip_network,
}
GENERATORS: dict[str, Callable[[Mapping[str, Any], str, int | None], Network]] = {  # whose decoders can have a cache
    "t5": t5_network,
    "whisper": whisper_network,
}
ROOTS = ("bert.", "roberta.", "distilbert.", "vit.", "model.")  # of names, which files may leave out or add


def kind_of(settings: Mapping[str, Any]) -> str:
    """Return the type of the model of a configuration, of Gemma 3 that of its text."""
    text = settings.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) and settings.get("model_type") == "gemma3" else None
    kind = kind or settings.get("model_type")
    if not isinstance(kind, str):
        raise InputError("config.json names no model_type", hint="it is not the configuration of a model")
    return kind


def is_native(kind: str) -> bool:
    """Whether mithril has the layers of a type of models."""
    return kind in DECODERS or kind in NETWORKS or kind in GENERATORS


def unsupported(kind: str, fact: str, hint: str) -> UnsupportedError:
    """Return the error for a type of models that mithril has no layers for; the fact says why nothing else has."""
    native = sorted([*DECODERS, *NETWORKS, *GENERATORS])
    similar = closest(kind, native, 1)
    alias = f"; if its layers are those of '{similar[0]}', set model_type in config.json" if similar else ""
    return UnsupportedError(
        f"models of the type '{kind}' are not supported",
        facts=[f"types with layers of mithril: {', '.join(native)}", fact],
        hint=f"{hint}{alias}",
    )


def build(settings: Mapping[str, Any], *, dtype: str, cache: int | None) -> tuple[Pretrained, tuple[str, ...]]:
    """Return the model of a configuration, without weights, and the roots of names that files may leave out."""
    kind = kind_of(settings)
    if kind in DECODERS:
        check_generator(settings)
        config = decoder_config(settings)
        return Decoder(config, cache=cache, dtype=dtype), (config.names.root, "language_model.")
    if kind in NETWORKS or kind in GENERATORS:
        if cache is not None and kind in NETWORKS:
            raise InputError(f"models of the type '{kind}' have no cache", hint="from_pretrained without cache=")
        check_settings(kind, settings)
        try:
            if kind in GENERATORS:
                return GENERATORS[kind](settings, dtype, cache), ROOTS
            return NETWORKS[kind](settings, dtype), ROOTS
        except KeyError as error:
            raise InputError(f"config.json has no {error}, which models of the type '{kind}' require") from None
    raise unsupported(kind, "others are read by ml.from_pretrained only", "pass a folder of Hugging Face")
