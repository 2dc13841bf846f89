"""The nine programs of ``examples/standard_programs.py`` in Keras 3, for ``bench_programs.py``: returns steps.

Images are [batch, height, width, channels], the layout of Keras. Steps are ``train_on_batch`` of compiled models; the
GAN overrides ``train_step``, which is written for one backend of Keras: here PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, ops

Step = Callable[[], float]


# program: step
def stepper(model: Any, optimizer: Any, loss: Any, x: Any, y: Any) -> Step:
    model.compile(optimizer, loss)
    return lambda: float(model.train_on_batch(x, y))


def labels_loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# program: ResNet
def conv(x: Any, channels: int, stride: int = 1) -> Any:
    return layers.BatchNormalization()(layers.Conv2D(channels, 3, stride, "same", use_bias=False)(x))


def block(x: Any, channels: int, stride: int) -> Any:
    h = conv(layers.ReLU()(conv(x, channels, stride)), channels)
    shortcut = layers.BatchNormalization()(layers.Conv2D(channels, 1, stride, use_bias=False)(x))
    return layers.ReLU()(h + shortcut)


def resnet(images: Any, labels: Any, width: int = 8) -> Step:
    x = keras.Input(images.shape[1:])
    h = layers.ReLU()(conv(x, width))
    for k in range(3):
        h = block(h, width * 2**k, 1 if k == 0 else 2)
    model = keras.Model(x, layers.Dense(10)(layers.GlobalAveragePooling2D()(h)))
    return stepper(model, keras.optimizers.SGD(0.1, momentum=0.9), labels_loss(), images, labels)


# program: U-Net
def double(x: Any, channels: int) -> Any:
    return layers.ReLU()(conv(layers.ReLU()(conv(x, channels)), channels))


def unet(images: Any, mask: Any, width: int = 4, depth: int = 2) -> Step:
    h = x = keras.Input(images.shape[1:])
    skips = []
    for k in range(depth):
        skips.append(double(h, width * 2**k))
        h = layers.MaxPooling2D(2)(skips[-1])
    h = double(h, width * 2**depth)
    for k in reversed(range(depth)):
        up = layers.Conv2DTranspose(width * 2**k, 2, 2)(h)
        h = double(layers.Concatenate()([skips[k], up]), width * 2**k)
    model = keras.Model(x, layers.Conv2D(2, 1)(h))
    return stepper(model, keras.optimizers.Adam(1e-2), labels_loss(), images, mask)


# program: ViT
class Positions(layers.Layer):
    def __init__(self, token: bool = False) -> None:
        super().__init__()
        self.token = token

    def build(self, shape: Any) -> None:
        if self.token:
            self.first = self.add_weight(shape=(1, 1, shape[2]), initializer="zeros")
        self.table = self.add_weight(shape=(shape[1] + self.token, shape[2]), initializer="random_normal")

    def call(self, x: Any) -> Any:
        if self.token:
            x = ops.concatenate([ops.broadcast_to(self.first, (ops.shape(x)[0], 1, x.shape[2])), x], axis=1)
        return x + self.table


def encoder_layer(x: Any, heads: int, activation: str, norm_first: bool) -> Any:
    features = x.shape[-1]
    attention, norms = layers.MultiHeadAttention(heads, features // heads), [layers.LayerNormalization() for _ in "ab"]
    mlp = keras.Sequential([layers.Dense(4 * features, activation), layers.Dense(features)])
    if norm_first:
        h = norms[0](x)
        x = x + attention(h, h)
        return x + mlp(norms[1](x))
    x = norms[0](x + attention(x, x))
    return norms[1](x + mlp(x))


def vit(images: Any, labels: Any, features: int = 16, layers_: int = 2, heads: int = 2) -> Step:
    x = keras.Input(images.shape[1:])
    h = Positions(token=True)(layers.Reshape((16, features))(layers.Conv2D(features, 4, 4)(x)))
    for _ in range(layers_):
        h = encoder_layer(h, heads, "gelu", norm_first=True)
    model = keras.Model(x, layers.Dense(10)(layers.LayerNormalization()(h)[:, 0]))
    return stepper(model, keras.optimizers.AdamW(3e-3, global_clipnorm=1.0), labels_loss(), images, labels)


# program: GPT
class Attention(layers.Layer):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, features // heads
        self.qkv, self.out = layers.Dense(3 * features), layers.Dense(features)
        self.cache: Any = None

    def call(self, x: Any, cached: bool = False) -> Any:
        batch, length = ops.shape(x)[0], x.shape[1]
        qkv = ops.reshape(self.qkv(x), (batch, length, 3, self.heads, self.size))
        q, k, v = (qkv[:, :, i] for i in range(3))
        is_prefix = self.cache is None
        if cached:
            if self.cache is not None:
                k, v = ops.concatenate([self.cache[0], k], 1), ops.concatenate([self.cache[1], v], 1)
            self.cache = k, v
        y = ops.dot_product_attention(q, k, v, is_causal=is_prefix)
        return self.out(ops.reshape(y, (batch, length, self.heads * self.size)))


class GPT(keras.Model):
    def __init__(self, vocabulary: int, length: int, features: int, count: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = layers.Embedding(vocabulary, features), layers.Embedding(length, features)
        self.attentions = [Attention(features, heads) for _ in range(count)]
        self.norms = [layers.LayerNormalization() for _ in range(count)]
        self.mlps = [
            keras.Sequential([layers.LayerNormalization(), layers.Dense(4 * features, "gelu"), layers.Dense(features)])
            for _ in range(count)
        ]
        self.norm, self.head = layers.LayerNormalization(), layers.Dense(vocabulary)

    def call(self, tokens: Any, position: int = 0, cached: bool = False) -> Any:
        x = self.tokens(tokens) + self.positions(ops.arange(position, position + tokens.shape[1]))
        for attention, norm, mlp in zip(self.attentions, self.norms, self.mlps, strict=True):
            x = x + attention(norm(x), cached=cached)
            x = x + mlp(x)
        return self.head(self.norm(x))

    def write(self, prompt: Any, count: int) -> Any:
        text = new = prompt
        while text.shape[1] < prompt.shape[1] + count:
            new = ops.argmax(self(new, position=text.shape[1] - new.shape[1], cached=True)[:, -1:], axis=-1)
            text = ops.concatenate([text, ops.cast(new, text.dtype)], axis=1)
        for attention in self.attentions:
            attention.cache = None
        return text


def gpt(tokens: Any, following: Any, features: int = 16, layers_: int = 2, heads: int = 2) -> Step:
    model = GPT(50, tokens.shape[1], features, layers_, heads)
    return stepper(model, keras.optimizers.AdamW(3e-3, global_clipnorm=1.0), labels_loss(), tokens, following)


# program: LSTM
def lstm(tokens: Any, following: Any, features: int = 16) -> Step:
    recurrent = [layers.LSTM(features, return_sequences=True) for _ in range(2)]
    model = keras.Sequential([layers.Embedding(50, features), *recurrent, layers.Dense(50)])
    return stepper(model, keras.optimizers.Adam(1e-2, global_clipnorm=1.0), labels_loss(), tokens, following)


# program: VAE
class VAE(keras.Model):
    def __init__(self, hidden: int, latent: int) -> None:
        super().__init__()
        self.encoder = layers.Dense(hidden, "relu")
        self.mean, self.log_variance = layers.Dense(latent), layers.Dense(latent)
        self.decoder = keras.Sequential([layers.Dense(hidden, "relu"), layers.Dense(64, "sigmoid")])
        self.seed = keras.random.SeedGenerator(0)

    def call(self, x: Any, training: bool = False) -> Any:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        divergence = ops.exp(log_variance) + mean * mean - 1.0 - log_variance
        self.add_loss(0.5 * ops.mean(ops.sum(divergence, axis=-1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seed) if training else 0.0
        return self.decoder(mean + ops.exp(log_variance * 0.5) * noise)


def vae(images: Any, hidden: int = 32, latent: int = 4) -> Step:
    def loss(x: Any, again: Any) -> Any:
        return ops.mean(ops.binary_crossentropy(x, again)) * 64.0

    return stepper(VAE(hidden, latent), keras.optimizers.Adam(3e-3), loss, images, images)


# program: GAN
class GAN(keras.Model):
    def __init__(self, hidden: int, latent: int) -> None:
        super().__init__()
        self.critic = keras.Sequential([keras.Input((2,)), layers.Dense(hidden, "relu"), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((latent,)), layers.Dense(hidden, "relu"), layers.Dense(2)])
        self.critic_optimizer, self.generator_optimizer = keras.optimizers.Adam(2e-3), keras.optimizers.Adam(1e-3)
        self.built = True

    def update(self, part: Any, optimizer: Any, loss: Any) -> None:
        self.zero_grad()
        loss.backward()
        variables = part.trainable_weights
        gradients = [v.value.grad for v in variables]
        import torch

        with torch.no_grad():
            optimizer.apply(gradients, variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        noise, real = data[0], data[1]
        fake = ops.stop_gradient(self.generator(noise))
        critic_loss = ops.mean(ops.softplus(-self.critic(real))) + ops.mean(ops.softplus(self.critic(fake)))
        self.update(self.critic, self.critic_optimizer, critic_loss)
        generator_loss = ops.mean(ops.softplus(-self.critic(self.generator(noise))))
        self.update(self.generator, self.generator_optimizer, generator_loss)
        return {"loss": critic_loss + generator_loss}


def gan(noise: Any, real: Any, hidden: int = 16) -> Step:
    model = GAN(hidden, noise.shape[1])
    model.compile()
    return lambda: float(model.train_on_batch(noise, real, return_dict=True)["loss"])


# program: contrastive
class Pairs(keras.Model):
    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def call(self, pair: Any) -> Any:
        a, b = (ops.normalize(self.encoder(x)) for x in pair)
        return ops.matmul(a, ops.transpose(b)) / 0.1


def contrastive(one: Any, two: Any, width: int = 4) -> Step:
    x = keras.Input(one.shape[1:])
    h = block(layers.ReLU()(conv(x, width)), 2 * width, 2)
    model = Pairs(keras.Model(x, layers.Dense(16)(layers.GlobalAveragePooling2D()(h))))

    def loss(labels: Any, scores: Any) -> Any:
        labels, classify = ops.arange(len(one)), keras.losses.sparse_categorical_crossentropy
        losses = [classify(labels, s, from_logits=True) for s in (scores, ops.transpose(scores))]
        return 0.5 * (losses[0] + losses[1])

    return stepper(model, keras.optimizers.Adam(1e-2), loss, (one, two), ops.arange(len(one)))


# program: LoRA
def lora(tokens: Any, labels: Any, features: int = 16, layers_: int = 2, heads: int = 2) -> Step:
    x = keras.Input(tokens.shape[1:])
    h = Positions()(layers.Embedding(50, features)(x))
    for _ in range(layers_):
        h = encoder_layer(h, heads, "relu", norm_first=False)
    body = keras.Model(x, h)
    body.trainable = False
    for layer in body.layers:
        if isinstance(layer, keras.Sequential):
            layer.trainable = True
            for dense in layer.layers:
                dense.enable_lora(4, lora_alpha=8)
                dense.bias.trainable = False
    model = keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(body(x))))
    return stepper(model, keras.optimizers.Adam(1e-2), labels_loss(), tokens, labels)


# programs end
PROGRAMS = {
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
