"""A GPT in the shape of nanoGPT: for training on whole sequences, and with a cache for generating token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
from everywhere import run_everywhere

import mithril as ml
from mithril import plugins
from mithril.models import (
    Dropout,
    Embedding,
    Gelu,
    IOKey,
    LayerNorm,
    Linear,
    Model,
    MultiHeadAttention,
    PositionalEmbedding,
)


def block(features: int, heads: int, dropout: float, cache: int | None, name: str) -> Model:
    """Pre-norm transformer block: attention and an MLP, each with a residual connection."""
    x, position = IOKey("input"), IOKey("position")
    attention = MultiHeadAttention(features, heads, causal=True, dropout=dropout, cache=cache, name="attn")
    normalized = LayerNorm(features, name="ln_1")(x)
    x = x + (attention(normalized, position) if cache else attention(normalized))
    h = Linear(features, 4 * features, name="c_fc")(LayerNorm(features, name="ln_2")(x))
    h = Linear(4 * features, features, name="c_proj")(Gelu(approximate="tanh")(h))
    return Model.create(outputs=x + Dropout(dropout)(h), name=name)


def gpt(
    vocabulary: int = 50304,
    length: int = 1024,
    layers: int = 12,
    heads: int = 12,
    features: int = 768,
    dropout: float = 0.0,
    cache: bool = False,
) -> Model:
    """Tokens [N, L] to logits [N, L, vocabulary].

    With ``cache`` the keys and values of earlier tokens are the model's state, and ``position`` is where this call's
    first token stands. The table of embeddings is also the weight of the last layer.
    """
    cache_length = length if cache else None
    tokens, position = IOKey("input", dtype="int32"), IOKey("position", dtype="int32", shape=[])
    table = IOKey("wte.weight", trainable=True, init="normal(std=0.02)")
    x = Embedding(vocabulary, features, name="wte")(tokens, weight=table)
    place = PositionalEmbedding(length, name="wpe")
    x = Dropout(dropout)(place(x, position) if cache else place(x))
    stack = Model(name="h")
    for k in range(layers):
        part = block(features, heads, dropout, cache_length, str(k))
        stack += part(position="position") if cache else part
    x = stack(x, position) if cache else stack(x)
    logits = Linear(features, vocabulary, bias=False, name="lm_head")(LayerNorm(features, name="ln_f")(x), weight=table)
    return Model.create(outputs={"output": logits})


def generate(compiled: Any, params: Any, prompt: np.ndarray, tokens: int) -> np.ndarray:
    """Generate greedily: the prompt in one call, then one token per call."""
    state = compiled.initial_state()
    text, new, position = prompt, prompt, 0
    for _ in range(tokens):
        inputs = {"input": new.astype(np.int32), "position": np.int32(position)}
        outputs, state = compiled.evaluate(params, inputs, state=state)
        position += new.shape[1]
        logits = compiled.backend.to_numpy(outputs["output"])
        new = logits[:, -1].argmax(axis=-1)[:, None]
        text = np.concatenate([text, new], axis=1)
    return text


def main() -> None:
    small = {"vocabulary": 256, "length": 64, "layers": 4, "heads": 4, "features": 128}
    prompt = np.random.default_rng(0).integers(0, 256, (1, 16)).astype(np.int32)
    run_everywhere(gpt(**small), {"input": prompt})
    for name in plugins.backends():
        try:
            compiled = ml.compile(gpt(**small, cache=True), name, shapes={"input": [1, None]}, inference=True)
        except (ml.PluginError, ml.BackendError) as error:
            print(f"{name:8} {error.what}")
            continue
        params = compiled.randomize_params(0)
        print(f"{name:8} {generate(compiled, params, prompt, 8)[0, -8:]}")


if __name__ == "__main__":
    main()
