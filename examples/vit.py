"""A vision transformer: an image as a sequence of patches, a class token in front, a stack of encoder layers."""

from __future__ import annotations

import numpy as np
from everywhere import run_everywhere

from mithril.models import (
    Concat,
    Conv2d,
    Dropout,
    IOKey,
    LayerNorm,
    Linear,
    Model,
    PositionalEmbedding,
    TransformerEncoder,
)


def vit(
    image: int = 224,
    patch: int = 16,
    classes: int = 1000,
    layers: int = 12,
    heads: int = 12,
    features: int = 768,
    dropout: float = 0.0,
) -> Model:
    """Images [N, 3, image, image] to logits [N, classes]."""
    pixels = IOKey("input", shape=["N", 3, image, image])
    count = (image // patch) ** 2
    x = Conv2d(3, features, kernel_size=patch, stride=patch, name="patches")(pixels)
    x = x.reshape(x.shape[0], features, count).transpose(0, 2, 1)
    token = IOKey("class_token", trainable=True, shape=[1, 1, features], init="zeros")
    first = token.broadcast_to(shape=(pixels.shape[0], 1, features))
    x = PositionalEmbedding(count + 1, name="positions")(Concat(axis=1)(first, x))
    encoder = TransformerEncoder(
        layers, features, heads, dropout=dropout, activation="gelu", norm_first=True, name="encoder"
    )
    x = LayerNorm(features, name="norm")(encoder(Dropout(dropout)(x)))
    return Model.create(inputs=pixels, outputs=Linear(features, classes, name="head")(x[:, 0]))


def main() -> None:
    images = np.random.default_rng(0).standard_normal((2, 3, 64, 64)).astype(np.float32)
    run_everywhere(vit(64, 16, 10, layers=4, heads=4, features=128), {"input": images})


if __name__ == "__main__":
    main()
