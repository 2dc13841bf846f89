"""Small models, trained on meshes of devices: the largest difference to one device.

The files of an engine list its kinds of meshes, test them, and print the table of docs/many-devices.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from gpt import gpt
from small_models import block

import mithril as ml
from mithril.models import (
    GRU,
    LSTM,
    MLP,
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    Embedding,
    Flatten,
    IOKey,
    LayerNorm,
    Linear,
    MaxPool2d,
    MixtureOfExperts,
    Model,
    MultiHeadAttention,
    Relu,
    RMSNorm,
    Silu,
    Transpose,
)

ROWS = (8, 3)  # no mesh divides the second batch
Way = tuple[tuple[int, ...], dict[str, Any]]


def llama() -> Model:
    h = Embedding(32, 16, name="table")(IOKey("x", dtype="int32"))
    for k in range(2):
        attention = MultiHeadAttention(16, 4, kv_heads=2, causal=True, bias=False, rotary=True, name=f"attn{k}")
        h = h + attention(RMSNorm(16, name=f"norm{k}")(h))
        z = RMSNorm(16, name=f"norm_mlp{k}")(h)
        gate = Silu()(Linear(32, bias=False, name=f"gate{k}")(z))
        h = h + Linear(16, bias=False, name=f"down{k}")(gate * Linear(32, bias=False, name=f"up{k}")(z))
    return Model.create(outputs={"y": Linear(32, bias=False, name="head")(h)})


def encoder() -> Model:
    return Model.create(outputs={"y": block(16, 4, 32)(block(16, 4, 32)(IOKey("x")))})


def mixture() -> Model:
    x = IOKey("x")
    return Model.create(outputs={"y": x + MixtureOfExperts(4, 32, name="experts")(LayerNorm(16, name="norm")(x))})


def vision_transformer() -> Model:
    patches = Conv2d(16, kernel_size=4, stride=4, name="patches")(IOKey("x"))
    h = patches.reshape(patches.shape[0], 16, 4).transpose(0, 2, 1)
    return Model.create(outputs={"y": Linear(5, name="head")(Flatten()(block(16, 4, 32)(h)))})


def unet() -> Model:
    x = IOKey("x")
    inner = Relu()(BatchNorm2d(8, name="norm_in")(Conv2d(8, kernel_size=3, padding=1, name="down")(x)))
    low = Relu()(Conv2d(8, kernel_size=3, padding=1, name="low")(MaxPool2d(2)(inner)))
    up = ConvTranspose2d(8, kernel_size=2, stride=2, name="up")(low)
    return Model.create(outputs={"y": Conv2d(3, kernel_size=1, name="last")(inner + up)})


def residual_network() -> Model:
    h = Conv2d(8, kernel_size=3, padding=1, bias=False, name="stem")(IOKey("x"))
    branch = BatchNorm2d(8, name="norm")(Conv2d(8, kernel_size=3, padding=1, bias=False, name="conv")(Relu()(h)))
    return Model.create(outputs={"y": Linear(5, name="head")(Flatten()(MaxPool2d(4)(h + branch)))})


def recurrent(layer: Any) -> Model:
    hidden, *_ = layer(16, 16, name="cells")(IOKey("x"))
    return Model.create(outputs={"y": Linear(16, name="head")(hidden)})


def mixer() -> Model:
    x = IOKey("x")
    tokens = MLP([8, 16, 8], "gelu", name="tokens")(Transpose((0, 2, 1))(LayerNorm(16, name="norm")(x)))
    h = x + Transpose((0, 2, 1))(tokens)
    return Model.create(outputs={"y": h + MLP([16, 32, 16], "gelu", name="channels")(h)})


def perceptron(dropout: float = 0.0) -> Model:
    h = Dropout(dropout)(Relu()(Linear(32, name="up")(IOKey("x"))))
    return Model.create(outputs={"y": Linear(16, name="down")(h)})


def numbers(*shape: int) -> Callable[[np.random.Generator, int], dict[str, Any]]:
    return lambda r, rows: {n: r.standard_normal((rows, *shape), np.float32) for n in ("x", "target")}


def tokens(r: np.random.Generator, rows: int) -> dict[str, Any]:
    return dict(zip(("x", "target"), r.integers(0, 32, (2, rows, 8)).astype(np.int32), strict=True))


def images(r: np.random.Generator, rows: int) -> dict[str, Any]:
    x = r.standard_normal((rows, 3, 8, 8), np.float32)
    return {"x": x, "target": r.integers(0, 5, rows).astype(np.int32)}


pictures = numbers(3, 8, 8)


def gpt_batch(r: np.random.Generator, rows: int) -> dict[str, Any]:
    batch = tokens(r, rows)
    return {"input": batch["x"], "target": batch["target"]}


def low_rank() -> Model:
    model = encoder()
    model.replace("*.fc", ml.LoRA(rank=4))
    return model


def adversarial() -> Model:
    critic = Linear(1, name="critic")
    model = Model()
    model |= Linear(16, name="generator")(input="noise", output="fake")
    model |= critic(input="real", output="real_score")
    model |= critic(input="fake", output="fake_score")
    return model


def pairs(r: np.random.Generator, rows: int) -> dict[str, Any]:
    return {n: r.standard_normal((rows, 16), np.float32) for n in ("noise", "real")}


def critic_loss(real_score: Any, fake_score: Any) -> Any:
    return ml.ops.mean(ml.ops.softplus(-real_score)) + ml.ops.mean(ml.ops.softplus(fake_score))


def generator_loss(fake_score: Any) -> Any:
    return ml.ops.mean(ml.ops.softplus(-fake_score))


SQUARES, CLASSES = {"loss": "mse_loss"}, {"loss": "cross_entropy"}
HALF = {**SQUARES, "mixed_precision": {"dtype": "bfloat16"}}
ADAPTERS = {**SQUARES, "trainable": ["*lora_a", "*lora_b"]}
TWO_PLAYERS = {
    "loss": {"critic.*": critic_loss, "generator.*": generator_loss},
    "optimizer": {"critic.*": ml.SGD(0.2), "generator.*": ml.SGD(0.1, momentum=0.9)},
}
MODELS: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "Llama, grouped keys": (llama, tokens, CLASSES),
    "GPT, tied weights": (lambda: gpt(32, 8, layers=2, heads=4, features=16), gpt_batch, CLASSES),
    "encoder": (encoder, numbers(8, 16), SQUARES),
    "mixture of experts": (mixture, numbers(8, 16), SQUARES),
    "vision transformer": (vision_transformer, images, CLASSES),
    "U-Net, batch norm": (unet, pictures, SQUARES),
    "residual network": (residual_network, images, CLASSES),
    "LSTM": (lambda: recurrent(LSTM), numbers(8, 16), SQUARES),
    "GRU": (lambda: recurrent(GRU), numbers(8, 16), SQUARES),
    "MLP mixer": (mixer, numbers(8, 16), SQUARES),
    "perceptron, dropout": (lambda: perceptron(0.3), numbers(16), SQUARES),
    "encoder, bfloat16": (encoder, numbers(8, 16), HALF),
    "encoder, LoRA": (low_rank, numbers(8, 16), ADAPTERS),
    "GAN, two optimizers": (adversarial, pairs, TWO_PLAYERS),
}


def trained(model: str, backend: Any, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """Return the losses and the arrays of the engine after one step for each batch."""
    make, batch, recipe = MODELS[model]
    settings = {"optimizer": ml.SGD(0.1), "progress": False, "seed": 0, **recipe, **options}
    training = ml.Trainer(make(), backend=backend, **settings)
    losses = [float(training.step(batch(np.random.default_rng(k), n))["loss"]) for k, n in enumerate(ROWS)]
    return losses, {n: x.astype(np.float32) for n, x in training.engine.to_numpy().items()}


@cache
def on_one_device(model: str, backend: Callable[..., Any]) -> tuple[list[float], dict[str, Any]]:
    return trained(model, backend())


def difference(model: str, backend: Callable[..., Any], way: Way) -> float:
    """Return the largest difference to one device, of losses and of arrays relative to their largest element."""
    mesh, options = way
    (losses, arrays), (expected, right) = (
        trained(model, backend(device_mesh=mesh), **options),
        on_one_device(model, backend),
    )
    changes = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    changes += [float(np.abs(arrays[n] - x).max() / max(np.abs(x).max(), 0.1)) for n, x in right.items()]
    return max(changes)


def applies(model: str, way: str) -> bool:
    """Whether a way divides a model: only mixtures have experts, and images have no axis of positions."""
    return (way != "expert" or "experts" in model) and (way != "context" or MODELS[model][1] not in (images, pictures))


def combinations(ways: Mapping[str, Way]) -> list[tuple[str, str]]:
    """Return the models and the ways in which each can be trained."""
    return [(model, way) for model, way in product(MODELS, ways) if applies(model, way)]


def of_today(pairs: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the combination that is tested today; days in sequence test different models."""
    return pairs[datetime.now(UTC).toordinal() * 31 % len(pairs)]


def limit(model: str) -> float:
    """Return the difference from which a combination counts as wrong."""
    return 2e-2 if "bfloat16" in model else 1e-4


def print_table(backend: Callable[..., Any], ways: Mapping[str, Way], models: Sequence[str]) -> None:
    """Print the differences; ``models`` are all if there is none."""
    print("| |", " | ".join(ways), "|\n|---|" + "---|" * len(ways))
    for model in models or MODELS:
        changes = [difference(model, backend, ways[way]) if applies(model, way) else None for way in ways]
        print(
            "|",
            model,
            "|",
            " | ".join("–" if x is None else f"{x:.0e}" if x else "0" for x in changes),
            "|",
            flush=True,
        )
