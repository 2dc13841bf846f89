"""Training steps with Adam against hand-written steps of the same framework; the loader against torch's.

``python benchmarks/bench_train.py [mlp] [gpt] [loader]``: interleaved CPU time per step, and ratios.
The hand-written steps do what their users type: jax.jit with optax and donated buffers, torch's autograd with
torch.optim, mlx.nn.value_and_grad with mlx.optimizers, NumPy with ``out=``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import itertools

import harness
import numpy as np
from gpt import gpt

import mithril as ml
from mithril.models import MLP

SIZES, BATCH = (784, 512, 512, 10), 128
GPT = {"vocabulary": 96, "length": 64, "layers": 4, "heads": 4, "features": 128}
GPT_BATCH, RATE = 8, 1e-3
DRAW = np.random.default_rng(0)
Step = Callable[[], Any]


# -- ours ------------------------------------------------------------------------------------------------------------
def ours(model: Any, batch: dict[str, Any], loss: Any, backend: str, **options: Any) -> tuple[Step, Any]:
    trainer = ml.Trainer(model, ml.Adam(RATE), loss=loss, backend=backend, **options)
    arrays = {n: trainer.engine.backend.array(x) for n, x in batch.items()}
    trainer.begin(arrays)

    def step() -> None:
        report = trainer.step(arrays)
        trainer.engine.backend.synchronize(report.values_on_device["loss"])

    return step, trainer


# -- multilayer perceptron -------------------------------------------------------------------------------------------
def mlp_batch() -> dict[str, Any]:
    x = DRAW.normal(size=(BATCH, SIZES[0])).astype(np.float32)
    return {"input": x, "target": DRAW.integers(0, SIZES[-1], BATCH).astype(np.int32)}


def mlp_weights() -> list[Any]:
    pairs = list(itertools.pairwise(SIZES))
    return [
        w for a, b in pairs for w in (DRAW.normal(size=(b, a)).astype(np.float32) / a**0.5, np.zeros(b, np.float32))
    ]


def mlp_jax(batch: dict[str, Any]) -> Step:
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adam(RATE)

    def loss(params: Any, x: Any, y: Any) -> Any:
        for k in range(0, len(params), 2):
            x = x @ params[k].T + params[k + 1]
            x = jax.nn.relu(x) if k + 2 < len(params) else x
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    def update(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    run = jax.jit(update, donate_argnums=(0, 1))
    carried: dict[str, Any] = {"p": [jnp.asarray(w) for w in mlp_weights()]}
    carried["s"] = optimizer.init(carried["p"])
    x, y = jnp.asarray(batch["input"]), jnp.asarray(batch["target"])

    def step() -> None:
        carried["p"], carried["s"], value = run(carried["p"], carried["s"], x, y)
        value.block_until_ready()

    return step


def mlp_torch(batch: dict[str, Any], compiled: bool = False) -> Step:
    from torch import nn

    layers: list[Any] = []
    for a, b in itertools.pairwise(SIZES):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return torch_step(nn.Sequential(*layers[:-1]), batch["input"], batch["target"], compiled)


def torch_step(model: Any, x: Any, y: Any, compiled: bool) -> Step:
    import torch

    torch.set_num_threads(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    x, y = torch.from_numpy(x), torch.from_numpy(y).long()
    run = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        out = run(x)
        loss = torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        optimizer.step()

    return step


def mlp_mlx(batch: dict[str, Any], compiled: bool = False) -> Step:
    from mlx import nn

    layers: list[Any] = []
    for a, b in itertools.pairwise(SIZES):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return mlx_step(nn.Sequential(*layers[:-1]), batch, compiled)


def mlx_step(model: Any, batch: dict[str, Any], compiled: bool) -> Step:
    import mlx.core as mx
    from mlx import nn, optimizers

    optimizer = optimizers.Adam(RATE, bias_correction=True)
    x, y = mx.array(batch["input"]), mx.array(batch["target"])
    graded = nn.value_and_grad(model, lambda x, y: nn.losses.cross_entropy(model(x), y, reduction="mean"))
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def update(x: Any, y: Any) -> Any:
        value, gradients = graded(x, y)
        optimizer.update(model, gradients)
        return value

    run = mx.compile(update, inputs=state, outputs=state) if compiled else update

    def step() -> None:
        mx.eval(run(x, y), state)

    return step


def mlp_numpy(batch: dict[str, Any]) -> Step:
    p = mlp_weights()
    m, v, work = [np.zeros_like(w) for w in p], [np.zeros_like(w) for w in p], [np.empty_like(w) for w in p]
    x, y = batch["input"], batch["target"]
    rows, count = np.arange(len(y)), {"t": 0}

    def step() -> None:
        activations = [x]
        for k in range(0, len(p), 2):
            h = activations[-1] @ p[k].T
            h += p[k + 1]
            if k + 2 < len(p):
                np.maximum(h, 0, out=h)
            activations.append(h)
        e = activations[-1] - activations[-1].max(1, keepdims=True)
        np.exp(e, out=e)
        e /= e.sum(1, keepdims=True)
        -np.log(e[rows, y]).mean()
        e[rows, y] -= 1
        e *= np.float32(1 / len(y))
        g: list[Any] = [None] * len(p)
        for k in range(len(p) - 2, -1, -2):
            g[k], g[k + 1] = e.T @ activations[k // 2], e.sum(0)
            if k:
                e = e @ p[k]
                e *= activations[k // 2] > 0
        count["t"] += 1
        t = count["t"]
        size, scale = np.float32(RATE / (1 - 0.9**t)), np.float32(1 / (1 - 0.999**t) ** 0.5)
        for w, d, a, b, s in zip(p, g, m, v, work, strict=True):
            a *= np.float32(0.9)
            np.multiply(d, np.float32(0.1), out=s)
            a += s
            b *= np.float32(0.999)
            np.multiply(d, d, out=s)
            s *= np.float32(0.001)
            b += s
            np.sqrt(b, out=s)
            s *= scale
            s += np.float32(1e-8)
            np.divide(a, s, out=s)
            s *= size
            w -= s

    return step


# -- GPT -------------------------------------------------------------------------------------------------------------
def gpt_batch() -> dict[str, Any]:
    tokens = DRAW.integers(0, GPT["vocabulary"], (GPT_BATCH, GPT["length"] + 1)).astype(np.int32)
    return {"input": tokens[:, :-1].copy(), "target": tokens[:, 1:].copy()}


def gpt_torch(batch: dict[str, Any], compiled: bool = False) -> Step:
    from torch import nn

    f, heads = GPT["features"], GPT["heads"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(f), nn.LayerNorm(f)
            self.qkv, self.out = nn.Linear(f, 3 * f), nn.Linear(f, f)
            self.up, self.down = nn.Linear(f, 4 * f), nn.Linear(4 * f, f)

        def forward(self, x: Any) -> Any:
            n, length, _ = x.shape
            q, k, v = (
                part.view(n, length, heads, f // heads).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(f, 2)
            )
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(n, length, f))
            return x + self.down(nn.functional.gelu(self.up(self.ln_2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(GPT["vocabulary"], f), nn.Embedding(GPT["length"], f)
            self.blocks, self.ln_f = nn.ModuleList(Block() for _ in range(GPT["layers"])), nn.LayerNorm(f)

        def forward(self, tokens: Any) -> Any:
            x = self.wte(tokens) + self.wpe.weight
            for block in self.blocks:
                x = block(x)
            return self.ln_f(x) @ self.wte.weight.T

    return torch_step(Model(), batch["input"], batch["target"], compiled)


def gpt_jax(batch: dict[str, Any]) -> Step:
    import jax
    import jax.numpy as jnp
    import optax

    f, heads, length = GPT["features"], GPT["heads"], GPT["length"]
    optimizer = optax.adam(RATE)

    def draw(*shape: int) -> Any:
        return jnp.asarray(DRAW.normal(size=shape).astype(np.float32) * 0.02)

    def block() -> dict[str, Any]:
        sizes = {"qkv": (3 * f, f), "out": (f, f), "up": (4 * f, f), "down": (f, 4 * f)}
        params = {n: (draw(*s), jnp.zeros(s[0])) for n, s in sizes.items()}
        return {**params, "a": (jnp.ones(f), jnp.zeros(f)), "b": (jnp.ones(f), jnp.zeros(f))}

    def norm(x: Any, p: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt((centered * centered).mean(-1, keepdims=True) + 1e-5) * p[0] + p[1]

    def linear(x: Any, p: Any) -> Any:
        return x @ p[0].T + p[1]

    params = {
        "wte": draw(GPT["vocabulary"], f),
        "wpe": draw(length, f),
        "h": [block() for _ in range(GPT["layers"])],
        "f": (jnp.ones(f), jnp.zeros(f)),
    }
    mask = jnp.tril(jnp.ones((length, length), bool))

    def loss(p: Any, tokens: Any, y: Any) -> Any:
        n = tokens.shape[0]
        x = p["wte"][tokens] + p["wpe"]
        for b in p["h"]:
            q, k, v = (
                part.reshape(n, length, heads, f // heads).transpose(0, 2, 1, 3)
                for part in jnp.split(linear(norm(x, b["a"]), b["qkv"]), 3, -1)
            )
            scores = jnp.where(mask, q @ k.transpose(0, 1, 3, 2) * (f // heads) ** -0.5, -jnp.inf)
            y_ = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(n, length, f)
            x = x + linear(y_, b["out"])
            x = x + linear(jax.nn.gelu(linear(norm(x, b["b"]), b["up"])), b["down"])
        logits = norm(x, p["f"]) @ p["wte"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def update(p: Any, s: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(p, x, y)
        changes, s = optimizer.update(gradients, s, p)
        return optax.apply_updates(p, changes), s, value

    run = jax.jit(update, donate_argnums=(0, 1))
    state = {"p": params, "s": optimizer.init(params)}
    x, y = jnp.asarray(batch["input"]), jnp.asarray(batch["target"])

    def step() -> None:
        state["p"], state["s"], value = run(state["p"], state["s"], x, y)
        value.block_until_ready()

    return step


def gpt_mlx(batch: dict[str, Any], compiled: bool = False) -> Step:
    import mlx.core as mx
    from mlx import nn

    f, heads = GPT["features"], GPT["heads"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(f), nn.LayerNorm(f)
            self.qkv, self.out = nn.Linear(f, 3 * f), nn.Linear(f, f)
            self.up, self.down = nn.Linear(f, 4 * f), nn.Linear(4 * f, f)

        def __call__(self, x: Any) -> Any:
            n, length, _ = x.shape
            parts = mx.split(self.qkv(self.ln_1(x)), 3, -1)
            q, k, v = (part.reshape(n, length, heads, f // heads).transpose(0, 2, 1, 3) for part in parts)
            y = mx.fast.scaled_dot_product_attention(q, k, v, scale=(f // heads) ** -0.5, mask="causal")
            x = x + self.out(y.transpose(0, 2, 1, 3).reshape(n, length, f))
            return x + self.down(nn.gelu_approx(self.up(self.ln_2(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(GPT["vocabulary"], f), nn.Embedding(GPT["length"], f)
            self.blocks, self.ln_f = [Block() for _ in range(GPT["layers"])], nn.LayerNorm(f)

        def __call__(self, tokens: Any) -> Any:
            x = self.wte(tokens) + self.wpe.weight
            for block in self.blocks:
                x = block(x)
            return self.wte.as_linear(self.ln_f(x))

    return mlx_step(Model(), batch, compiled)


# -- loader ----------------------------------------------------------------------------------------------------------
class Samples:
    """A data set as people write it: one sample at a time."""

    def __init__(self, n: int) -> None:
        self.x, self.y = DRAW.normal(size=(n, 3, 32, 32)).astype(np.float32), np.arange(n)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, k: int) -> Any:
        return self.x[k], self.y[k]


def all_of(loader: Any) -> Step:
    def run() -> None:
        for _ in loader:
            pass

    return run


def loaders() -> None:
    import torch

    torch.set_num_threads(1)
    data = Samples(4096)
    pair = torch.utils.data.TensorDataset(torch.from_numpy(data.x), torch.from_numpy(data.y))
    rows = {
        "objects": harness.interleaved(
            {
                "torch": all_of(torch.utils.data.DataLoader(data, 64, shuffle=True)),
                "mithril": all_of(ml.DataLoader(data, 64, shuffle=True)),
            }
        ),
        "arrays": harness.interleaved(
            {
                "torch": all_of(torch.utils.data.DataLoader(pair, 64, shuffle=True)),
                "mithril": all_of(ml.DataLoader((data.x, data.y), 64, shuffle=True)),
            }
        ),
        "objects, 2 processes": harness.interleaved(
            {
                "torch": all_of(
                    torch.utils.data.DataLoader(
                        data, 64, shuffle=True, num_workers=2, multiprocessing_context="spawn", persistent_workers=True
                    )
                ),
                "mithril": all_of(ml.DataLoader(data, 64, shuffle=True, num_workers=2, worker="process")),
            },
            seconds=5.0,
            min_rounds=5,
        ),
    }
    harness.table("an epoch of 4096 samples", rows, "torch")


# -- all -------------------------------------------------------------------------------------------------------------
def measured(
    title: str, model: Callable[[], Any], batch: dict[str, Any], hand: dict[str, tuple[Any, str, dict[str, Any]]]
) -> None:
    rows = {}
    for name, (make, backend, options) in hand.items():
        try:
            theirs = make(batch)
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        step, _ = ours(model(), batch, "cross_entropy", backend, **options)
        free, _ = ours(model(), batch, "cross_entropy", backend, detect_nan=False, **options)
        ways = {"by hand": theirs, "mithril": step, "without detect_nan": free}
        rows[name] = harness.interleaved(ways, seconds=8.0)
        harness.table(title, {name: rows[name]}, "by hand")


def main(names: list[str]) -> None:
    if not names or "mlp" in names:
        hand = {
            "numpy": (mlp_numpy, "numpy", {}),
            "jax": (mlp_jax, "jax", {}),
            "torch eager": (mlp_torch, "torch", {}),
            "torch compiled": (lambda b: mlp_torch(b, True), "torch", {"jit": True}),
            "mlx": (mlp_mlx, "mlx", {}),
            "mlx compiled": (lambda b: mlp_mlx(b, True), "mlx", {"jit": True}),
            "c, NumPy by hand": (mlp_numpy, "c", {}),
            "ggml, NumPy by hand": (mlp_numpy, "ggml", {}),
        }
        cases = {n: h for n, h in hand.items() if not set(names) & set(hand) or n in names}
        measured("MLP, batch 128", lambda: MLP(SIZES[1:]), mlp_batch(), cases)
    if not names or "gpt" in names:
        hand = {
            "jax": (gpt_jax, "jax", {}),
            "torch eager": (gpt_torch, "torch", {}),
            "torch compiled": (lambda b: gpt_torch(b, True), "torch", {"jit": True}),
            "mlx": (gpt_mlx, "mlx", {}),
            "mlx compiled": (lambda b: gpt_mlx(b, True), "mlx", {"jit": True}),
            "numpy, torch eager by hand": (gpt_torch, "numpy", {}),
            "c, torch eager by hand": (gpt_torch, "c", {}),
            "ggml, torch eager by hand": (gpt_torch, "ggml", {}),
        }
        cases = {n: h for n, h in hand.items() if not set(names) & set(hand) or n in names}
        measured("GPT, 8 x 64 tokens", lambda: gpt(**GPT), gpt_batch(), cases)
    if not names or "loader" in names:
        loaders()


if __name__ == "__main__":
    main(harness.arguments(__doc__, "PART").words)
