"""Time of imported transformers over that of the same network in layers of mithril, by engine and importer.

``python benchmarks/bench_imported.py [ENGINE...]``: an encoder (layer norms, GELU) and a decoder (RMS norms, rotary
positions, grouped keys, gated MLP), written as users write them in PyTorch and JAX, imported by ``from_torch``,
``from_onnx`` (the TorchScript exporter) and ``from_jax``. CPU time, interleaved; the node counts of the program follow.
"""

from __future__ import annotations

import io
import math
import warnings
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import mithril as ml
from mithril.models import Embedding, Layer, Linear, MultiHeadAttention, RMSNorm, Sequential, TransformerEncoderLayer

WIDTH, HEADS, KEYS, INNER, DEPTH, WORDS, LENGTH = 256, 8, 2, 688, 4, 512, 64


class Attention(nn.Module):
    """Attention as Hugging Face's eager code writes it."""

    def __init__(self, keys: int, rotary: bool) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.keys, self.rotary, self.size = keys, rotary, size
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=not rotary), nn.Linear(WIDTH, WIDTH, bias=not rotary)
        self.k, self.v = (nn.Linear(WIDTH, keys * size, bias=not rotary) for _ in range(2))

    def forward(self, x: Any, cos: Any, sin: Any, mask: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.size).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.rotary:
            q, k = (t * cos + _rotated(t) * sin for t in (q, k))
            k, v = (
                t[:, :, None].expand(batch, self.keys, HEADS // self.keys, length, self.size).reshape(q.shape)
                for t in (k, v)
            )
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.size) + mask
        y = torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2).reshape(batch, length, -1)
        return self.o(y)


def _rotated(x: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.attention = Attention(KEYS if decoder else HEADS, decoder)
        self.norm1, self.norm2 = (Norm() if decoder else nn.LayerNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=not decoder), nn.Linear(INNER, WIDTH, bias=not decoder)
        self.gate = nn.Linear(WIDTH, INNER, bias=False) if decoder else None

    def forward(self, x: Any, *rest: Any) -> Any:
        x = x + self.attention(self.norm1(x), *rest)
        h = self.norm2(x)
        h = nn.functional.silu(self.gate(h)) * self.up(h) if self.gate else nn.functional.gelu(self.up(h))
        return x + self.down(h)


class Network(nn.Module):
    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.embedding, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block(decoder) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Any) -> Any:
        length, size = tokens.shape[1], WIDTH // HEADS
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.cat((angles, angles), -1)[None, None]
        mask = torch.zeros(length, length)
        if self.decoder:
            mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), mask)
        return self.head(x)


def in_jax(decoder: bool) -> Any:
    """Return the network as a function of JAX, with parameters under the names of the module."""
    size = WIDTH // HEADS

    def linear(p: Any, name: str, x: Any) -> Any:
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def norm(p: Any, name: str, x: Any) -> Any:
        if decoder:
            return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p[f"{name}.weight"]
        mean = jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def rotated(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate((-b, a), -1)

    def network(p: Any, tokens: Any) -> Any:
        batch, length = tokens.shape
        angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, size, 2) / size)
        angles = jnp.concatenate((angles, angles), -1)
        x = p["embedding.weight"][tokens]
        for k in range(DEPTH):
            block, h = f"blocks.{k}.", norm(p, f"blocks.{k}.norm1", x)
            q, key, v = (
                linear(p, f"{block}attention.{n}", h).reshape(batch, length, -1, size).transpose(0, 2, 1, 3)
                for n in "qkv"
            )
            if decoder:
                q, key = (t * jnp.cos(angles) + rotated(t) * jnp.sin(angles) for t in (q, key))
                key, v = (jnp.repeat(t, HEADS // KEYS, axis=1) for t in (key, v))
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, key) / math.sqrt(size)
            if decoder:
                scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
            y = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v).transpose(0, 2, 1, 3)
            x = x + linear(p, f"{block}attention.o", y.reshape(batch, length, -1))
            h = norm(p, f"{block}norm2", x)
            up = linear(p, f"{block}up", h)
            up = jax.nn.silu(linear(p, f"{block}gate", h)) * up if decoder else jax.nn.gelu(up, approximate=False)
            x = x + linear(p, f"{block}down", up)
        return linear(p, "head", x)

    return network


class DecoderBlock(Layer):
    """A block of the decoder in layers of mithril."""

    def __init__(self) -> None:
        self.attention = MultiHeadAttention(WIDTH, HEADS, kv_heads=KEYS, causal=True, rotary=True, bias=False)
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.gate, self.up = (Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = Linear(INNER, WIDTH, bias=False)

    def build(self, x: Any) -> Any:
        h = self.norm1(x)
        x = x + self.attention(h, h, h)
        h = self.norm2(x)
        return x + self.down(ml.ops.silu(self.gate(h)) * self.up(h))


def own(decoder: bool) -> Layer:
    """Return the network in layers of mithril."""
    encoder: dict[str, Any] = {"feedforward": INNER, "dropout": 0.0, "activation": "gelu", "norm_first": True}
    blocks = [DecoderBlock() if decoder else TransformerEncoderLayer(WIDTH, HEADS, **encoder) for _ in range(DEPTH)]
    return Sequential(Embedding(WORDS, WIDTH), *blocks, Linear(WIDTH, WORDS, bias=False))


def models(decoder: bool, tokens: torch.Tensor) -> dict[str, Any]:
    """Return the network in layers of mithril, and imported."""
    module, file = Network(decoder).eval(), io.BytesIO()
    torch.onnx.export(module, (tokens,), file, dynamo=False, input_names=["tokens"])
    params = {name: p.detach().numpy() for name, p in module.named_parameters()}
    return {
        "own": own(decoder),
        "from_torch": ml.from_torch(module, tokens, training=False),
        "from_onnx": ml.from_onnx(file.getvalue()),
        "from_jax": ml.from_jax(in_jax(decoder), tokens.numpy(), params=params),
    }


def compiled(model: Any, engine: str, tokens: Any) -> tuple[Any, Counter[str]]:
    """Return a call of the compiled model, and the operations of its program."""
    program = ml.compile(model, engine, shapes={model.inputs[0]: tokens.shape}, inference=True)
    inputs = {model.inputs[0]: tokens}
    program = program.bind(program.randomize_params(0))

    def call() -> None:
        for value in program(inputs).values():
            np.asarray(value)  # JAX returns before it has computed

    call()
    return call, Counter(n.op.name for n in program.programs[-1].graph.nodes if not n.is_constant)


def main() -> None:
    import harness  # here, because a test imports this file, whose threads the harness would choose

    warnings.simplefilter("ignore")
    engines = harness.arguments(__doc__, "ENGINE").words or ["numpy", "c", "torch", "jax"]
    torch.manual_seed(0)
    tokens = torch.randint(0, WORDS, (1, LENGTH))
    for decoder in (False, True):
        networks = models(decoder, tokens)
        for engine in engines:
            calls = {name: compiled(model, engine, tokens.numpy()) for name, model in networks.items()}
            best = harness.interleaved({n: call for n, (call, _) in calls.items()}, 3.0)
            ratios = "  ".join(f"{n} {best[n] / best['own']:.2f}" for n in calls)
            print(f"{'decoder' if decoder else 'encoder'} on {engine}: own {best['own'] * 1e3:.2f} ms; {ratios}")
            for name, (_, counts) in calls.items():
                print(f"  {name:<11} {sum(counts.values()):>4} nodes: {dict(counts.most_common())}")


if __name__ == "__main__":
    main()
