"""Small models of the common kinds, in several sizes, used for calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril.models import (
    GRU,
    LSTM,
    BatchNorm2d,
    Concat,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    Gelu,
    GlobalAvgPool2d,
    IOKey,
    LayerNorm,
    Linear,
    MaxPool2d,
    Model,
    PositionalEmbedding,
    Relu,
    Sequential,
    Sigmoid,
    Tanh,
    TransformerEncoderLayer,
)

Case = tuple[Any, Mapping[str, np.ndarray[Any, Any]]]  # a model and its inputs


def corpus() -> dict[str, Case]:
    """Return models and their inputs by name."""
    cases: dict[str, Case] = {}
    for rows, size, hidden in (
        (1, 64, 256),
        (2, 32, 96),
        (8, 256, 768),
        (64, 96, 384),
        (96, 512, 1024),
        (256, 160, 320),
        (2, 1024, 2048),
    ):
        cases[f"perceptron {rows}x{size}"] = _perceptron(rows, size, hidden)
    for batch, length, size, causal in (
        (1, 8, 64, True),
        (1, 4, 32, False),
        (2, 12, 128, True),
        (2, 20, 96, False),
        (1, 48, 160, True),
        (4, 24, 192, False),
        (2, 64, 256, True),
    ):
        cases[f"transformer {batch}x{length}x{size}"] = _transformer(batch, length, size, causal)
    for batch, channels, hidden, size in (
        (1, 8, 24, 48),
        (2, 24, 48, 24),
        (1, 48, 96, 24),
        (2, 96, 160, 12),
        (1, 160, 320, 8),
        (2, 256, 512, 3),
        (1, 448, 640, 4),
        (2, 16, 32, 40),
        (2, 640, 512, 2),
        (1, 512, 768, 3),
        (2, 224, 448, 5),
        (1, 128, 128, 16),
        (4, 64, 64, 12),
    ):
        cases[f"convolutions {batch}x{channels}x{size}"] = _convolutions(batch, channels, hidden, size)
    for batch, width, kernel, stride, size in (
        (1, 48, 7, 2, 48),
        (2, 80, 7, 2, 80),
        (1, 96, 16, 16, 64),
        (2, 16, 3, 1, 48),
    ):
        cases[f"stem {batch}x{size} by {kernel}"] = _stem(batch, width, kernel, stride, size)
    for batch, channels, size in ((1, 24, 16), (1, 96, 8), (2, 48, 24)):
        cases[f"upsampling {batch}x{channels}x{size}"] = _upsampling(batch, channels, size)
    for batch, length, size in ((1, 10, 48), (4, 20, 96), (8, 30, 160), (2, 16, 256), (2, 30, 112), (6, 12, 144)):
        cases[f"recurrent {batch}x{length}x{size}"] = _recurrent(batch, length, size)
    return cases


def _random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _tokens(batch: int, length: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, count, (batch, length)).astype(np.int32)


def _perceptron(rows: int, size: int, hidden: int) -> Case:
    model = Sequential(
        Linear(hidden), Relu(), Linear(hidden), Tanh(), LayerNorm(hidden), Linear(size), Gelu(), Sigmoid()
    )
    return model, {"input": _random(rows, size)}


def _transformer(batch: int, length: int, size: int, causal: bool) -> Case:
    activation = "silu" if causal else "gelu"
    layers = [
        TransformerEncoderLayer(size, 4, activation=activation, norm_first=causal, causal=causal) for _ in range(2)
    ]
    model = Sequential(Embedding(500, size), PositionalEmbedding(length), *layers, Linear(500))
    return model, {"input": _tokens(batch, length, 500)}


def _convolutions(batch: int, channels: int, out_channels: int, size: int) -> Case:
    x = IOKey("input", shape=[batch, channels, size, size])
    h = Relu()(BatchNorm2d(out_channels)(Conv2d(channels, out_channels, kernel_size=3, padding=1, bias=False)(x)))
    h = BatchNorm2d(out_channels)(Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)(h))
    h = Relu()(h + BatchNorm2d(out_channels)(Conv2d(channels, out_channels, kernel_size=1, bias=False)(x)))
    h = Relu()(
        BatchNorm2d(out_channels)(Conv2d(out_channels, out_channels, kernel_size=3, stride=2, padding=1, bias=False)(h))
    )
    y = Linear(100)(GlobalAvgPool2d()(MaxPool2d(3, stride=2, padding=1)(h)))
    return Model.create(inputs=x, outputs={"output": y}), {"input": _random(batch, channels, size, size)}


def _stem(batch: int, width: int, kernel: int, stride: int, size: int) -> Case:
    convolution = Conv2d(3, width, kernel_size=kernel, stride=stride, padding=kernel // 2 if kernel < 16 else 0)
    model = Sequential(convolution, BatchNorm2d(width), Relu(), MaxPool2d(3, stride=2, padding=1))
    return model, {"input": _random(batch, 3, size, size)}


def _upsampling(batch: int, channels: int, size: int) -> Case:
    x = IOKey("input", shape=[batch, channels, size, size])
    h = ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2)(x)
    h = Concat(axis=1)(h, h)
    y = Relu()(Conv2d(channels, channels // 2, kernel_size=3, padding="same", bias=False)(h))
    return Model.create(inputs=x, outputs={"output": y}), {"input": _random(batch, channels, size, size)}


def _recurrent(batch: int, length: int, size: int) -> Case:
    x = IOKey("input", shape=["N", "L"], dtype="int32")
    h = Embedding(400, size)(x)
    h, *_ = LSTM(size, size)(h)
    h, *_ = GRU(size, size)(h)
    return Model.create(inputs=x, outputs={"output": Linear(300)(h)}), {"input": _tokens(batch, length, 400)}
