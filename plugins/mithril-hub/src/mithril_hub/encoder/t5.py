"""T5: an encoder and a decoder of text with relative positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril import ops
from mithril_hub.encoder.blocks import causal_mask, joined_heads, padding_mask, split_heads
from mithril_hub.encoder.network import Network
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
    eps: float
    norm: str = "rms"
    norm_offset: float = 0.0
    input_major: bool = False


def t5_network(settings: Mapping[str, Any], dtype: str) -> Network:
    """Return the model of a ``config.json``."""
    projection = settings.get("feed_forward_proj", "relu")
    gated, activation = projection.startswith("gated-"), projection.removeprefix("gated-")
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
        "gelu_new" if projection == "gated-gelu" else activation,
        gated,
        settings.get("tie_word_embeddings", True),
        float(settings.get("layer_norm_epsilon", 1e-6)),
    )
    tokens = ((None, None), "int32")
    types = {"input_ids": tokens, "decoder_input_ids": tokens}
    return Network(t5, config, types, ("logits", "encoder_last_hidden_state"), ("attention_mask",), dtype)


def t5(layer: Any, config: T5Config, inputs: Mapping[str, Any], dtype: str) -> Any:
    """Return the logits of the decoder and the result of the encoder."""
    weights = Weights(layer, dtype, "", config)
    table = weights.param("shared.weight", (config.vocabulary, config.hidden))
    source, target = inputs["input_ids"], inputs["decoder_input_ids"]
    keys = _additive(padding_mask(inputs["attention_mask"]))
    memory = _stack(weights.below("encoder."), config, ops.embedding(source, table), keys, None, None)
    causal = _additive(causal_mask(target.shape[1]))
    x = _stack(weights.below("decoder."), config, ops.embedding(target, table), causal, memory, keys)
    if config.tied:
        return ops.linear(x * config.hidden**-0.5, table), memory
    return weights.linear("lm_head", x, config.vocabulary), memory


def _additive(mask: Any) -> Any:
    return None if mask is None else ops.where(mask, 0.0, float("-inf"))


def _stack(weights: Weights, config: T5Config, x: Any, mask: Any, memory: Any, memory_mask: Any) -> Any:
    """Return the encoder, or with ``memory`` the decoder; the first layer has the positions of all."""
    bias = mask
    layers = config.encoder_layers if memory is None else config.decoder_layers
    for n in range(layers):
        block = weights.below(f"block.{n}.layer.")
        if n == 0:
            places = _positions(block.below("0.SelfAttention."), config, x.shape[1], memory is None)
            bias = places if mask is None else places + mask
        y = block.norm("0.layer_norm", x)
        x = x + _attention(block.below("0.SelfAttention."), config, y, y, bias)
        last = 1
        if memory is not None:
            y = block.norm("1.layer_norm", x)
            x, last = x + _attention(block.below("1.EncDecAttention."), config, y, memory, memory_mask), 2
        x = x + _feed_forward(block.below(f"{last}.DenseReluDense."), config, block.norm(f"{last}.layer_norm", x))
    return weights.norm("final_layer_norm", x)


def _attention(weights: Weights, config: T5Config, x: Any, memory: Any, bias: Any) -> Any:
    width = config.heads * config.head_size
    parts = [weights.linear(n, source, width) for n, source in (("q", x), ("k", memory), ("v", memory))]
    q, k, v = (split_heads(p, config.heads, config.head_size) for p in parts)
    y = ops.attention(q, k, v, bias, scale=1.0)
    return weights.linear("o", joined_heads(y), config.hidden)


def _feed_forward(weights: Weights, config: T5Config, x: Any) -> Any:
    if config.gated:
        hidden = activate(config.activation, weights.linear("wi_0", x, config.intermediate))
        hidden = hidden * weights.linear("wi_1", x, config.intermediate)
    else:
        hidden = activate(config.activation, weights.linear("wi", x, config.intermediate))
    return weights.linear("wo", hidden, config.hidden)


def _positions(weights: Weights, config: T5Config, length: Any, bidirectional: bool) -> Any:
    """Return the bias of each head by relative position: [1, heads, length, length]."""
    table = weights.param("relative_attention_bias.weight", (config.buckets, config.heads))
    rows = ops.iota(shape=(length, 1), axis=0, dtype="int32")
    relative = ops.iota(shape=(1, length), axis=1, dtype="int32") - rows
    buckets = config.buckets // 2 if bidirectional else config.buckets
    distance = ops.abs(relative) if bidirectional else ops.maximum(-relative, 0)
    by_distance = _buckets(buckets, config.distance)
    bucket = ops.take(by_distance, ops.minimum(distance, len(by_distance) - 1), axis=0)
    if bidirectional:
        bucket = bucket + ops.where(ops.greater(relative, 0), buckets, 0)
    bias = ops.transpose(ops.embedding(ops.cast(bucket, dtype="int32"), table), perm=(2, 0, 1))
    return ops.reshape(bias, shape=(1, config.heads, length, length))


def _buckets(count: int, longest: int) -> np.ndarray[Any, Any]:
    """Return the bucket of each distance: one per distance at first, then wider ones, logarithmically."""
    exact = count // 2
    distances = np.arange(longest + 1, dtype=np.float32)
    ratio = np.log(np.maximum(distances, 1) / np.float32(exact)) / np.float32(np.log(longest / exact))
    logarithmic = exact + (ratio * np.float32(count - exact)).astype(np.int32)
    return np.where(distances < exact, distances, np.minimum(logarithmic, count - 1)).astype(np.int32)
