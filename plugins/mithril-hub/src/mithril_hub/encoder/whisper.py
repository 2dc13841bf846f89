"""Whisper: an encoder of sound and a decoder of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mithril import ops
from mithril_hub.encoder.blocks import BlockNames, Tower, attention, causal_mask, encode
from mithril_hub.encoder.network import Network
from mithril_hub.weights import Weights, activate

NAMES = BlockNames(
    layer="layers.{}.",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    attention_norm="self_attn_layer_norm",
    up="fc1",
    down="fc2",
    mlp_norm="final_layer_norm",
)
CROSS = {name: f"encoder_attn.{part}_proj" for name, part in (("query", "q"), ("key", "k"), ("value", "v"))}
CROSS |= {"output": "encoder_attn.out_proj"}


@dataclass(frozen=True)
class WhisperConfig:
    """An encoder of sound and a decoder."""

    vocabulary: int
    bins: int  # of the spectrum
    source: int  # positions of the encoder, two frames each
    target: int
    encoder: Tower
    decoder: Tower


def whisper_network(settings: Mapping[str, Any], dtype: str) -> Network:
    """Return the model of a ``config.json``."""
    encoder, decoder = (
        Tower(
            settings[f"{part}_layers"],
            settings[f"{part}_attention_heads"],
            settings["d_model"],
            settings[f"{part}_ffn_dim"],
            1e-5,
            settings.get("activation_function", "gelu"),
            NAMES,
            pre_norm=True,
            key_bias=False,
        )
        for part in ("encoder", "decoder")
    )
    source = settings["max_source_positions"]
    config = WhisperConfig(
        settings["vocab_size"], settings["num_mel_bins"], source, settings["max_target_positions"], encoder, decoder
    )
    types = {
        "input_features": ((None, config.bins, 2 * source), "float32"),
        "decoder_input_ids": ((None, None), "int32"),
    }
    return Network(whisper, config, types, ("logits", "encoder_last_hidden_state"), dtype=dtype)


def whisper(layer: Any, config: WhisperConfig, inputs: Mapping[str, Any], dtype: str) -> Any:
    """Return the logits of the decoder and the result of the encoder."""
    memory = _encoder(Weights(layer, dtype, "model.encoder.", config.encoder), config, inputs["input_features"])
    tower, tokens = config.decoder, inputs["decoder_input_ids"]
    weights = Weights(layer, dtype, "model.decoder.", tower)
    table = weights.param("embed_tokens.weight", (config.vocabulary, tower.hidden))
    places = ops.iota(shape=(tokens.shape[1],), axis=0, dtype="int32")
    x = ops.embedding(tokens, table)
    x = x + ops.embedding(places, weights.param("embed_positions.weight", (config.target, tower.hidden)))
    mask, cross = causal_mask(tokens.shape[1]), replace(tower.names, **CROSS)
    for n in range(tower.layers):
        block = weights.below(tower.names.layer.format(n))
        y = block.norm(tower.names.attention_norm, x)
        x = x + attention(block, tower, y, y, mask)
        x = x + attention(block, tower, block.norm("encoder_attn_layer_norm", x), memory, None, cross)
        y = block.norm(tower.names.mlp_norm, x)
        y = activate(tower.activation, block.linear("fc1", y, tower.intermediate, bias=True))
        x = x + block.linear("fc2", y, tower.hidden, bias=True)
    return ops.linear(weights.norm("layer_norm", x), table), memory


def _encoder(weights: Weights, config: WhisperConfig, features: Any) -> Any:
    tower, x = config.encoder, features
    for name, stride in (("conv1", 1), ("conv2", 2)):
        kernel = weights.param(f"{name}.weight", (tower.hidden, x.shape[1], 3))
        bias = ops.reshape(weights.param(f"{name}.bias", (tower.hidden,), "zeros"), shape=(1, tower.hidden, 1))
        x = ops.gelu(ops.conv(x, kernel, stride=(stride,), padding=((1, 1),), dilation=(1,)) + bias)
    x = ops.transpose(x, perm=(0, 2, 1)) + weights.param("embed_positions.weight", (config.source, tower.hidden))
    return weights.norm("layer_norm", encode(weights, tower, x, None))
