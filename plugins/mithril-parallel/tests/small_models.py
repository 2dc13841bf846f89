"""Models that tests compile: a perceptron of two layers, and a block of a transformer."""

from __future__ import annotations

import mithril as ml
from mithril.models import Gelu, IOKey, LayerNorm, Linear, Model, MultiHeadAttention, Relu


def perceptron(width: int = 32, out: int = 8, batch_name: str = "x") -> Model:
    x = IOKey(batch_name)
    return Model.create(outputs={"y": Linear(out, name="second")(Relu()(Linear(width, name="first")(x)))})


def scalar_loss(width: int = 32) -> Model:
    """Return the mean of squares of a perceptron's outputs."""
    x = IOKey("x")
    y = Linear(4, name="second")(Relu()(Linear(width, name="first")(x)))
    return Model.create(outputs={"loss": ml.ops.mean(y * y)})


def block(features: int = 128, heads: int = 4, hidden: int = 512) -> Model:
    x = IOKey("x")
    h = x + MultiHeadAttention(features, heads, name="attn")(LayerNorm(features, name="ln_1")(x))
    f = Linear(hidden, name="fc")(LayerNorm(features, name="ln_2")(h))
    return Model.create(outputs={"y": h + Linear(features, name="proj")(Gelu()(f))})
