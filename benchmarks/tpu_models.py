"""Families of models for ``bench_tpu.py``, most of which the rules of plans were not derived from."""

from __future__ import annotations

import mithril as ml
from mithril.models import (
    GRU,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    Gelu,
    IOKey,
    LayerNorm,
    Linear,
    MaxPool2d,
    Model,
    Relu,
    RMSNorm,
)


def perceptron(width: int, layers: int) -> Model:
    x = IOKey("input")
    for k in range(layers):
        x = Relu()(Linear(width, name=f"layer{k}")(x))
    return Model.create(outputs={"output": x})


def autoencoder(width: int) -> Model:
    """Return a perceptron whose layers become narrower, then wider."""
    x = IOKey("input")
    for k, n in enumerate((width // 2, width // 8, 64, width // 8, width // 2)):
        x = Gelu()(Linear(n, name=f"layer{k}")(x))
    return Model.create(outputs={"output": Linear(width, name="last")(x)})


def convnext(width: int, blocks: int) -> Model:
    """Return blocks of a depthwise 7 x 7 convolution and a perceptron over the channels."""
    x = Conv2d(width, kernel_size=4, stride=4, name="stem")(IOKey("input"))
    for k in range(blocks):
        h = Conv2d(width, kernel_size=7, padding=3, groups=width, name=f"b{k}.depthwise")(x)
        h = LayerNorm(width, name=f"b{k}.norm")(h.transpose((0, 2, 3, 1)))
        h = Linear(width, name=f"b{k}.down")(Gelu()(Linear(4 * width, name=f"b{k}.up")(h)))
        x = x + h.transpose((0, 3, 1, 2))
    return Model.create(outputs={"output": Linear(1000, name="head")(x.mean((2, 3)))})


def vgg(width: int) -> Model:
    """Return convolutions with pools and without normalization."""
    x = IOKey("input")
    for k, n in enumerate((1, 2, 4)):
        x = Relu()(Conv2d(n * width, kernel_size=3, padding=1, name=f"a{k}")(x))
        x = MaxPool2d(2)(Relu()(Conv2d(n * width, kernel_size=3, padding=1, name=f"b{k}")(x)))
    return Model.create(outputs={"output": Linear(1000, name="head")(x.mean((2, 3)))})


def mixer(features: int, tokens: int, blocks: int) -> Model:
    """Return blocks of a perceptron over the tokens and one over the features."""
    x = Linear(features, name="stem")(IOKey("input"))
    for k in range(blocks):
        h = LayerNorm(features, name=f"b{k}.norm1")(x).transpose((0, 2, 1))
        h = Linear(tokens, name=f"b{k}.token2")(Gelu()(Linear(2 * tokens, name=f"b{k}.token1")(h)))
        x = x + h.transpose((0, 2, 1))
        h = LayerNorm(features, name=f"b{k}.norm2")(x)
        x = x + Linear(features, name=f"b{k}.mix2")(Gelu()(Linear(4 * features, name=f"b{k}.mix1")(h)))
    return Model.create(outputs={"output": x})


def gated(vocabulary: int, features: int, blocks: int) -> Model:
    """Return gated perceptrons over an embedding, with root mean square normalization."""
    x = Embedding(vocabulary, features, name="table")(IOKey("input"))
    for k in range(blocks):
        h = RMSNorm(features, name=f"b{k}.norm")(x)
        gate = Linear(3 * features, bias=False, name=f"b{k}.gate")(h)
        up = Linear(3 * features, bias=False, name=f"b{k}.up")(h)
        x = x + Linear(features, bias=False, name=f"b{k}.down")(gate * gate.sigmoid() * up)
    return Model.create(outputs={"output": Linear(vocabulary, bias=False, name="head")(x)})


def unet(width: int) -> Model:
    """Return convolutions that halve the image twice and restore it, with connections between equal sizes."""
    x, levels = IOKey("input"), []
    for k in range(2):
        x = Relu()(Conv2d(width << k, kernel_size=3, padding=1, name=f"down{k}")(x))
        levels.append(x)
        x = MaxPool2d(2)(x)
    x = Relu()(Conv2d(4 * width, kernel_size=3, padding=1, name="bottom")(x))
    for k in (1, 0):
        x = ConvTranspose2d(width << k, kernel_size=2, stride=2, name=f"up{k}")(x)
        x = Relu()(Conv2d(width << k, kernel_size=3, padding=1, name=f"join{k}")(ml.ops.concat(x, levels[k], axis=1)))
    return Model.create(outputs={"output": Conv2d(8, kernel_size=1, name="head")(x)})


def mobile(width: int, blocks: int) -> Model:
    """Return inverted residual blocks: a wide pointwise, a depthwise and a narrow pointwise convolution."""
    x = Conv2d(width, kernel_size=3, stride=2, padding=1, name="stem")(IOKey("input"))
    for k in range(blocks):
        h = BatchNorm2d(4 * width, name=f"b{k}.norm1")(Conv2d(4 * width, kernel_size=1, name=f"b{k}.wide")(x))
        h = Conv2d(4 * width, kernel_size=3, padding=1, groups=4 * width, name=f"b{k}.depthwise")(Relu()(h))
        x = x + Conv2d(width, kernel_size=1, name=f"b{k}.narrow")(Relu()(h))
    return Model.create(outputs={"output": Linear(1000, name="head")(x.mean((2, 3)))})


def sound(width: int, blocks: int) -> Model:
    """Return gated residual convolutions over time with growing dilation."""
    x = Conv1d(width, kernel_size=1, name="stem")(IOKey("input"))
    for k in range(blocks):
        options = {"kernel_size": 3, "padding": 2**k, "dilation": 2**k}
        gate = Conv1d(width, **options, name=f"b{k}.gate")(x).sigmoid()
        x = x + Conv1d(width, **options, name=f"b{k}.value")(x).tanh() * gate
    return Model.create(outputs={"output": Conv1d(16, kernel_size=1, name="head")(x)})


def crossed(fields: int, size: int, width: int) -> Model:
    """Return products of a vector with itself, as for recommendations, next to a perceptron."""
    start = IOKey("input")
    x = start
    for k in range(3):
        x = start * Linear(fields * size, name=f"cross{k}")(x) + x
    deep = Relu()(Linear(width, name="deep1")(Relu()(Linear(width, name="deep0")(start))))
    return Model.create(outputs={"output": Linear(1, name="head")(ml.ops.concat(x, deep, axis=1))})


def waves(width: int, layers: int) -> Model:
    """Return a perceptron of sines."""
    x = IOKey("input")
    for k in range(layers):
        x = (30.0 * Linear(width, name=f"layer{k}")(x)).sin()
    return Model.create(outputs={"output": Linear(3, name="head")(x)})


def dense(growth: int, layers: int) -> Model:
    """Return convolutions of which each reads the results of all before it."""
    x = Conv2d(2 * growth, kernel_size=3, padding=1, name="stem")(IOKey("input"))
    for k in range(layers):
        h = Relu()(BatchNorm2d(growth * (k + 2), name=f"norm{k}")(x))
        x = ml.ops.concat(x, Conv2d(growth, kernel_size=3, padding=1, name=f"layer{k}")(h), axis=1)
    return Model.create(outputs={"output": Linear(100, name="head")(x.mean((2, 3)))})


def recurrent(vocabulary: int, width: int) -> Model:
    table = Embedding(vocabulary, width, name="table")(IOKey("input"))
    sequence, *_ = GRU(width, name="gru")(table)
    return Model.create(outputs={"output": Linear(vocabulary, name="head")(sequence)})


def highway(width: int, layers: int) -> Model:
    """Return layers that mix their input and a perceptron by a gate."""
    x = IOKey("input")
    for k in range(layers):
        gate = Linear(width, name=f"gate{k}")(x).sigmoid()
        x = gate * Linear(width, name=f"layer{k}")(x).tanh() + (1.0 - gate) * x
    return Model.create(outputs={"output": x})


def excited(width: int, blocks: int) -> Model:
    """Return residual convolutions whose channels are scaled by a perceptron of their means."""
    x = Conv2d(width, kernel_size=3, padding=1, name="stem")(IOKey("input"))
    for k in range(blocks):
        h = Relu()(BatchNorm2d(width, name=f"b{k}.norm")(Conv2d(width, kernel_size=3, padding=1, name=f"b{k}.conv")(x)))
        scale = Linear(width, name=f"b{k}.expand")(Relu()(Linear(width // 8, name=f"b{k}.squeeze")(h.mean((2, 3)))))
        x = x + h * scale.sigmoid().reshape((-1, width, 1, 1))
    return Model.create(outputs={"output": Linear(100, name="head")(x.mean((2, 3)))})


def tower(width: int, layers: int) -> Model:
    """Return perceptrons with residual connections and normalization."""
    x = Linear(width, name="stem")(IOKey("input"))
    for k in range(layers):
        h = LayerNorm(width, name=f"b{k}.norm")(x)
        x = x + Linear(width, name=f"b{k}.down")(Relu()(Linear(2 * width, name=f"b{k}.up")(h)))
    return Model.create(outputs={"output": Linear(10, name="head")(x)})


def positions(width: int, blocks: int) -> Model:
    """Return a residual network over images whose blocks end in an overlapping pool."""
    x = Conv2d(width, kernel_size=3, padding=1, name="stem")(IOKey("input"))
    for k in range(blocks):
        h = Relu()(Conv2d(width, kernel_size=3, padding=1, name=f"b{k}.conv")(x))
        x = x + MaxPool2d(3, stride=1, padding=1)(h)
    return Model.create(outputs={"output": Linear(100, name="head")(x.mean((2, 3)))})


def shuffled(width: int, blocks: int) -> Model:
    """Return blocks that convolve one half of the channels and pass the other."""
    x = Conv2d(2 * width, kernel_size=3, stride=2, padding=1, name="stem")(IOKey("input"))
    for k in range(blocks):
        h = Relu()(BatchNorm2d(width, name=f"b{k}.norm")(Conv2d(width, kernel_size=1, name=f"b{k}.in")(x[:, :width])))
        h = Conv2d(width, kernel_size=3, padding=1, groups=width, name=f"b{k}.depthwise")(h)
        x = ml.ops.concat(x[:, width:], Relu()(h), axis=1)
    return Model.create(outputs={"output": Linear(100, name="head")(x.mean((2, 3)))})


def factorized(fields: int, size: int, layers: int) -> Model:
    """Return interactions of embedded fields by their products, then a perceptron."""
    table = Embedding(100_000, size, name="table")(IOKey("input"))
    pairs = (table @ table.transpose((0, 2, 1))).reshape((-1, fields * fields))
    x = ml.ops.concat(table.reshape((-1, fields * size)), pairs, axis=1)
    for k in range(layers):
        x = Relu()(Linear(1024, name=f"layer{k}")(x))
    return Model.create(outputs={"output": Linear(1, name="head")(x)})


def normalized(width: int, layers: int) -> Model:
    """Return perceptrons whose activations are normalized to unit length and squashed."""
    x = IOKey("input")
    for k in range(layers):
        h = Linear(width, name=f"layer{k}")(x).tanh()
        x = h / ((h * h).sum(1, keepdims=True) + 1.0).sqrt()
    return Model.create(outputs={"output": Linear(16, name="head")(x)})


def experts(width: int, count: int, blocks: int) -> Model:
    """Return residual mixtures of perceptrons, all of which are computed and weighted by a softmax."""
    x = Linear(width, name="stem")(IOKey("input"))
    for k in range(blocks):
        weights = Linear(count, name=f"b{k}.router")(x).softmax(axis=1)
        parts = [
            weights[:, e : e + 1] * Linear(width, name=f"b{k}.down{e}")(Relu()(Linear(width, name=f"b{k}.up{e}")(x)))
            for e in range(count)
        ]
        x = x + sum(parts[1:], parts[0])
    return Model.create(outputs={"output": Linear(16, name="head")(x)})


def wavelets(width: int, levels: int) -> Model:
    """Return convolutions over time that halve the length and double the channels."""
    x = Conv1d(width, kernel_size=7, padding=3, name="stem")(IOKey("input"))
    for k in range(levels):
        n = width << (k + 1)
        x = Conv1d(n, kernel_size=4, stride=2, padding=1, name=f"half{k}")(Relu()(x))
        x = x + Conv1d(n, kernel_size=3, padding=1, name=f"mix{k}")(Relu()(x))
    return Model.create(outputs={"output": Linear(10, name="head")(x.mean(2))})
