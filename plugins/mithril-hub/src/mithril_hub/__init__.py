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
    from mithril_hub.encoder.blocks import BlockNames, Tower
    from mithril_hub.encoder.clip import Clip, ClipConfig
    from mithril_hub.encoder.image import ImageConfig, ImageEncoder
    from mithril_hub.encoder.network import TextSettings
    from mithril_hub.encoder.t5 import T5, T5Config
    from mithril_hub.encoder.text import TextConfig, TextEncoder
    from mithril_hub.encoder.whisper import Whisper, WhisperConfig
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
    **dict.fromkeys(("BlockNames", "Tower"), "encoder.blocks"),
    **dict.fromkeys(("Clip", "ClipConfig"), "encoder.clip"),
    **dict.fromkeys(("ImageConfig", "ImageEncoder"), "encoder.image"),
    "TextSettings": "encoder.network",
    **dict.fromkeys(("T5", "T5Config"), "encoder.t5"),
    **dict.fromkeys(("TextConfig", "TextEncoder"), "encoder.text"),
    **dict.fromkeys(("Whisper", "WhisperConfig"), "encoder.whisper"),
}
__all__ = [
    "T5",
    "Attention",
    "Block",
    "BlockNames",
    "Clip",
    "ClipConfig",
    "Decoder",
    "DecoderConfig",
    "Expert",
    "Experts",
    "FeedForward",
    "ImageConfig",
    "ImageEncoder",
    "Mixture",
    "Names",
    "Norm",
    "Projection",
    "Rope",
    "StackedExperts",
    "T5Config",
    "Table",
    "TextConfig",
    "TextEncoder",
    "TextSettings",
    "Tower",
    "Trunk",
    "Whisper",
    "WhisperConfig",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'mithril_hub' has no attribute '{name}'")
    return getattr(import_module(f"mithril_hub.{HOMES[name]}"), name)
