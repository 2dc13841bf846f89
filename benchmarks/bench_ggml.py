"""The GGML backend against torch, interleaved and on one thread each: dense layers, an encoder, a decoding step, files.

``python benchmarks/bench_ggml.py [part ...]``: parts are overhead, linear, encoder, decoding, training, digits.
Ratios are torch's float32 time over ours: more than 1 is faster than torch.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from models import random

import mithril as ml
from mithril.backend import BuildOptions
from mithril.graph import Builder, operation as op
from mithril.models import Conv2d, Flatten, Linear, MaxPool2d, Model, Relu, TransformerEncoderLayer

torch.set_num_threads(1)
KINDS = ("f32", "bf16", "q8_0", "q6_k", "q4_k", "q4_0")


def report(title: str, ways: Mapping[str, Callable[[], Any]], seconds: float = 2.0) -> dict[str, float]:
    """Microseconds of the processor and ratio to torch's float32."""
    timings = harness.interleaved(ways, seconds, min_rounds=5)
    base = timings["torch f32"]
    print(f"{title}: " + ", ".join(f"{n} {t * 1e6:.0f} us ({base / t:.2f}x)" for n, t in timings.items()), flush=True)
    return timings


def quantized(kind: str) -> Any:
    return ml.GGMLBackend(quantize=None if kind == "f32" else kind)


# -- call overhead ------------------------------------------------------------------------------------------------
def overhead() -> None:
    for n in (1, 10, 100, 400):
        with Builder() as b:
            x, y = b.input("x", (16,)), b.input("y", (16,))
            z = x
            for _ in range(n):
                z = z + y
        executable = ml.GGMLBackend().build(b.build({"z": z}))
        inputs = {"x": np.ones(16, np.float32), "y": np.ones(16, np.float32)}
        timings = harness.interleaved({"call": lambda: executable({}, inputs)}, 0.5)
        print(f"call of {n} operations on 16 elements: {timings['call'] * 1e6:.1f} us", flush=True)


# -- one dense layer ----------------------------------------------------------------------------------------------
def linear() -> None:
    """Weights of 64 MB as float32: larger than the processor's caches, so one row is bound by memory."""
    n = 4096
    w = random(n, n, scale=0.02)
    wt = torch.from_numpy(w)
    half = wt.bfloat16()
    for rows in (1, 32):
        x = random(rows, n)
        xt = torch.from_numpy(x)
        xh = xt.bfloat16()
        ways: dict[str, Callable[[], Any]] = {
            "torch f32": lambda: torch.nn.functional.linear(xt, wt),
            "torch bf16": lambda: torch.nn.functional.linear(xh, half),
        }
        with Builder() as b:
            y = op("linear")(b.input("x", x.shape), b.param("w", w.shape))
        graph = b.build({"y": y})
        exact = x @ w.T
        for kind in KINDS:
            executable = quantized(kind).build(graph, BuildOptions(inference=True))
            params, inputs = {"w": w}, {"x": x}
            result = executable(params, inputs)["y"]
            print(f"  {kind}: relative error {np.linalg.norm(result - exact) / np.linalg.norm(exact):.1e}")
            ways[kind] = lambda e=executable, p=params, g=inputs: e(p, g)
        with torch.no_grad():
            report(f"linear {n}x{n}, {rows} rows", ways, 4.0)


# -- an encoder ---------------------------------------------------------------------------------------------------
def encoder() -> None:
    """Six layers, 384 features, 6 heads, sequences of 128."""
    d, layers, batch, length = 384, 6, 1, 128
    model = Model()
    for _ in range(layers):
        model += TransformerEncoderLayer(d, 6, 4 * d, dropout=0.0)
    x = random(batch, length, d)
    xt = torch.from_numpy(x)
    base = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(d, 6, 4 * d, dropout=0.0, batch_first=True), layers, enable_nested_tensor=False
    ).eval()
    half, xh = copy.deepcopy(base).bfloat16(), xt.bfloat16()
    ways: dict[str, Callable[[], Any]] = {"torch f32": lambda: base(xt), "torch bf16": lambda: half(xh)}
    exact = None
    for kind in KINDS:
        compiled = ml.compile(model, quantized(kind), inference=True, shapes={"input": list(x.shape)})
        params = compiled.randomize_params(seed=0)
        result = compiled.evaluate(params, {"input": x})["output"]
        exact = result if exact is None else exact
        print(f"  {kind}: relative error {np.linalg.norm(result - exact) / np.linalg.norm(exact):.1e}")
        ways[kind] = lambda c=compiled, p=params: c.evaluate(p, {"input": x})
    with torch.no_grad():
        report(f"encoder of {layers} layers, {d} features, [{batch}, {length}]", ways, 6.0)


# -- one token of a GPT ---------------------------------------------------------------------------------------------
def decoding_graph(d: int, heads: int, past: int) -> Any:
    """Build a decoding block: one new token, and the cached keys and values of earlier ones."""
    with Builder("block") as b:
        x = b.input("x", (1, 1, d))
        k0, v0 = b.input("keys", (1, heads, past, d // heads)), b.input("values", (1, heads, past, d // heads))
        h = op("layer_norm")(x, b.param("n1.weight", (d,)), b.param("n1.bias", (d,)))
        q, k, v = (
            op("reshape")(
                op("linear")(h, b.param(f"{n}.weight", (d, d)), b.param(f"{n}.bias", (d,))), shape=(1, heads, 1, -1)
            )
            for n in ("q", "k", "v")
        )
        keys, values = op("concat")(k0, k, axis=2), op("concat")(v0, v, axis=2)
        a = op("reshape")(op("attention")(q, keys, values), shape=(1, 1, d))
        x = x + op("linear")(a, b.param("o.weight", (d, d)), b.param("o.bias", (d,)))
        h = op("layer_norm")(x, b.param("n2.weight", (d,)), b.param("n2.bias", (d,)))
        h = op("linear")(h, b.param("up.weight", (4 * d, d)), b.param("up.bias", (4 * d,)), activation="gelu_tanh")
        x = x + op("linear")(h, b.param("down.weight", (d, 4 * d)), b.param("down.bias", (d,)))
    return b.build({"x": x, "keys": keys, "values": values})


def torch_block(p: Mapping[str, Any], x: Any, k0: Any, v0: Any, heads: int) -> Any:
    f = torch.nn.functional
    d = x.shape[-1]
    h = f.layer_norm(x, (d,), p["n1.weight"], p["n1.bias"])
    q, k, v = (f.linear(h, p[f"{n}.weight"], p[f"{n}.bias"]).reshape(1, heads, 1, -1) for n in ("q", "k", "v"))
    keys, values = torch.cat([k0, k], 2), torch.cat([v0, v], 2)
    a = f.scaled_dot_product_attention(q, keys, values).reshape(1, 1, d)
    x = x + f.linear(a, p["o.weight"], p["o.bias"])
    h = f.gelu(
        f.linear(f.layer_norm(x, (d,), p["n2.weight"], p["n2.bias"]), p["up.weight"], p["up.bias"]), approximate="tanh"
    )
    return x + f.linear(h, p["down.weight"], p["down.bias"]), keys, values


def decoding() -> None:
    """Twelve times d squared weights: 201 MB as float32 at d = 2048."""
    d, heads, past = 2048, 16, 128
    graph = decoding_graph(d, heads, past)
    params = {i.name: random(*i.type.shape, scale=0.02) for i in graph.with_role("param")}
    x, k0, v0 = random(1, 1, d), random(1, heads, past, d // heads), random(1, heads, past, d // heads)
    inputs = {"x": x, "keys": k0, "values": v0}
    tensors = [torch.from_numpy(a) for a in (x, k0, v0)]
    full = {n: torch.from_numpy(a) for n, a in params.items()}
    half = {n: t.bfloat16() for n, t in full.items()}
    halves = [t.bfloat16() for t in tensors]
    ways: dict[str, Callable[[], Any]] = {
        "torch f32": lambda: torch_block(full, *tensors, heads),
        "torch bf16": lambda: torch_block(half, *halves, heads),
    }
    with torch.no_grad():
        exact = torch_block(full, *tensors, heads)[0].numpy()
        for kind in KINDS:
            executable = quantized(kind).build(graph, BuildOptions(inference=True))
            result = executable(params, inputs)["x"]
            print(f"  {kind}: relative error {np.linalg.norm(result - exact) / np.linalg.norm(exact):.1e}")
            ways[kind] = lambda e=executable: e(params, inputs)
        report(f"a GPT block of {d} features, one token after {past}", ways, 6.0)


# -- a trained classifier ---------------------------------------------------------------------------------------------
def digits() -> None:
    """Accuracy and size of the file at each quantization."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = (data.data / 16).astype(np.float32)
    rng = np.random.default_rng(1)
    order = rng.permutation(len(x))
    x, y = x[order], data.target[order]
    model = Model()
    for size in (256, 256):
        model += Linear(size)
        model += Relu()
    model += Linear(10)
    compiled = ml.compile(model, "ggml", shapes={"input": ["B", 64]})
    params = compiled.randomize_params(seed=0)
    split = 1300
    momentum = {n: np.zeros_like(p) for n, p in params.items()}
    for step in range(600):
        rows = rng.integers(0, split, 128)
        out = compiled.evaluate(params, {"input": x[rows]}, training=True)["output"]
        e = np.exp(out - out.max(1, keepdims=True))
        g = e / e.sum(1, keepdims=True)
        g[np.arange(128), y[rows]] -= 1
        _, grads = compiled.evaluate(params, {"input": x[rows]}, g / 128)
        for n in params:
            momentum[n] = 0.9 * momentum[n] + grads[n]
            params[n] = params[n] - 0.1 * momentum[n] * (1 if step < 450 else 0.1)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "iq4_nl", "q3_k", "q2_k", "tq2_0"):
            path = Path(folder) / "digits.gguf"
            compiled.export(path, params=params, quantize=None if kind == "f32" else kind)
            out = ml.load(path)({"input": x[split:]})["output"]
            right = float((out.argmax(1) == y[split:]).mean())
            print(f"digits {kind}: accuracy {100 * right:.1f} %, file {path.stat().st_size:,} bytes", flush=True)


# -- forward and backward ---------------------------------------------------------------------------------------------
def training() -> None:
    """Outputs and all gradients of one batch."""
    nn = torch.nn
    mlp, encoder, cnn = Model(), Model(), Model()
    for layer in (Linear(512), Relu(), Linear(512), Relu(), Linear(10)):
        mlp += layer
    encoder += TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu")
    for layer in (
        Conv2d(1, 16, 3, padding=1),
        Relu(),
        MaxPool2d(2),
        Conv2d(16, 32, 3, padding=1),
        Relu(),
        MaxPool2d(2),
    ):
        cnn += layer
    cnn += Flatten()
    cnn += Linear(10)
    torch_cnn = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip
    torch_mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    torch_encoder = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True)
    for name, backend_call, theirs, shape in (
        ("perceptron, batch 128", mlp, torch_mlp, (128, 784)),
        ("encoder layer of 128, [4, 64]", encoder, torch_encoder, (4, 64, 128)),
        ("two convolutions, batch 32 of 28x28", cnn, torch_cnn, (32, 1, 28, 28)),
    ):
        x = random(*shape)
        xt = torch.from_numpy(x)
        compiled = ml.compile(backend_call, "ggml", shapes={"input": list(shape)})
        params = compiled.randomize_params(seed=0)
        g = random(*compiled.evaluate(params, {"input": x})["output"].shape)
        gt = torch.from_numpy(g)

        def backward(theirs: Any = theirs, xt: Any = xt, gt: Any = gt) -> None:
            theirs.zero_grad()
            theirs(xt).backward(gt)

        ways = {
            "torch f32": backward,
            "ggml": lambda c=compiled, p=params, x=x, g=g: c.evaluate(p, {"input": x}, g),
        }
        report(f"gradients of {name}", ways)


PARTS = {
    "overhead": overhead,
    "linear": linear,
    "encoder": encoder,
    "decoding": decoding,
    "training": training,
    "digits": digits,
}

if __name__ == "__main__":
    harness.run_parts(__doc__, PARTS)
