"""A BERT-style encoder: token, position and segment embeddings, a stack of encoder layers, a pooled first token."""

from __future__ import annotations

import numpy as np
from everywhere import run_everywhere

from mithril.models import (
    Dropout,
    Embedding,
    IOKey,
    LayerNorm,
    Linear,
    Model,
    PositionalEmbedding,
    Tanh,
    TransformerEncoder,
)


def bert(
    vocabulary: int = 30522,
    length: int = 512,
    layers: int = 12,
    heads: int = 12,
    features: int = 768,
    dropout: float = 0.1,
) -> Model:
    """Tokens, segments and mask, each [N, L], to the sequence [N, L, features] and the pooled vector [N, features]."""
    tokens = IOKey("tokens", shape=["N", "L"], dtype="int32")
    segments = IOKey("segments", shape=["N", "L"], dtype="int32")
    mask = IOKey("mask", shape=["N", "L"], dtype="bool")
    x = Embedding(vocabulary, features, name="tokens")(tokens) + Embedding(2, features, name="segments")(segments)
    x = PositionalEmbedding(length, name="positions")(x)
    x = Dropout(dropout)(LayerNorm(features, eps=1e-12, name="norm")(x))
    attends = mask.reshape(mask.shape[0], 1, 1, mask.shape[1])
    encoder = TransformerEncoder(layers, features, heads, dropout=dropout, activation="gelu", eps=1e-12, name="encoder")
    sequence = encoder(x, mask=attends)
    pooled = Tanh()(Linear(features, features, name="pooler")(sequence[:, 0]))
    return Model.create(inputs=[tokens, segments, mask], outputs={"sequence": sequence, "pooled": pooled})


def main() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, (2, 32)).astype(np.int32)
    inputs = {"tokens": tokens, "segments": np.zeros_like(tokens), "mask": np.arange(32) < np.array([[32], [20]])}
    run_everywhere(bert(1000, 64, layers=4, heads=4, features=128), inputs)


if __name__ == "__main__":
    main()
