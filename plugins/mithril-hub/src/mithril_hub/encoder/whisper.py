"""Whisper: an encoder of sound and a decoder of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mithril import ops
from mithril_hub.decoder.places import Places, selected
from mithril_hub.encoder.blocks import BlockNames, Tower, attend, encode, keys_and_values, projected
from mithril_hub.encoder.memory import Memory
from mithril_hub.encoder.network import Network, TextSettings, Types
from mithril_hub.model import IDS
from mithril_hub.parts import logits_of_table
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


class Whisper(Network):
    """An encoder of sound and a decoder of text; with ``cache=n``, keys and values of n positions are states."""

    def __init__(
        self, config: WhisperConfig, text: TextSettings, *, cache: int | None = None, dtype: str = "float32"
    ) -> None:
        self.capacity = None if cache is None else min(cache, config.target)
        if cache is None:
            features = (None, config.bins, 2 * config.source)
            types: Types = {"input_features": (features, "float32"), "decoder_input_ids": ((None, None), IDS)}
            outputs: tuple[str, ...] = ("logits", "encoder_last_hidden_state")
            optional: tuple[str, ...] = ()
        else:
            types = {"decoder_input_ids": ((None, None), "int32"), "position": ((), "int32")}
            outputs, optional = ("logits",), ("input_features", "last")
        super().__init__(config, types, outputs, optional, dtype, text)

    def compute(self, inputs: Mapping[str, Any]) -> Any:
        if self.capacity is None:
            return whisper(self, self.config, inputs, self.dtype)
        return whisper_step(self, self.config, inputs, self.dtype, cache=self.capacity)


def whisper_network(settings: Mapping[str, Any], dtype: str, cache: int | None = None) -> Whisper:
    """Return the model of a ``config.json``; with ``cache``, the decoder generates tokens step by step."""
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
    return Whisper(config, TextSettings.of(settings), cache=cache, dtype=dtype)


def whisper(layer: Any, config: WhisperConfig, inputs: Mapping[str, Any], dtype: str) -> Any:
    """Return the logits of the decoder and the result of the encoder."""
    encoded = _encoder(Weights(layer, dtype, "model.encoder.", config.encoder), config, inputs["input_features"])
    tokens = inputs["decoder_input_ids"]
    memory = Memory(layer, Places.of(tokens, None, None, None, None, "Whisper"))
    return _decoder(layer, config, tokens, memory, encoded, None, dtype), encoded


def whisper_step(layer: Any, config: WhisperConfig, inputs: Mapping[str, Any], dtype: str, *, cache: int) -> Any:
    """Return the logits of further tokens; a call with the encoder's input begins a text."""
    tokens, features = inputs["decoder_input_ids"], inputs["input_features"]
    places = Places.of(tokens, inputs["position"], cache, None, None, "Whisper")
    memory = Memory(layer, places, config.source, features is not None)
    if features is None:
        features = ops.full(shape=(tokens.shape[0], config.bins, 2 * config.source), value=0.0, dtype="float32")
    encoded = _encoder(Weights(layer, dtype, "model.encoder.", config.encoder), config, features)
    return _decoder(layer, config, tokens, memory, encoded, inputs["last"], dtype)


def _decoder(
    layer: Any, config: WhisperConfig, tokens: Any, memory: Memory, encoded: Any, last: Any, dtype: str
) -> Any:
    """Return the logits of tokens, or with ``last`` of one token of each row."""
    tower = config.decoder
    weights = Weights(layer, dtype, "model.decoder.", tower)
    table = weights.table("embed_tokens", config.vocabulary, tower.hidden)
    x = table(tokens) + weights.table("embed_positions", config.target, tower.hidden)(memory.places.rows)
    mask, cross = memory.places.mask(None), replace(tower.names, **CROSS)
    mask = ops.reshape(mask, shape=(*(1,) * (4 - len(mask.shape)), *mask.shape))
    size = tower.hidden // tower.heads
    shape = (tokens.shape[0], tower.heads, None, size)
    for n in range(tower.layers):
        block = weights.below(tower.names.layer.format(n))
        y = block.norm(tower.names.attention_norm, x)
        k, v = memory.own(block.path, *keys_and_values(block, tower, y, tower.names))
        x = x + attend(block, tower, y, k, v, mask, tower.names)
        k, v = (
            memory.of_encoder(f"{block.path}{name}_of_encoder", shape, 2, compute, dtype)
            for name, compute in (
                ("key", partial(projected, block, tower, encoded, cross.key, tower.key_bias)),
                ("value", partial(projected, block, tower, encoded, cross.value, True)),
            )
        )
        x = x + attend(block, tower, block.norm("encoder_attn_layer_norm", x), k, v, None, cross)
        y = block.norm(tower.names.mlp_norm, x)
        y = activate(tower.activation, block.linear("fc1", y, tower.intermediate, bias=True))
        x = x + block.linear("fc2", y, tower.hidden, bias=True)
    x = selected(weights.norm("layer_norm", x), last)
    return logits_of_table(x, table, config.vocabulary, dtype)


def _encoder(weights: Weights, config: WhisperConfig, features: Any) -> Any:
    tower, x = config.encoder, features
    for name, stride in (("conv1", 1), ("conv2", 2)):
        kernel = weights.param(f"{name}.weight", (tower.hidden, x.shape[1], 3))
        bias = ops.reshape(weights.param(f"{name}.bias", (tower.hidden,), "zeros"), shape=(1, tower.hidden, 1))
        x = ops.gelu(ops.conv(x, kernel, stride=(stride,), padding=((1, 1),), dilation=(1,)) + bias)
    x = ops.transpose(x, perm=(0, 2, 1)) + weights.param("embed_positions.weight", (config.source, tower.hidden))
    return weights.norm("layer_norm", encode(weights, tower, x, None))
