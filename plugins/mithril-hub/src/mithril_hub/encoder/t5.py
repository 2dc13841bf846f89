"""T5: an encoder and a decoder of text with relative positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mithril import ops
from mithril_hub.decoder.places import Places, selected
from mithril_hub.encoder.blocks import joined_heads, padding_mask, split_heads
from mithril_hub.encoder.memory import Memory
from mithril_hub.encoder.network import Network, TextSettings, Types
from mithril_hub.model import IDS
from mithril_hub.parts import logits_of_table
from mithril_hub.weights import Weights, activate


@dataclass(frozen=True)
class T5Config:
    """An encoder and a decoder with relative positions."""

    vocabulary: int
    hidden: int
    intermediate: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    head_size: int
    buckets: int
    distance: int
    activation: str
    gated: bool
    tied: bool
    output_scale: float  # of the decoder's result, before its logits
    eps: float
    norm: str = "rms"
    norm_offset: float = 0.0
    input_major: bool = False


class T5(Network):
    """An encoder and a decoder; with ``cache=n``, keys and values of n positions are states of the decoder."""

    def __init__(
        self, config: T5Config, text: TextSettings, *, cache: int | None = None, dtype: str = "float32"
    ) -> None:
        self.capacity = cache
        tokens = ((None, None), IDS if cache is None else "int32")
        if cache is None:
            types: Types = {"input_ids": tokens, "decoder_input_ids": tokens}
            outputs: tuple[str, ...] = ("logits", "encoder_last_hidden_state")
            optional: tuple[str, ...] = ("attention_mask",)
        else:
            types = {"decoder_input_ids": tokens, "position": ((), "int32")}
            outputs, optional = ("logits",), ("input_ids", "attention_mask", "last")
        super().__init__(config, types, outputs, optional, dtype, text)

    def compute(self, inputs: Mapping[str, Any]) -> Any:
        if self.capacity is None:
            return t5(self, self.config, inputs, self.dtype)
        return t5_step(self, self.config, inputs, self.dtype, cache=self.capacity)


def t5_network(settings: Mapping[str, Any], dtype: str, cache: int | None = None) -> T5:
    """Return the model of a ``config.json``; with ``cache``, the decoder generates tokens step by step."""
    projection = settings.get("feed_forward_proj", "relu")
    activation = "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-")
    tied = settings.get("tie_word_embeddings", True)
    scaled = settings.get(
        "scale_decoder_outputs", tied
    )  # without this setting, older versions scale if weights are tied
    config = T5Config(
        settings["vocab_size"],
        settings["d_model"],
        settings["d_ff"],
        settings["num_layers"],
        settings.get("num_decoder_layers") or settings["num_layers"],
        settings["num_heads"],
        settings["d_kv"],
        settings.get("relative_attention_num_buckets", 32),
        settings.get("relative_attention_max_distance", 128),
        settings.get("dense_act_fn") or activation,
        settings.get("is_gated_act", projection.startswith("gated-")),
        tied,
        settings["d_model"] ** -0.5 if scaled else 1.0,
        float(settings.get("layer_norm_epsilon", 1e-6)),
    )
    return T5(config, TextSettings.of(settings), cache=cache, dtype=dtype)


def t5(layer: Any, config: T5Config, inputs: Mapping[str, Any], dtype: str) -> Any:
    """Return the logits of the decoder and the result of the encoder."""
    weights = Weights(layer, dtype, "", config)
    table = weights.table("shared", config.vocabulary, config.hidden)
    target = inputs["decoder_input_ids"]
    keys = _additive(padding_mask(inputs["attention_mask"]))
    encoded = _encoder(weights, config, table(inputs["input_ids"]), keys)
    memory = Memory(layer, Places.of(target, None, None, None, None, "T5"))
    return _decoder(weights, config, table, target, memory, encoded, keys, None), encoded


def t5_step(layer: Any, config: T5Config, inputs: Mapping[str, Any], dtype: str, *, cache: int) -> Any:
    """Return the logits of further tokens; a call with the encoder's input begins a text."""
    weights = Weights(layer, dtype, "", config)
    table = weights.table("shared", config.vocabulary, config.hidden)
    target, source, valid = inputs["decoder_input_ids"], inputs["input_ids"], inputs["attention_mask"]
    memory = Memory(layer, Places.of(target, inputs["position"], cache, None, None, "T5"), cache, source is not None)
    batch = target.shape[0]
    if source is None:
        source = ops.full(shape=(batch, 1), value=0, dtype="int32")
    if valid is None:
        valid = ops.full(shape=source.shape, value=1, dtype="int32")
    encoded = _encoder(weights, config, table(source), _additive(padding_mask(valid)))
    marks = memory.of_encoder("encoder_mask", (batch, None), 1, lambda: valid, "int32")
    return _decoder(weights, config, table, target, memory, encoded, _additive(padding_mask(marks)), inputs["last"])


def _additive(mask: Any) -> Any:
    return None if mask is None else ops.where(mask, 0.0, float("-inf"))


def _encoder(weights: Weights, config: T5Config, x: Any, mask: Any) -> Any:
    """Return the encoder's result; the first layer has the positions of all."""
    weights = weights.below("encoder.")
    rows = ops.iota(shape=(x.shape[1], 1), axis=0, dtype="int32")
    relative = ops.iota(shape=(1, x.shape[1]), axis=1, dtype="int32") - rows
    bias = _positions(weights.below("block.0.layer.0.SelfAttention."), config, relative, True)
    bias = bias if mask is None else bias + mask
    for n in range(config.encoder_layers):
        block = weights.below(f"block.{n}.layer.")
        y = block.norm("0.layer_norm", x)
        inner = block.below("0.SelfAttention.")
        x = x + _attend(inner, config, y, _heads(inner, config, "k", y), _heads(inner, config, "v", y), bias)
        x = x + _feed_forward(block.below("1.DenseReluDense."), config, block.norm("1.layer_norm", x))
    return weights.norm("final_layer_norm", x)


def _decoder(
    weights: Weights, config: T5Config, table: Any, tokens: Any, memory: Memory, encoded: Any, keys: Any, last: Any
) -> Any:
    """Return the logits of tokens, or with ``last`` of one token of each row."""
    root, weights, places = weights, weights.below("decoder."), memory.places
    x = table(tokens)
    rows = ops.reshape(places.rows, shape=(*places.rows.shape, 1))
    length = tokens.shape[1] if places.start is None else places.capacity
    relative = ops.iota(shape=(1, length), axis=1, dtype="int32") - rows
    bias = _positions(weights.below("block.0.layer.0.SelfAttention."), config, relative, False)
    visible = places.mask(None)
    bias = bias + _additive(visible)
    for n in range(config.decoder_layers):
        block = weights.below(f"block.{n}.layer.")
        y, inner = block.norm("0.layer_norm", x), block.below("0.SelfAttention.")
        k, v = memory.own(inner.path, _heads(inner, config, "k", y), _heads(inner, config, "v", y))
        x = x + _attend(inner, config, y, k, v, bias)
        y, cross = block.norm("1.layer_norm", x), block.below("1.EncDecAttention.")
        shape = (tokens.shape[0], config.heads, None, config.head_size)
        k, v = (
            memory.of_encoder(
                f"{cross.path}{name}_of_encoder", shape, 2, partial(_heads, cross, config, name, encoded), weights.dtype
            )
            for name in ("k", "v")
        )
        x = x + _attend(cross, config, y, k, v, keys)
        x = x + _feed_forward(block.below("2.DenseReluDense."), config, block.norm("2.layer_norm", x))
    x = selected(weights.norm("final_layer_norm", x), last)
    if config.output_scale != 1.0:
        x = x * config.output_scale
    if config.tied:
        return logits_of_table(x, table, config.vocabulary, weights.dtype)
    return root.linear("lm_head", x, config.vocabulary)


def _heads(weights: Weights, config: T5Config, name: str, x: Any) -> Any:
    """Return a projection as [batch, heads, length, size]."""
    y = weights.linear(name, x, config.heads * config.head_size)
    return split_heads(y, config.heads, config.head_size)


def _attend(weights: Weights, config: T5Config, x: Any, k: Any, v: Any, bias: Any) -> Any:
    y = ops.attention(_heads(weights, config, "q", x), k, v, bias, scale=1.0)
    return weights.linear("o", joined_heads(y), config.hidden)


def _feed_forward(weights: Weights, config: T5Config, x: Any) -> Any:
    if config.gated:
        hidden = activate(config.activation, weights.linear("wi_0", x, config.intermediate))
        hidden = hidden * weights.linear("wi_1", x, config.intermediate)
    else:
        hidden = activate(config.activation, weights.linear("wi", x, config.intermediate))
    return weights.linear("wo", hidden, config.hidden)


def _positions(weights: Weights, config: T5Config, relative: Any, bidirectional: bool) -> Any:
    """Return the bias of each head by relative position: [1 or batch, heads, queries, keys]."""
    table = weights.table("relative_attention_bias", config.buckets, config.heads)
    buckets = config.buckets // 2 if bidirectional else config.buckets
    distance = ops.abs(relative) if bidirectional else ops.maximum(-relative, 0)
    by_distance = _buckets(buckets, config.distance)
    bucket = ops.take(by_distance, ops.minimum(distance, len(by_distance) - 1), axis=0)
    if bidirectional:
        bucket = bucket + ops.where(ops.greater(relative, 0), buckets, 0)
    bias = table(ops.cast(bucket, dtype="int32"))
    if len(bias.shape) == 4:
        return ops.transpose(bias, perm=(0, 3, 1, 2))
    return ops.unsqueeze(ops.transpose(bias, perm=(2, 0, 1)), axis=0)


def _buckets(count: int, longest: int) -> np.ndarray[Any, Any]:
    """Return the bucket of each distance: one per distance at first, then wider ones, logarithmically."""
    exact = count // 2
    distances = np.arange(longest + 1, dtype=np.float32)
    ratio = np.log(np.maximum(distances, 1) / np.float32(exact)) / np.float32(np.log(longest / exact))
    logarithmic = exact + (ratio * np.float32(count - exact)).astype(np.int32)
    return np.where(distances < exact, distances, np.minimum(logarithmic, count - 1)).astype(np.int32)
