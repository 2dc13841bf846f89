"""The models that benchmarks share: in mithril, and typed by hand for any framework.

A framework supplies its functions, as ``hand_jax.py``; the rest is idiomatic code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import harness  # noqa: F401  (adds the folder of examples)
import numpy as np
from resnet18 import resnet18

import mithril as ml
from mithril.models import (
    Conv2d,
    IOKey,
    LayerNorm,
    Linear,
    Model,
    MultiHeadAttention,
    Relu,
    TransformerEncoder,
    TransformerEncoderLayer,
)  # fmt: skip

RNG = np.random.default_rng(0)
Params = Mapping[str, Any]
Array = np.ndarray[Any, Any]


def random(*shape: int, scale: float = 1.0) -> Array:
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def of_operations(
    function: Callable[..., Any], *arrays: Array, backend: Any = "c", **options: Any
) -> tuple[Any, dict[str, Array]]:
    """Compile a function of operations for these operands, and return the program and its inputs."""
    inputs = {f"x{k}": a for k, a in enumerate(arrays)}
    keys = [IOKey(n) for n in inputs]
    model = Model.create(inputs=keys, outputs={"output": function(*keys)})
    shapes, types = {n: list(a.shape) for n, a in inputs.items()}, {n: a.dtype.name for n, a in inputs.items()}
    return ml.compile(model, backend, shapes=shapes, types=types, inference=True, **options), inputs


def perceptron(*widths: int) -> Model:
    """Return linear layers ``l0``, ``l1``, ... of these widths, with ReLU between them."""
    model = Model()
    for k, size in enumerate(widths):
        model += Linear(size, name=f"l{k}")
        if k + 1 < len(widths):
            model += Relu()
    return model


@dataclass
class Case:
    """A model, the shape of its input, and the same function by hand of a framework, parameters and the input."""

    model: Model
    shape: tuple[int, ...]
    by_hand: Callable[[Any, Params, Any], Any]


def mlp(batch: int) -> Case:
    def by_hand(f: Any, p: Params, x: Any) -> Any:
        for k in range(2):
            x = f.relu(f.linear(x, p[f"l{k}.weight"], p[f"l{k}.bias"]))
        return f.linear(x, p["l2.weight"], p["l2.bias"])

    return Case(perceptron(512, 512, 10), (batch, 784), by_hand)


def _attention(f: Any, p: Params, name: str, x: Any, heads: int, causal: bool) -> Any:
    b, n, d = x.shape

    def projected(part: str) -> Any:
        y = f.linear(x, p[f"{name}.{part}.weight"], p[f"{name}.{part}.bias"])
        return f.transpose(y.reshape(b, n, heads, d // heads), (0, 2, 1, 3))

    y = f.attention(projected("query"), projected("key"), projected("value"), causal)
    y = f.transpose(y, (0, 2, 1, 3)).reshape(b, n, d)
    return f.linear(y, p[f"{name}.output.weight"], p[f"{name}.output.bias"])


def _norm(f: Any, p: Params, name: str, x: Any) -> Any:
    return f.layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"])


def encoder(layers: int, features: int, heads: int, batch: int, length: int) -> Case:
    model = Model()
    model |= TransformerEncoder(layers, features, heads, dropout=0.0, activation="gelu", name="e")(
        input="input", output="output"
    )

    def by_hand(f: Any, p: Params, x: Any) -> Any:
        for k in range(layers):
            prefix = f"e.layers.{k}"
            x = _norm(f, p, f"{prefix}.norm1", x + _attention(f, p, f"{prefix}.self_attn", x, heads, False))
            h = f.gelu(f.linear(x, p[f"{prefix}.linear1.weight"], p[f"{prefix}.linear1.bias"]))
            y = x + f.linear(h, p[f"{prefix}.linear2.weight"], p[f"{prefix}.linear2.bias"])
            x = _norm(f, p, f"{prefix}.norm2", y)
        return x

    return Case(model, (batch, length, features), by_hand)


def gpt_block(features: int, heads: int, batch: int, length: int) -> Case:
    model = Model()
    settings = {"dropout": 0.0, "activation": "gelu", "norm_first": True, "causal": True}
    model |= TransformerEncoderLayer(features, heads, **settings, name="b")(input="input", output="output")

    def by_hand(f: Any, p: Params, x: Any) -> Any:
        x = x + _attention(f, p, "b.self_attn", _norm(f, p, "b.norm1", x), heads, True)
        h = f.gelu(f.linear(_norm(f, p, "b.norm2", x), p["b.linear1.weight"], p["b.linear1.bias"]))
        return x + f.linear(h, p["b.linear2.weight"], p["b.linear2.bias"])

    return Case(model, (batch, length, features), by_hand)


def resnet(batch: int, size: int = 64) -> Case:
    """ResNet-18 on square images, batch norms by running statistics; by hand with channels where the framework says."""

    def norm(f: Any, p: Params, name: str, x: Any) -> Any:
        return f.batch_norm(x, *(p[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")))

    def block(f: Any, p: Params, prefix: str, x: Any, stride: int) -> Any:
        h = f.relu(norm(f, p, f"{prefix}.bn1", f.conv(x, p[f"{prefix}.conv1.weight"], stride, 1)))
        h = norm(f, p, f"{prefix}.bn2", f.conv(h, p[f"{prefix}.conv2.weight"], 1, 1))
        if f"{prefix}.downsample.0.weight" in p:
            x = norm(f, p, f"{prefix}.downsample.1", f.conv(x, p[f"{prefix}.downsample.0.weight"], stride, 0))
        return f.relu(h + x)

    def by_hand(f: Any, p: Params, x: Any) -> Any:
        x = f.relu(norm(f, p, "bn1", f.conv(x, p["conv1.weight"], 2, 3)))
        x = f.max_pool(x)
        for stage in range(1, 5):
            for k in range(2):
                x = block(f, p, f"layer{stage}.{k}", x, 2 if stage > 1 and k == 0 else 1)
        return f.linear(x.mean(getattr(f, "image_axes", (2, 3))), p["fc.weight"], p["fc.bias"])

    return Case(resnet18(), (batch, 3, size, size), by_hand)


def layer_norm() -> Case:
    return Case(Model(LayerNorm(name="n")), (256, 512), lambda f, p, x: _norm(f, p, "n", x))


def attention() -> Case:
    model = Model()
    model |= MultiHeadAttention(128, heads=4, name="a")(query="input", output="output")
    return Case(model, (4, 64, 128), lambda f, p, x: _attention(f, p, "a", x, 4, causal=False))


def convolution() -> Case:
    def by_hand(f: Any, p: Params, x: Any) -> Any:
        y = f.conv(x, p["c.weight"], 1, 1)
        y += p["c.bias"][:, None, None]
        return y

    return Case(Model(Conv2d(64, kernel_size=3, padding=1, name="c")), (4, 32, 28, 28), by_hand)


CASES: dict[str, Callable[[], Case]] = {
    "MLP 784-512-512-10, batch 1": lambda: mlp(1),
    "MLP, batch 32": lambda: mlp(32),
    "MLP, batch 256": lambda: mlp(256),
    "encoder layer 384, 12 heads, 128": lambda: encoder(1, 384, 12, 1, 128),
    "encoder, 6 layers": lambda: encoder(6, 384, 12, 1, 128),
    "GPT block 256, 8 heads, 4x64": lambda: gpt_block(256, 8, 4, 64),
    "ResNet-18, 1 x 64x64": lambda: resnet(1),
    "ResNet-18, 8 x 64x64": lambda: resnet(8),
}
# NumPy has no error function for the GELU of transformers.
NUMPY_CASES: dict[str, Callable[[], Case]] = {
    **{name: case for name, case in CASES.items() if name.startswith(("MLP", "ResNet"))},
    "layer norm 256x512": layer_norm,
    "attention 4x64x128, 4 heads": attention,
    "convolution 32->64, 3x3, 28x28": convolution,
}
