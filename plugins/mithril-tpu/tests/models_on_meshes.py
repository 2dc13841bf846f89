"""Twelve small models, trained on every kind of mesh of JAX: the largest difference to one device.

``python plugins/mithril-tpu/tests/models_on_meshes.py`` prints the table of docs/many-devices.md; with names of models
only their rows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.update(JAX_NUM_CPU_DEVICES="4", JAX_PLATFORMS="cpu", NPROC="16")
    root = Path(__file__).parents[3]
    sys.path[:0] = [str(root / "examples"), str(root / "plugins" / "mithril-parallel" / "tests")]

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
WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "data": ((4,), {}),
    "model": ((2, 2), {}),
    "fsdp": ((4,), {"parallelism": "fsdp"}),
    "hsdp": ((2, 2), {"parallelism": "hsdp"}),
    "sequence": ((2, 2), {"parallelism": "sequence"}),
    "context": ((2, 2), {"parallelism": "context"}),
    "pipeline": ((1, 1, 2), {}),
}


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


def gpt_batch(r: np.random.Generator, rows: int) -> dict[str, Any]:
    batch = tokens(r, rows)
    return {"input": batch["x"], "target": batch["target"]}


HALF = {"mixed_precision": {"dtype": "bfloat16"}}
MODELS: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "Llama, grouped keys": (llama, tokens, {}),
    "GPT, tied weights": (lambda: gpt(32, 8, layers=2, heads=4, features=16), gpt_batch, {}),
    "encoder": (encoder, numbers(8, 16), {}),
    "mixture of experts": (mixture, numbers(8, 16), {}),
    "vision transformer": (vision_transformer, images, {}),
    "U-Net, batch norm": (unet, numbers(3, 8, 8), {}),
    "residual network": (residual_network, images, {}),
    "LSTM": (lambda: recurrent(LSTM), numbers(8, 16), {}),
    "GRU": (lambda: recurrent(GRU), numbers(8, 16), {}),
    "MLP mixer": (mixer, numbers(8, 16), {}),
    "perceptron, dropout": (lambda: perceptron(0.3), numbers(16), {}),
    "encoder, bfloat16": (encoder, numbers(8, 16), HALF),
}


def trained(model: str, mesh: tuple[int, ...] | None, options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Return the losses and the parameters after one step for each batch."""
    make, batch, recipe = MODELS[model]
    loss = "mse_loss" if batch(np.random.default_rng(0), 1)["target"].dtype == np.float32 else "cross_entropy"
    backend = ml.JaxBackend(device_mesh=mesh)
    training = ml.Trainer(make(), ml.SGD(0.1), loss=loss, backend=backend, progress=False, seed=0, **recipe, **options)
    losses = [float(training.step(batch(np.random.default_rng(k), n))["loss"]) for k, n in enumerate(ROWS)]
    arrays = training.engine.to_numpy()
    return losses, {n: arrays[n].astype(np.float32) for n in training.engine.trained}


@cache
def on_one_device(model: str) -> tuple[list[float], dict[str, Any]]:
    return trained(model, None, {})


def difference(model: str, way: str) -> float:
    """Return the largest difference to one device, of losses and of parameters relative to their largest element."""
    (losses, params), (expected, right) = trained(model, *WAYS[way]), on_one_device(model)
    changes = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    changes += [float(np.abs(params[n] - x).max() / max(np.abs(x).max(), 0.1)) for n, x in right.items()]
    return max(changes)


def main() -> None:
    print("| |", " | ".join(WAYS), "|\n|---|" + "---|" * len(WAYS))
    for model in sys.argv[1:] or MODELS:
        changes = [difference(model, way) for way in WAYS]
        print("|", model, "|", " | ".join(f"{x:.0e}" if x else "0" for x in changes), "|", flush=True)


if __name__ == "__main__":
    main()
