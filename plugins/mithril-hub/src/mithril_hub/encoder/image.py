"""Encoders of images: ViT, with a classifier if the checkpoint has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril_hub.encoder.blocks import BlockNames, Tower, encode
from mithril_hub.encoder.network import Network
from mithril_hub.settings import size_of
from mithril_hub.weights import Weights, activate

VIT = BlockNames(
    layer="encoder.layer.{}.",
    query="attention.attention.query",
    key="attention.attention.key",
    value="attention.attention.value",
    output="attention.output.dense",
    attention_norm="layernorm_before",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="layernorm_after",
)


@dataclass(frozen=True)
class ImageConfig:
    """An encoder of images."""

    image: int
    patch: int
    channels: int
    pooled: int  # features of the pooled result
    pooler_activation: str
    classes: int
    tower: Tower


class ImageEncoder(Network):
    """An encoder of images: ``pixel_values`` to hidden states and the pooled one, or to logits of a classifier."""

    def __init__(self, config: ImageConfig, dtype: str = "float32") -> None:
        types = {"pixel_values": ((None, config.channels, config.image, config.image), "float32")}
        outputs = ("logits",) if config.classes else ("last_hidden_state", "pooler_output")
        super().__init__(config, types, outputs, (), dtype)

    def compute(self, inputs: Mapping[str, Any]) -> Any:
        return image(self, self.config, inputs, self.dtype)


def image_network(settings: Mapping[str, Any], dtype: str) -> ImageEncoder:
    """Return the encoder of a ``config.json``."""
    tower = Tower(
        settings["num_hidden_layers"],
        settings["num_attention_heads"],
        settings["hidden_size"],
        settings["intermediate_size"],
        float(settings.get("layer_norm_eps", 1e-12)),
        settings.get("hidden_act", "gelu"),
        VIT,
        pre_norm=True,
    )
    classifies = any(a.endswith("ForImageClassification") for a in settings.get("architectures") or ())
    classes = len(settings.get("id2label") or "01") if classifies else 0
    config = ImageConfig(
        size_of(settings, "image_size", 224),
        size_of(settings, "patch_size", 16),
        settings.get("num_channels", 3),
        settings.get("pooler_output_size") or tower.hidden,
        settings.get("pooler_act", "tanh"),
        classes,
        tower,
    )
    return ImageEncoder(config, dtype)


def image(layer: Any, config: ImageConfig, inputs: Mapping[str, Any], dtype: str) -> Any:
    """Return hidden states and the pooled one, or the logits of a classifier."""
    tower = config.tower
    weights = Weights(layer, dtype, "vit." if config.classes else "", tower)
    below = weights.below("embeddings.")
    x = patches(below, "patch_embeddings.projection", inputs["pixel_values"], config.patch, tower.hidden, bias=True)
    x = after_class_token(below.param("cls_token", (1, 1, tower.hidden)), x)
    x = x + below.param("position_embeddings", (1, (config.image // config.patch) ** 2 + 1, tower.hidden))
    x = weights.norm("layernorm", encode(weights, tower, x, None))
    if config.classes:
        return Weights(layer, dtype, "", tower).linear("classifier", x[:, 0], config.classes, bias=True)
    pooled = weights.linear("pooler.dense", x[:, 0], config.pooled, bias=True)
    return x, activate(config.pooler_activation, pooled)


def patches(weights: Weights, name: str, pixels: Any, size: int, hidden: int, *, bias: bool) -> Any:
    """Return the embedded patches of images: [batch, patches, hidden]."""
    kernel = weights.param(f"{name}.weight", (hidden, pixels.shape[1], size, size))
    x = ops.conv(pixels, kernel, stride=(size, size), padding=((0, 0), (0, 0)), dilation=(1, 1))
    x = ops.transpose(ops.reshape(x, shape=(x.shape[0], hidden, x.shape[2] * x.shape[3])), perm=(0, 2, 1))
    return x + weights.param(f"{name}.bias", (hidden,), "zeros") if bias else x


def after_class_token(token: Any, x: Any) -> Any:
    """Return the patches behind the class token."""
    return ops.concat(ops.broadcast_to(token, shape=(x.shape[0], 1, x.shape[2])), x, axis=1)
