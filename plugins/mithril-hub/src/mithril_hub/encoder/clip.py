"""CLIP: an encoder of text and one of images, whose results are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril_hub.encoder.blocks import BlockNames, Tower, both, causal_mask, encode, padding_mask
from mithril_hub.encoder.image import after_class_token, patches
from mithril_hub.encoder.network import Network
from mithril_hub.model import IDS
from mithril_hub.settings import check_settings, size_of
from mithril_hub.weights import Weights

NAMES = BlockNames(
    layer="encoder.layers.{}.",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    attention_norm="layer_norm1",
    up="mlp.fc1",
    down="mlp.fc2",
    mlp_norm="layer_norm2",
)
TEXT = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
TEXT |= {"vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407}
VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
VISION |= {"image_size": 224, "patch_size": 32, "num_channels": 3}


@dataclass(frozen=True)
class ClipConfig:
    """Both encoders and the size of their results."""

    text: Tower
    vision: Tower
    vocabulary: int
    positions: int
    end: int  # token whose hidden state represents the text; 2 in files that mean the largest token
    image: int
    patch: int
    size: int
    channels: int


class Clip(Network):
    """Two encoders: texts and images to their embeddings and to the similarity of each pair."""

    def __init__(self, config: ClipConfig, dtype: str = "float32") -> None:
        pixels = (None, config.channels, config.image, config.image)
        types = {"input_ids": ((None, None), IDS), "pixel_values": (pixels, "float32")}
        outputs = ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds")
        super().__init__(config, types, outputs, ("attention_mask",), dtype)

    def compute(self, inputs: Mapping[str, Any]) -> Any:
        return clip(self, self.config, inputs, self.dtype)


def clip_network(settings: Mapping[str, Any], dtype: str) -> Clip:
    """Return the model of a ``config.json``."""
    text, vision = _part(settings, "text", TEXT), _part(settings, "vision", VISION)
    config = ClipConfig(
        _tower(text),
        _tower(vision),
        text["vocab_size"],
        text["max_position_embeddings"],
        text["eos_token_id"],
        size_of(vision, "image_size"),
        size_of(vision, "patch_size"),
        settings.get("projection_dim", 512),
        vision["num_channels"],
    )
    return Clip(config, dtype)


def _part(settings: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an encoder; in older files a second dictionary replaces the first."""
    written = settings.get(f"{name}_config_dict") or settings.get(f"{name}_config") or {}
    check_settings(f"clip_{name}_model", written, f"the {name}_config of config.json")
    return {**defaults, **written}


def _tower(settings: Mapping[str, Any]) -> Tower:
    return Tower(
        settings["num_hidden_layers"],
        settings["num_attention_heads"],
        settings["hidden_size"],
        settings["intermediate_size"],
        float(settings.get("layer_norm_eps", 1e-5)),
        settings.get("hidden_act", "quick_gelu"),
        NAMES,
        pre_norm=True,
    )


def clip(layer: Any, config: ClipConfig, inputs: Mapping[str, Any], dtype: str) -> Any:
    """Return the logits of each image and text, and both embeddings, of length 1."""
    texts = _text(Weights(layer, dtype, "text_model.", config.text), config, inputs)
    images = _image(Weights(layer, dtype, "vision_model.", config.vision), config, inputs["pixel_values"])
    texts = Weights(layer, dtype, "", config.text).linear("text_projection", texts, config.size)
    images = Weights(layer, dtype, "", config.vision).linear("visual_projection", images, config.size)
    texts, images = ops.normalize(texts, axis=-1), ops.normalize(images, axis=-1)
    scale = ops.exp(layer.param("logit_scale", (), "zeros", dtype))
    logits = ops.matmul(texts, ops.transpose(images, perm=(1, 0))) * scale
    return ops.transpose(logits, perm=(1, 0)), logits, texts, images


def _text(weights: Weights, config: ClipConfig, inputs: Mapping[str, Any]) -> Any:
    tokens, hidden, below = inputs["input_ids"], config.text.hidden, weights.below("embeddings.")
    x = below.table("token_embedding", config.vocabulary, hidden)(tokens)
    rows = ops.iota(shape=(tokens.shape[1],), axis=0, dtype="int32")
    x = x + below.table("position_embedding", config.positions, hidden)(rows)
    mask = both(causal_mask(tokens.shape[1]), padding_mask(inputs["attention_mask"]))
    x = weights.norm("final_layer_norm", encode(weights, config.text, x, mask))
    ends = tokens if config.end == 2 else ops.cast(ops.equal(tokens, config.end), dtype="int32")
    last = ops.reshape(ops.cast(ops.argmax(ends, axis=1), dtype="int32"), shape=(tokens.shape[0], 1))
    return ops.gather_nd(x, last, batch_dims=1)


def _image(weights: Weights, config: ClipConfig, pixels: Any) -> Any:
    hidden, below = config.vision.hidden, weights.below("embeddings.")
    x = patches(below, "patch_embedding", pixels, config.patch, hidden, bias=False)
    token = ops.reshape(below.param("class_embedding", (hidden,)), shape=(1, 1, hidden))
    x = after_class_token(token, x)
    x = x + below.param("position_embedding.weight", ((config.image // config.patch) ** 2 + 1, hidden))
    x = encode(weights, config.vision, weights.norm("pre_layrnorm", x), None)  # misspelled in checkpoints
    return weights.norm("post_layernorm", x[:, 0])
