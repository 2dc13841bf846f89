"""ResNet-18, with the names of torchvision's parameters: its state_dict loads with compiled.load_state_dict."""

from __future__ import annotations

import numpy as np
from everywhere import run_everywhere

from mithril.models import (
    BatchNorm2d,
    Conv2d,
    GlobalAvgPool2d,
    IOKey,
    Linear,
    MaxPool2d,
    Model,
    Relu,
    Sequential,
)


def basic_block(channels_in: int, channels: int, stride: int, name: str) -> Model:
    """Two 3x3 convolutions and the shortcut around them."""
    x = IOKey("input")
    h = Conv2d(channels_in, channels, kernel_size=3, stride=stride, padding=1, bias=False, name="conv1")(x)
    h = Relu()(BatchNorm2d(channels, name="bn1")(h))
    h = Conv2d(channels, channels, kernel_size=3, padding=1, bias=False, name="conv2")(h)
    h = BatchNorm2d(channels, name="bn2")(h)
    shortcut = x
    if stride != 1 or channels_in != channels:
        projection = Conv2d(channels_in, channels, kernel_size=1, stride=stride, bias=False)
        shortcut = Sequential(projection, BatchNorm2d(channels), name="downsample")(x)
    return Model.create(inputs=x, outputs=Relu()(h + shortcut), name=name)


def resnet18(classes: int = 1000, width: int = 64) -> Model:
    """Images [N, 3, H, W] to logits [N, classes]."""
    model = Model()
    model |= Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False, name="conv1")
    model += BatchNorm2d(width, name="bn1")
    model += Relu()
    model += MaxPool2d(3, stride=2, padding=1)
    channels = width
    for stage in range(4):
        layer, stage_width = Model(name=f"layer{stage + 1}"), width * 2**stage
        layer += basic_block(channels, stage_width, 1 if stage == 0 else 2, "0")
        layer += basic_block(stage_width, stage_width, 1, "1")
        model += layer
        channels = stage_width
    model += GlobalAvgPool2d()
    model += Linear(channels, classes, name="fc")
    return model


def main() -> None:
    images = np.random.default_rng(0).standard_normal((2, 3, 64, 64)).astype(np.float32)
    model = resnet18()
    print(model.summary(shapes={"input": images.shape}))
    run_everywhere(model, {"input": images})


if __name__ == "__main__":
    main()
