"""Layouts of images and weights on other engines than C, interleaved: ratios of times in one process.

``OMP_NUM_THREADS=1 NPROC=1 python benchmarks/bench_layout.py [channels] [weights]``: chains of convolutions, channels
first over channels last with the transposes at both ends; a perceptron over code typed by hand whose weights are stored
transposed, with weights as arguments, bound, and embedded by ``static_inference``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import interleaved

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

SIZES = ((1, 64, 56), (8, 64, 28), (8, 32, 28), (1, 256, 14))
DEPTH = 4
WIDTHS = (784, 512, 512, 10)
RNG = np.random.default_rng(0)


def arrays(batch: int, channels: int, size: int) -> tuple[Any, list[Any]]:
    image = RNG.normal(size=(batch, channels, size, size)).astype(np.float32)
    weights = [0.05 * RNG.normal(size=(channels, channels, 3, 3)).astype(np.float32) for _ in range(DEPTH)]
    return image, weights


def jax_ways(image: Any, weights: list[Any]) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    def first(x: Any, ws: list[Any]) -> Any:
        for w in ws:
            x = jnp.maximum(lax.conv_general_dilated(x, w, (1, 1), "SAME"), 0)
        return x

    def last(x: Any, ws: list[Any]) -> Any:
        x = jnp.transpose(x, (0, 2, 3, 1))
        for w in ws:
            kernel = jnp.transpose(w, (2, 3, 1, 0))
            y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jnp.maximum(y, 0)
        return jnp.transpose(x, (0, 3, 1, 2))

    x, ws = jnp.asarray(image), [jnp.asarray(w) for w in weights]
    functions = {"first": jax.jit(first), "last": jax.jit(last)}
    return {name: lambda f=f: f(x, ws).block_until_ready() for name, f in functions.items()}


def torch_ways(image: Any, weights: list[Any]) -> dict[str, Callable[[], Any]]:
    import torch

    torch.set_num_threads(1)
    x, ws = torch.from_numpy(image), [torch.from_numpy(w) for w in weights]

    def chain(x: Any) -> Any:
        with torch.inference_mode():
            for w in ws:
                x = torch.relu(torch.conv2d(x, w, None, 1, 1))
            return x.contiguous()

    return {"first": lambda: chain(x), "last": lambda: chain(x.contiguous(memory_format=torch.channels_last))}


def mlx_ways(batch: int, channels: int, size: int, convolutions: int) -> dict[str, Callable[[], Any]]:
    """Return residual blocks of two convolutions on MLX: by hand with channels last throughout, and of a model."""
    import mithril as ml
    from mithril import ops
    from mithril.ir import Builder
    from mithril_mlx.mlx_loader import mx

    image, weights = arrays(batch, channels, size)
    weights = [weights[k % DEPTH] for k in range(convolutions)]

    def by_hand(x: Any, ws: list[Any]) -> Any:
        x = mx.transpose(x, (0, 2, 3, 1))
        for k in range(0, len(ws), 2):
            y = mx.maximum(mx.conv2d(x, ws[k], padding=1), 0)
            x = mx.maximum(x + mx.conv2d(y, ws[k + 1], padding=1), 0)
        return mx.contiguous(mx.transpose(x, (0, 3, 1, 2)))

    with Builder() as b:
        x = b.input("x", image.shape)
        ws = [b.param(f"w{k}", w.shape) for k, w in enumerate(weights)]
        for k in range(0, len(ws), 2):
            y = ops.relu(ops.conv(x, ws[k], padding=((1, 1), (1, 1))))
            x = ops.relu(x + ops.conv(y, ws[k + 1], padding=((1, 1), (1, 1))))
        graph = b.build({"y": x})
    x = mx.array(image)
    last = [mx.array(np.asarray(w.transpose(0, 2, 3, 1), order="C")) for w in weights]
    params = {f"w{k}": mx.array(w) for k, w in enumerate(weights)}
    compiled = ml.compile(graph, "mlx", inference=True)
    static = ml.compile(graph, "mlx", static_inference=True).bind(params)
    np.testing.assert_allclose(static({"x": x})["y"], by_hand(x, last), rtol=1e-3, atol=1e-3)
    return {
        "by hand": lambda: mx.eval(by_hand(x, last)),
        "arguments": lambda: mx.eval(compiled.evaluate(params, {"x": x})["y"]),
        "embedded": lambda: mx.eval(static({"x": x})["y"]),
    }


def mlx() -> None:
    print("residual blocks on mlx, over code by hand with channels last throughout")
    for batch, channels, size in SIZES[1:]:
        times = interleaved(mlx_ways(batch, channels, size, 4), clock=time.process_time)
        ratios = ", ".join(f"{n} {t / times['by hand']:.2f}" for n, t in times.items() if n != "by hand")
        print(
            f"  batch {batch}, {channels} channels, {size}x{size}: {ratios} ({times['by hand'] * 1e3:.1f} ms)",
            flush=True,
        )


def perceptron_ways(batch: int) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    import mithril as ml
    from mithril.models import Linear, Relu

    def by_hand(x: Any, layers: list[Any]) -> Any:
        for k, (w, b) in enumerate(layers):
            x = x @ w + b
            x = jnp.maximum(x, 0) if k + 1 < len(layers) else x
        return x

    model = ml.Model()
    for k, size in enumerate(WIDTHS[1:]):
        model += Linear(size, name=f"l{k}")
        if k + 2 < len(WIDTHS):
            model += Relu()
    shapes = {"input": [batch, WIDTHS[0]]}
    x = jnp.asarray(RNG.normal(size=shapes["input"]).astype(np.float32))
    plain = ml.compile(model, "jax", shapes=shapes, inference=True)
    params = plain.randomize_params(0)
    static = ml.compile(model, "jax", shapes=shapes, static_inference=True).bind(params)
    bound = ml.compile(model, "jax", shapes=shapes, inference=True).bind(params)
    layers = [(jnp.asarray(params[f"l{k}.weight"].T.copy()), params[f"l{k}.bias"]) for k in range(len(WIDTHS) - 1)]
    typed = jax.jit(by_hand)
    inputs = {"input": x}
    np.testing.assert_allclose(static(inputs)["output"], typed(x, layers), rtol=1e-4, atol=1e-4)
    return {
        "by hand": lambda: typed(x, layers).block_until_ready(),
        "arguments": lambda: plain.evaluate(params, inputs)["output"].block_until_ready(),
        "bound": lambda: bound(inputs)["output"].block_until_ready(),
        "embedded": lambda: static(inputs)["output"].block_until_ready(),
    }


def weights() -> None:
    print(f"perceptron {'-'.join(map(str, WIDTHS))} on jax, over code by hand with transposed weights")
    for batch in (1, 32, 256):
        times = interleaved(perceptron_ways(batch), clock=time.process_time)
        ratios = ", ".join(f"{n} {t / times['by hand']:.2f}" for n, t in times.items() if n != "by hand")
        print(f"  batch {batch}: {ratios} ({times['by hand'] * 1e6:.0f} us)", flush=True)


def channels() -> None:
    print(f"{DEPTH} convolutions of 3x3 and relu, channels first / last")
    for name, ways in (("jax", jax_ways), ("torch", torch_ways)):
        for batch, channels, size in SIZES:
            times = interleaved(ways(*arrays(batch, channels, size)))
            ratio = times["first"] / times["last"]
            print(f"  {name:5} batch {batch}, {channels} channels, {size}x{size}: {ratio:.2f}", flush=True)


def with_claim(backend: Any, operations: frozenset[Any]) -> Any:
    """Return a backend that claims to compute operations with channels last, or none."""

    class Claiming(type(backend)):  # type: ignore[misc]
        @property
        def capabilities(self) -> Any:
            return replace(super().capabilities, channels_last=operations)

    return Claiming()


def resnet() -> None:
    """ResNet-18 at 224 with embedded weights: with the pass ``channels-last`` over without it."""
    from resnet18 import resnet18

    import mithril as ml
    from mithril import ops

    x = RNG.normal(size=(1, 3, 224, 224)).astype(np.float32)
    for name, backend in (("jax", ml.JaxBackend()), ("mlx", ml.MlxBackend())):
        ways = {}
        for way, operations in (("without", frozenset()), ("with", frozenset({ops.conv}))):
            claiming = with_claim(backend, operations)
            compiled = ml.compile(resnet18(), claiming, shapes={"input": [1, 3, 224, 224]}, static_inference=True)
            compiled.bind(compiled.randomize_params(0))
            image = {"input": claiming.array(x)}
            ways[way] = lambda c=compiled, b=claiming, i=image: b.synchronize(c(i)["output"])
        times = interleaved(ways, 20, clock=time.process_time)
        print(
            f"resnet18 at 224 on {name}: {times['with'] / times['without']:.3f} ({times['with'] * 1e3:.1f} ms)",
            flush=True,
        )


if __name__ == "__main__":
    parts = {"channels": channels, "weights": weights, "mlx": mlx, "resnet": resnet}
    for part in sys.argv[1:] or parts:
        parts[part]()
