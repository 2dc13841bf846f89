"""A U-Net: halving resolution on the way down, doubling it on the way up, with the finer maps carried across."""

from __future__ import annotations

import numpy as np
from everywhere import run_everywhere

from mithril.models import BatchNorm2d, Concat, Conv2d, ConvTranspose2d, IOKey, MaxPool2d, Model, Relu, Sequential


def double(channels_in: int, channels: int, name: str) -> Sequential:
    """Two 3x3 convolutions, each with batch norm and ReLU."""
    return Sequential(
        Conv2d(channels_in, channels, kernel_size=3, padding="same", bias=False),
        BatchNorm2d(channels),
        Relu(),
        Conv2d(channels, channels, kernel_size=3, padding="same", bias=False),
        BatchNorm2d(channels),
        Relu(),
        name=name,
    )


def unet(channels: int = 3, classes: int = 2, width: int = 64, depth: int = 4) -> Model:
    """Images [N, channels, H, W] to a score per class and pixel; H and W are multiples of 2**depth."""
    x = image = IOKey("input", shape=[None, channels, None, None])
    fine = []
    size = channels
    for k in range(depth):
        x = double(size, width * 2**k, f"down{k}")(x)
        fine.append(x)
        size = width * 2**k
        x = MaxPool2d(2)(x)
    x = double(size, 2 * size, "middle")(x)
    for k in reversed(range(depth)):
        level_width = width * 2**k
        x = ConvTranspose2d(2 * level_width, level_width, kernel_size=2, stride=2, name=f"up{k}")(x)
        x = double(2 * level_width, level_width, f"join{k}")(Concat(axis=1)(fine[k], x))
    return Model.create(inputs=image, outputs=Conv2d(width, classes, kernel_size=1, name="head")(x))


def main() -> None:
    images = np.random.default_rng(0).standard_normal((1, 3, 64, 64)).astype(np.float32)
    run_everywhere(unet(width=16, depth=3), {"input": images})


if __name__ == "__main__":
    main()
