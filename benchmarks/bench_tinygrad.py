"""The tinygrad backend against tinygrad that is called directly, interleaved.

``python benchmarks/bench_tinygrad.py``: microseconds of the processor, and the ratio to the program by hand, a TinyJit
that takes the weights as mithril's programs do. Both return tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from interleaved import interleaved, table
from tinygrad import Context, Tensor, TinyJit

import mithril as ml
from mithril.models import Conv2d, Flatten, Linear, MaxPool2d, Relu, Sequential, TransformerEncoderLayer

RNG = np.random.default_rng(0)
Weights = dict[str, Tensor]
WIDTH, HEADS, LAYERS = 64, 4, 2


def mlp(x: Tensor, w: Weights) -> Tensor:
    for k in (0, 2, 4):
        x = x.linear(w[f"{k}.weight"].T, w[f"{k}.bias"])
        x = x.relu() if k < 4 else x
    return x


def cnn(x: Tensor, w: Weights) -> Tensor:
    for k in (0, 3):
        x = x.conv2d(w[f"{k}.weight"], w[f"{k}.bias"], padding=1).relu().max_pool2d(2)
    return x.flatten(1).linear(w["7.weight"].T, w["7.bias"])


def encoder(x: Tensor, w: Weights) -> Tensor:
    for k in range(LAYERS):

        def linear(x: Tensor, name: str, k: int = k) -> Tensor:
            return x.linear(w[f"{k}.{name}.weight"].T, w[f"{k}.{name}.bias"])

        def norm(x: Tensor, name: str, k: int = k) -> Tensor:
            return x.layernorm() * w[f"{k}.{name}.weight"] + w[f"{k}.{name}.bias"]

        q, v, kv = (
            linear(x, f"self_attn.{name}").reshape(*x.shape[:2], HEADS, -1).transpose(1, 2)
            for name in ("query", "value", "key")
        )
        y = q.scaled_dot_product_attention(kv, v).transpose(1, 2).reshape(x.shape)
        x = norm(x + linear(y, "self_attn.output"), "norm1")
        x = norm(x + linear(linear(x, "linear1").relu(), "linear2"), "norm2")
    return x


def captured(by_hand: Callable[[Tensor, Weights], Tensor], x: Tensor, weights: Weights) -> Callable[[], Tensor]:
    """Return a call of the program by hand; its result is overwritten by the next call."""
    jit = TinyJit(lambda x, **w: by_hand(x, w).realize())
    return lambda: jit(x, **weights)


def main() -> None:
    layers = [TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0) for _ in range(LAYERS)]
    cases = {
        "MLP 32x256": (Sequential(Linear(512), Relu(), Linear(512), Relu(), Linear(10)), mlp, (32, 256)),
        "CNN 8x3x32x32": (
            Sequential(
                Conv2d(16, kernel_size=3, padding=1), Relu(), MaxPool2d(2),
                Conv2d(32, kernel_size=3, padding=1), Relu(), MaxPool2d(2), Flatten(),
                Linear(10),
            ),
            cnn,
            (8, 3, 32, 32),
        ),
        "encoder 2x16x64": (Sequential(*layers), encoder, (2, 16, WIDTH)),
    }  # fmt: skip
    rows = {}
    for name, (model, by_hand, shape) in cases.items():
        options: dict[str, Any] = {"shapes": {"input": list(shape)}, "inference": True}
        compiled = ml.compile(model, "tinygrad", **options)
        native = ml.compile(model, "tinygrad", semantics="native", **options)
        params = compiled.randomize_params(seed=0)
        x = compiled.backend.array(RNG.normal(size=shape).astype(np.float32))
        ways: dict[str, Callable[[], Tensor]] = {
            "by hand": captured(by_hand, x, dict(params)),
            "mithril": lambda c=compiled, p=params, x=x: c.evaluate(p, {"input": x})["output"],
            'semantics="native"': lambda c=native, p=params, x=x: c.evaluate(p, {"input": x})["output"],
        }
        with Context(PARALLEL=0):
            for _ in range(3):  # a TinyJit captures the second call
                results = [way().numpy() for way in ways.values()]
        for result in results[1:]:
            np.testing.assert_allclose(result, results[0], rtol=1e-3, atol=1e-4)
        rows[name] = interleaved(ways, seconds=8.0, clock=time.process_time)
    table("us", rows, "by hand")


if __name__ == "__main__":
    main()
