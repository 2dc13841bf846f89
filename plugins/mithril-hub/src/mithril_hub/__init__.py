"""Pretrained models: checkpoints of Hugging Face and GGUF files as models for every backend.

Names are imported on first use. The classes are public, because files of models name them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mithril_hub.decoder.config import DecoderConfig, Experts, Names
    from mithril_hub.decoder.rope import Rope
    from mithril_hub.model import Decoder
    from mithril_hub.parts import Projection, Table

HOMES = {
    "Decoder": "model",
    "Rope": "decoder.rope",
    **dict.fromkeys(("Projection", "Table"), "parts"),  # which layers of LoRA contain
    **dict.fromkeys(("DecoderConfig", "Experts", "Names"), "decoder.config"),
}
__all__ = ["Decoder", "DecoderConfig", "Experts", "Names", "Projection", "Rope", "Table"]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'mithril_hub' has no attribute '{name}'")
    return getattr(import_module(f"mithril_hub.{HOMES[name]}"), name)
