"""Nine standard programs, each with its model, loss and optimizer in a few lines.

``python examples/standard_programs.py [numpy jax ...]`` trains each for 20 steps on random data. The functions take a
backend and return the trainer and a batch; ``trainer.step(batch)`` is a step, ``trainer.fit(loader)`` a training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import mithril as ml
from mithril import ops
from mithril.models import (
    LSTM,
    BatchNorm2d,
    Concat,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    Gelu,
    GlobalAvgPool2d,
    IOKey,
    Layer,
    LayerNorm,
    Linear,
    MaxPool2d,
    Model,
    MultiHeadAttention,
    PositionalEmbedding,
    Relu,
    Residual,
    Sequential,
    Sigmoid,
    TransformerEncoder,
)
from mithril_lora import LoRA, adapter_patterns

RNG = np.random.default_rng(0)


def images(count: int, size: int = 16) -> np.ndarray:
    return RNG.normal(size=(count, 3, size, size)).astype(np.float32)


def integers(high: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, high, shape).astype(np.int32)


# program: ResNet
def conv(channels: int, stride: int = 1) -> Sequential:
    return Sequential(Conv2d(channels, kernel_size=3, stride=stride, padding=1, bias=False), BatchNorm2d())


def block(channels: int, stride: int) -> Sequential:
    shortcut = Sequential(Conv2d(channels, kernel_size=1, stride=stride, bias=False), BatchNorm2d())
    return Sequential(Residual(Sequential(conv(channels, stride), Relu(), conv(channels)), shortcut), Relu())


def resnet(backend: str, width: int = 8, batch: int = 4, count: int = 3) -> tuple[ml.Trainer, Any]:
    stages = [block(width * 2**k, 1 if k == 0 else 2) for k in range(count)]
    model = Sequential(conv(width), Relu(), *stages, GlobalAvgPool2d(), Linear(10))
    trainer = ml.Trainer(model, ml.SGD(0.1, momentum=0.9), loss="cross_entropy", backend=backend)
    return trainer, (images(batch), integers(10, batch))


# program: U-Net
def double(channels: int) -> Sequential:
    return Sequential(conv(channels), Relu(), conv(channels), Relu())


def unet(backend: str, width: int = 4, batch: int = 2, depth: int = 2) -> tuple[ml.Trainer, Any]:
    x, skips = IOKey("image"), []
    h: Any = x
    for k in range(depth):
        skips.append(double(width * 2**k)(h))
        h = MaxPool2d(2)(skips[-1])
    h = double(width * 2**depth)(h)
    for k in reversed(range(depth)):
        up = ConvTranspose2d(width * 2**k, kernel_size=2, stride=2)(h)
        h = double(width * 2**k)(Concat(axis=1)(skips[k], up))
    model = Model.create(inputs=x, logits=Conv2d(2, kernel_size=1)(h))

    def loss(logits: Any, mask: Any) -> Any:
        return ops.cross_entropy(ops.transpose(logits, perm=(0, 2, 3, 1)), mask)

    trainer = ml.Trainer(model, ml.Adam(1e-2), loss=loss, backend=backend)
    return trainer, {"image": images(batch), "mask": integers(2, batch, 16, 16)}


# program: ViT
def vit(backend: str, features: int = 16, batch: int = 4, layers: int = 2, heads: int = 2) -> tuple[ml.Trainer, Any]:
    x = IOKey("image")
    patches = Conv2d(features, kernel_size=4, stride=4)(x)
    patches = patches.reshape(x.shape[0], features, 16).transpose(0, 2, 1)
    token = IOKey("token", trainable=True, shape=[1, 1, features])
    h = Concat(axis=1)(token.broadcast_to(shape=(x.shape[0], 1, features)), patches)
    h = PositionalEmbedding(17)(h)
    h = TransformerEncoder(layers, features, heads, activation="gelu", norm_first=True, dropout=0.0)(h)
    model = Model.create(inputs=x, logits=Linear(10)(LayerNorm()(h)[:, 0]))
    trainer = ml.Trainer(model, ml.AdamW(3e-3), loss="cross_entropy", clip_norm=1.0, backend=backend)
    return trainer, (images(batch), integers(10, batch))


# program: GPT
def gpt_block(features: int, heads: int, cache: int | None, name: str) -> Model:
    x, position = IOKey("input"), IOKey("position", default=0)
    attention = MultiHeadAttention(features, heads, causal=True, cache=cache, name="attention")
    h = LayerNorm(name="norm1")(x)
    x = x + (attention(h, position) if cache else attention(h))
    mlp = Sequential(LayerNorm(), Linear(4 * features), Gelu(), Linear(features), name="mlp")
    return Model.create(outputs=x + mlp(x), name=name)


def decoder(length: int, vocabulary: int, features: int, layers: int, heads: int, cache: bool = False) -> Model:
    tokens, position = IOKey("input", dtype="int32"), IOKey("position", dtype="int32", shape=[])
    inputs = {"position": position} if cache else {}
    h = PositionalEmbedding(length, name="positions")(Embedding(vocabulary, features, name="tokens")(tokens), **inputs)
    for k in range(layers):
        h = gpt_block(features, heads, length if cache else None, f"block{k}")(h, **inputs)
    return Model.create(logits=Linear(vocabulary, name="head")(LayerNorm(name="norm")(h)))


def gpt(backend: str, batch: int = 4, length: int = 16, vocabulary: int = 50, **sizes: int) -> tuple[ml.Trainer, Any]:
    sizes = {"features": 16, "layers": 2, "heads": 2, **sizes}
    trainer = ml.Trainer(
        decoder(length, vocabulary, **sizes), ml.AdamW(3e-3), loss="cross_entropy", clip_norm=1.0, backend=backend
    )
    text = integers(vocabulary, batch, length + 1)
    return trainer, (text[:, :-1], text[:, 1:])


def write(trainer: ml.Trainer, prompt: np.ndarray, count: int, length: int = 16, **sizes: int) -> np.ndarray:
    """Return the tokens that continue a prompt, with a cache of keys and values."""
    sizes = {"vocabulary": 50, "features": 16, "layers": 2, "heads": 2, **sizes}
    model = decoder(length, cache=True, **sizes)
    compiled = ml.compile(model, trainer.engine.backend, shapes={"input": [1, None]}, inference=True)
    compiled.load_state_dict({n: trainer.to_numpy(x) for n, x in trainer.params.items()})
    runner, text, new = compiled.runner(), prompt, prompt
    while text.shape[1] < prompt.shape[1] + count:
        position = np.int32(text.shape[1] - new.shape[1])
        logits = runner({"input": new, "position": position})["logits"]
        new = compiled.backend.to_numpy(logits)[:, -1:].argmax(-1).astype(np.int32)
        text = np.concatenate([text, new], axis=1)
    return text


# program: LSTM
def lstm(backend: str, features: int = 16, batch: int = 4, vocabulary: int = 50) -> tuple[ml.Trainer, Any]:
    tokens = IOKey("tokens", dtype="int32")
    h, *_ = LSTM(features, layers=2)(Embedding(vocabulary, features)(tokens))
    model = Model.create(inputs=tokens, logits=Linear(vocabulary)(h))
    trainer = ml.Trainer(model, ml.Adam(1e-2), loss="cross_entropy", clip_norm=1.0, backend=backend)
    text = integers(vocabulary, batch, 13)
    return trainer, (text[:, :-1], text[:, 1:])


# program: VAE
class Draw(Layer):
    """A sample of a normal distribution; its mean outside of training."""

    inputs = ("mean", "log_variance")

    def build(self, mean: Any, log_variance: Any) -> Any:
        noise = ops.normal(self.key(), shape=mean.shape) if self.training else 0.0
        return mean + ops.exp(log_variance * 0.5) * noise


def vae(backend: str, hidden: int = 32, latent: int = 4, batch: int = 8) -> tuple[ml.Trainer, Any]:
    x = IOKey("image")
    h = Relu()(Linear(hidden)(x))
    mean, log_variance = Linear(latent)(h), Linear(latent)(h)
    decoder = Sequential(Linear(hidden), Relu(), Linear(64), Sigmoid(), name="decoder")
    outputs = {"again": decoder(Draw()(mean, log_variance)), "mean": mean, "log_variance": log_variance}

    def loss(again: Any, image: Any, mean: Any, log_variance: Any) -> Any:
        divergence = ops.exp(log_variance) + mean * mean - 1.0 - log_variance
        return ops.binary_cross_entropy(again, image) * 64.0 + 0.5 * ops.mean(ops.sum(divergence, axis=-1))

    trainer = ml.Trainer(Model.create(inputs=x, outputs=outputs), ml.Adam(3e-3), loss=loss, backend=backend)
    return trainer, {"image": RNG.uniform(size=(batch, 64)).astype(np.float32)}


# program: GAN
def gan(backend: str, hidden: int = 16, latent: int = 4, batch: int = 8) -> tuple[ml.Trainer, Any]:
    critic = Sequential(Linear(hidden), Relu(), Linear(1), name="critic")
    model = Model()
    model |= Sequential(Linear(hidden), Relu(), Linear(2), name="generator")(input="noise", output="fake")
    model |= critic(input="real", output="real_score")
    model |= critic(input="fake", output="fake_score")

    def critic_loss(real_score: Any, fake_score: Any) -> Any:
        return ops.mean(ops.softplus(-real_score)) + ops.mean(ops.softplus(fake_score))

    def generator_loss(fake_score: Any) -> Any:
        return ops.mean(ops.softplus(-fake_score))

    optimizers = {"critic*": ml.Adam(2e-3), "generator*": ml.Adam(1e-3)}
    losses = {"critic*": critic_loss, "generator*": generator_loss}
    trainer = ml.Trainer(model, optimizers, loss=losses, backend=backend)
    noise, real = RNG.normal(size=(batch, latent)), RNG.normal(2.0, 0.5, size=(batch, 2))
    return trainer, {"noise": noise.astype(np.float32), "real": real.astype(np.float32)}


# program: contrastive
def contrastive(backend: str, width: int = 4, batch: int = 6) -> tuple[ml.Trainer, Any]:
    encoder = Sequential(conv(width), Relu(), block(2 * width, 2), GlobalAvgPool2d(), Linear(16), name="encoder")
    model = Model.create(first=encoder(IOKey("one")), second=encoder(IOKey("two")))

    def loss(first: Any, second: Any) -> Any:
        a, b = ops.normalize(first, axis=-1), ops.normalize(second, axis=-1)
        scores = a @ ops.transpose(b) / 0.1
        labels = ops.iota(shape=(batch,))
        return 0.5 * (ops.cross_entropy(scores, labels) + ops.cross_entropy(ops.transpose(scores), labels))

    trainer = ml.Trainer(model, ml.Adam(1e-2), loss=loss, backend=backend)
    views = images(batch, 8)
    return trainer, {"one": views, "two": views + 0.1 * images(batch, 8)}


# program: LoRA
def lora(backend: str, features: int = 16, batch: int = 4, layers: int = 2, heads: int = 2) -> tuple[ml.Trainer, Any]:
    tokens = IOKey("tokens", dtype="int32")
    h = PositionalEmbedding(12)(Embedding(50, features)(tokens))
    h = TransformerEncoder(layers, features, heads, dropout=0.0, name="encoder")(h)
    model = Model.create(inputs=tokens, logits=Linear(3, name="head")(h.mean(axis=1)))
    model.replace("encoder.*.linear?", LoRA(rank=4, alpha=8))
    trained = [*adapter_patterns(model), "head.*"]
    trainer = ml.Trainer(model, ml.Adam(1e-2), loss="cross_entropy", trainable=trained, backend=backend)
    return trainer, (integers(50, batch, 12), integers(3, batch))


# programs end
PROGRAMS: dict[str, Callable[..., tuple[ml.Trainer, Any]]] = {
    "ResNet": resnet,
    "U-Net": unet,
    "ViT": vit,
    "GPT": gpt,
    "LSTM": lstm,
    "VAE": vae,
    "GAN": gan,
    "contrastive": contrastive,
    "LoRA": lora,
}


def main() -> None:
    for backend in sys.argv[1:] or ["numpy"]:
        for name, program in PROGRAMS.items():
            trainer, batch = program(backend)
            losses = [float(trainer.step(batch)["loss"]) for _ in range(20)]
            print(f"{backend:8} {name:12} loss {losses[0]:.3f} -> {losses[-1]:.3f}")
            if name == "GPT":
                print(" " * 9, "continued:", write(trainer, batch[0][:1, :4], 8)[0])


if __name__ == "__main__":
    main()
