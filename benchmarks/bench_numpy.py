"""Generated NumPy code against hand-written code, and the overhead of calling a compiled model.

``python benchmarks/bench_numpy.py``: microseconds, the best of many interleaved rounds,
and ratios to the hand-written code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from interleaved import interleaved, table

import mithril as ml
from mithril.models import Conv2d, LayerNorm, Linear, Model, MultiHeadAttention, Relu

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def mlp(batch: int) -> tuple[Any, ...]:
    model = Model()
    for k, size in enumerate((512, 512, 10)):
        model += Linear(size, name=f"l{k}")
        if k < 2:
            model += Relu()

    def by_hand(p: Any, x: Any) -> Any:
        h = x @ p["l0.weight"].T
        h += p["l0.bias"]
        np.maximum(h, 0.0, out=h)
        h = h @ p["l1.weight"].T
        h += p["l1.bias"]
        np.maximum(h, 0.0, out=h)
        y = h @ p["l2.weight"].T
        y += p["l2.bias"]
        return y

    return model, (batch, 784), by_hand


def layer_norm() -> tuple[Any, ...]:
    model = Model()
    model += LayerNorm(name="n")

    def by_hand(p: Any, x: Any) -> Any:
        center = x - x.mean(axis=-1, keepdims=True)
        spread = np.square(center).mean(axis=-1, keepdims=True)
        spread += np.float32(1e-5)
        np.sqrt(spread, out=spread)
        center /= spread
        center *= p["n.weight"]
        center += p["n.bias"]
        return center

    return model, (256, 512), by_hand


def attention() -> tuple[Any, ...]:
    model = Model()
    model |= MultiHeadAttention(128, heads=4, name="a")(query="input", output="output")

    def by_hand(p: Any, x: Any) -> Any:
        b, n, d = x.shape

        def heads(name: str) -> Any:
            y = x @ p[f"a.{name}.weight"].T
            y += p[f"a.{name}.bias"]
            return y.reshape(b, n, 4, d // 4).transpose(0, 2, 1, 3)

        q, k, v = heads("query"), heads("key"), heads("value")
        s = (q * np.float32(1 / np.sqrt(d // 4))) @ k.transpose(0, 1, 3, 2)
        s -= s.max(axis=-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(axis=-1, keepdims=True)
        y = (s @ v).transpose(0, 2, 1, 3).reshape(b, n, d) @ p["a.output.weight"].T
        y += p["a.output.bias"]
        return y

    return model, (4, 64, 128), by_hand


def conv() -> tuple[Any, ...]:
    model = Model()
    model += Conv2d(64, kernel_size=3, padding=1, name="c")

    def by_hand(p: Any, x: Any) -> Any:
        n, c, h, w = x.shape
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        view = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        columns = view.transpose(0, 1, 4, 5, 2, 3).reshape(n, c * 9, h * w)
        y = p["c.weight"].reshape(-1, c * 9) @ columns
        y += p["c.bias"][:, None]
        return y.reshape(n, -1, h, w)

    return model, (4, 32, 28, 28), by_hand


def against_hand() -> None:
    rows = {}
    cases = {
        "MLP 784-512-512-10, batch 1": mlp(1),
        "MLP 784-512-512-10, batch 32": mlp(32),
        "MLP 784-512-512-10, batch 256": mlp(256),
        "layer norm 256x512": layer_norm(),
        "attention 4x64x128, 4 heads": attention(),
        "convolution 32->64, 3x3, 28x28": conv(),
    }
    for name, (model, shape, by_hand) in cases.items():
        compiled = ml.compile(model, "numpy", shapes={"input": list(shape)}, inference=True)
        params, x = compiled.randomize_params(0), random(*shape)
        inputs = {"input": x}
        expected = next(iter(compiled.evaluate(params, inputs).values()))
        np.testing.assert_allclose(by_hand(params, x), expected, rtol=1e-3, atol=1e-4)
        bare = compiled.programs[0].executable.forward
        rows[name] = interleaved(
            {
                "by hand": lambda: by_hand(params, x),
                "generated": lambda: bare(params, inputs),
                "compiled.evaluate": lambda: compiled.evaluate(params, inputs),
            }
        )
    table("forward, NumPy", rows, "by hand")


def overhead() -> None:
    print()
    print("what evaluate() adds to the bare generated function")
    for count in (10, 100, 300):
        model = Model()
        for k in range(count // 2):
            model += Linear(1, name=f"l{k}")
        compiled = ml.compile(model, "numpy", shapes={"input": [1, 1]}, inference=True)
        params, inputs = compiled.randomize_params(0), {"input": random(1, 1)}
        compiled.evaluate(params, inputs)
        bare = compiled.programs[0].executable.forward
        timings = interleaved(
            {"bare": lambda: bare(params, inputs), "evaluate": lambda: compiled.evaluate(params, inputs)}, 1.0
        )
        extra = (timings["evaluate"] - timings["bare"]) * 1e6
        print(f"{count:>5} parameters: {timings['bare'] * 1e6:9.1f} µs bare, {extra:+6.2f} µs")


if __name__ == "__main__":
    against_hand()
    overhead()
