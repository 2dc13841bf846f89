"""Pretrained models: checkpoints of Hugging Face and GGUF files as models for every backend.

Names are imported on first use. The classes are public, because files of models name them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mithril_hub.decoder.config import DecoderConfig, Experts, Names
    from mithril_hub.decoder.decoder import Attention, Block, Trunk
    from mithril_hub.decoder.feed_forward import Expert, FeedForward, Mixture, StackedExperts
    from mithril_hub.decoder.rope import Rope
    from mithril_hub.model import Decoder
    from mithril_hub.parts import Norm, Projection, Table

HOMES = {
    "Decoder": "model",
    "Rope": "decoder.rope",
    # Layers inside a decoder have entries in its file if they are tagged, frozen, hooked or replaced by LoRA.
    **dict.fromkeys(("Attention", "Block", "Trunk"), "decoder.decoder"),
    **dict.fromkeys(("Expert", "FeedForward", "Mixture", "StackedExperts"), "decoder.feed_forward"),
    **dict.fromkeys(("Norm", "Projection", "Table"), "parts"),
    **dict.fromkeys(("DecoderConfig", "Experts", "Names"), "decoder.config"),
}
__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "DecoderConfig",
    "Expert",
    "Experts",
    "FeedForward",
    "Mixture",
    "Names",
    "Norm",
    "Projection",
    "Rope",
    "StackedExperts",
    "Table",
    "Trunk",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'mithril_hub' has no attribute '{name}'")
    return getattr(import_module(f"mithril_hub.{HOMES[name]}"), name)
