"""Building and compiling against depth; whole models and gradients on NumPy against code typed by hand.

``python benchmarks/bench_models.py``: processor seconds, the best of a few rounds, and the slope on doubly logarithmic
axes (1.0 is linear); then ratios of interleaved timings.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import interleaved, table

import mithril as ml
from mithril.models import Linear, Model, MSELoss, Relu

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import gpt
from resnet18 import resnet18

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


# -- depth --------------------------------------------------------------------------------------------------------
def mlp(depth: int) -> Model:
    model = Model()
    for _ in range(depth):
        model += Linear(16, 16)
        model += Relu()
    return model


def depth(title: str, sizes: Sequence[int], build: Callable[[int], Model], **options: Any) -> None:
    print(f"{title:<34}" + "".join(f"{n:>10,}" for n in sizes) + f"{'exponent':>10}")
    timings: dict[str, list[float]] = {"build": [], "compile": []}
    for n in sizes:
        best = {"build": math.inf, "compile": math.inf}
        for _ in range(3 if n < max(sizes) else 2):
            gc.collect()
            start = time.process_time()
            model = build(n)
            middle = time.process_time()
            ml.compile(model, "numpy", **options)
            end = time.process_time()
            best = {"build": min(best["build"], middle - start), "compile": min(best["compile"], end - middle)}
        for name, seconds in best.items():
            timings[name].append(seconds)
    timings["both"] = [a + b for a, b in zip(timings["build"], timings["compile"], strict=True)]
    for name, row in timings.items():
        slope = math.log(row[-1] / row[1]) / math.log(sizes[-1] / sizes[1])
        print(f"  {name:<32}" + "".join(f"{s:>9.3f}s" for s in row) + f"{slope:>10.2f}")


# -- by hand ------------------------------------------------------------------------------------------------------
def conv_by_hand(x: Any, w: Any, stride: int, padding: int) -> Any:
    """Convolve by im2col, one product per image: the fastest variant on this CPU."""
    if w.shape[2] == 1 and not padding:
        x = x[:, :, ::stride, ::stride]
        n, c, h, width = x.shape
        return (w.reshape(len(w), c) @ x.reshape(n, c, -1)).reshape(n, -1, h, width)
    if padding:
        x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    view = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))[:, :, ::stride, ::stride]
    n, c, h, width = view.shape[:4]
    columns = view.transpose(0, 1, 4, 5, 2, 3).reshape(n, -1, h * width)
    return (w.reshape(len(w), -1) @ columns).reshape(n, -1, h, width)


def norm_by_hand(p: Any, s: Any, name: str, x: Any) -> Any:
    scale = p[f"{name}.weight"] / np.sqrt(s[f"{name}.running_var"] + np.float32(1e-5))
    shift = p[f"{name}.bias"] - s[f"{name}.running_mean"] * scale
    x *= scale[:, None, None]
    x += shift[:, None, None]
    return x


def resnet_by_hand(p: Any, s: Any, x: Any) -> Any:
    x = norm_by_hand(p, s, "bn1", conv_by_hand(x, p["conv1.weight"], 2, 3))
    np.maximum(x, 0, out=x)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    rows, columns = x.shape[2] // 2, x.shape[3] // 2
    parts = [padded[:, :, i : i + 2 * rows : 2, j : j + 2 * columns : 2] for i in range(3) for j in range(3)]
    x = parts[0].copy()
    for part in parts[1:]:
        np.maximum(x, part, out=x)
    for stage in range(1, 5):
        for block in range(2):
            path, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            h = norm_by_hand(p, s, f"{path}.bn1", conv_by_hand(x, p[f"{path}.conv1.weight"], stride, 1))
            np.maximum(h, 0, out=h)
            h = norm_by_hand(p, s, f"{path}.bn2", conv_by_hand(h, p[f"{path}.conv2.weight"], 1, 1))
            if f"{path}.downsample.0.weight" in p:
                x = conv_by_hand(x, p[f"{path}.downsample.0.weight"], stride, 0)
                x = norm_by_hand(p, s, f"{path}.downsample.1", x)
            h += x
            x = np.maximum(h, 0, out=h)
    return x.mean(axis=(2, 3)) @ p["fc.weight"].T + p["fc.bias"]


def resnet(size: int, batch: int) -> dict[str, float]:
    images = random(batch, 3, size, size)
    compiled = ml.compile(resnet18(), "numpy", shapes={"input": list(images.shape)}, inference=True)
    params, state = compiled.randomize_params(0), compiled.initial_state()
    result = next(iter(compiled.evaluate(params, {"input": images}).values()))
    np.testing.assert_allclose(resnet_by_hand(params, state, images), result, rtol=1e-2, atol=1e-2)
    return interleaved(
        {
            "by hand": lambda: resnet_by_hand(params, state, images),
            "mithril": lambda: compiled.evaluate(params, {"input": images}),
        },
        seconds=4,
        min_rounds=5,
    )


def gradients(batch: int) -> dict[str, float]:
    model = Model()
    for k in range(2):
        model += Linear(512, name=f"l{k}")
        model += Relu()
    model += Linear(10, name="l2")(output="y")
    model |= MSELoss()(predictions="y", targets="t", output="loss")
    model.set_outputs("loss")
    compiled = ml.compile(model, "numpy", shapes={"input": [batch, 784], "t": [batch, 10]})
    params = compiled.randomize_params(0)
    inputs = {"input": random(batch, 784), "t": random(batch, 10)}

    def by_hand() -> Any:
        x, p = inputs["input"], params
        a = x @ p["l0.weight"].T
        a += p["l0.bias"]
        np.maximum(a, 0, out=a)
        b = a @ p["l1.weight"].T
        b += p["l1.bias"]
        np.maximum(b, 0, out=b)
        y = b @ p["l2.weight"].T
        y += p["l2.bias"]
        y -= inputs["t"]
        loss = np.mean(np.square(y))
        y *= np.float32(2 / y.size)
        out = {"l2.weight": y.T @ b, "l2.bias": y.sum(0)}
        g = y @ p["l2.weight"]
        g *= b > 0
        out |= {"l1.weight": g.T @ a, "l1.bias": g.sum(0)}
        g = g @ p["l1.weight"]
        g *= a > 0
        return loss, out | {"l0.weight": g.T @ x, "l0.bias": g.sum(0)}

    gradients = compiled.evaluate(params, inputs, output_gradients="loss")[1]
    for name, expected in by_hand()[1].items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-3, atol=1e-5)
    return interleaved(
        {"by hand": by_hand, "mithril": lambda: compiled.evaluate(params, inputs, output_gradients="loss")}, seconds=2
    )


def main() -> None:
    depth("Linear + Relu layers", (10, 50, 200, 1000), mlp, shapes={"input": [None, 16]})
    small = {"vocabulary": 64, "length": 32, "heads": 2, "features": 16}
    depth("GPT blocks", (1, 4, 12, 24, 48), lambda n: gpt(layers=n, **small), shapes={"input": [None, 32]})
    print()
    table("ResNet-18, NumPy", {f"{s}x{s}, batch {b}": resnet(s, b) for s, b in ((64, 1), (64, 4))}, "by hand")
    print()
    table("MLP with gradients, NumPy", {f"batch {b}": gradients(b) for b in (1, 32, 256)}, "by hand")


if __name__ == "__main__":
    main()
