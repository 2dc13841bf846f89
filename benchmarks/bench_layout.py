"""Layouts of images and weights on other engines than C, interleaved: ratios of times in one process.

    python benchmarks/bench_layout.py [PART ...]

The parts are ``channels``, chains of convolutions, channels first over channels last with the transposes at both ends;
``weights``, a perceptron over code typed by hand whose weights are stored transposed, with weights as arguments, bound,
and embedded by ``static_inference``; ``images``, ResNet-18 over code typed by hand with channels last throughout, in
the same three ways; ``mlx`` and ``resnet``, the gains of the pass ``channels-last``; ``formats``, the option
``memory_format`` over a program without it, with weights bound and embedded; ``inference``, three networks with their
weights bound, ``inference=True`` and without it, over ``static_inference``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import harness
import models
import numpy as np
from models import RNG, perceptron
from resnet18 import resnet18

import mithril as ml
from mithril import ops

SIZES = ((1, 64, 56), (8, 64, 28), (8, 32, 28), (1, 256, 14))
DEPTH = 4
WIDTHS = (784, 512, 512, 10)


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
    from mithril.graph import Builder
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
        times = harness.interleaved(mlx_ways(batch, channels, size, 4))
        ratios = harness.ratios(times, "by hand")
        print(
            f"  batch {batch}, {channels} channels, {size}x{size}: {ratios} ({times['by hand'] * 1e3:.1f} ms)",
            flush=True,
        )


def perceptron_ways(batch: int) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    def by_hand(x: Any, layers: list[Any]) -> Any:
        for k, (w, b) in enumerate(layers):
            x = x @ w + b
            x = jnp.maximum(x, 0) if k + 1 < len(layers) else x
        return x

    model = perceptron(*WIDTHS[1:])
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
        times = harness.interleaved(perceptron_ways(batch))
        ratios = harness.ratios(times, "by hand")
        print(f"  batch {batch}: {ratios} ({times['by hand'] * 1e6:.0f} us)", flush=True)


def images_by_hand(backend: str) -> tuple[Any, Callable[[Any], Any], Callable[[str, Any], Any], Callable[..., Any]]:
    """Return functions with channels last, the conversions of images and parameters, and a wrapper of functions."""
    if backend == "torch":
        import hand_torch
        import torch

        torch.set_num_threads(1)

        def channels_last(x: Any) -> Any:
            return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x

        return hand_torch.Hand, channels_last, lambda _, x: channels_last(x), hand_torch.eager
    if backend == "jax":
        import hand_jax
        import jax
        import jax.numpy as jnp

        class LastOnJax(hand_jax.Hand):
            image_axes = (1, 2)

            @staticmethod
            def conv(x: Any, w: Any, stride: int, padding: int) -> Any:
                around, numbers = ((padding, padding),) * 2, ("NHWC", "HWIO", "NHWC")
                return jax.lax.conv_general_dilated(x, w, (stride, stride), around, dimension_numbers=numbers)

            @staticmethod
            def max_pool(x: Any) -> Any:
                around = ((0, 0), (1, 1), (1, 1), (0, 0))
                return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)

            @staticmethod
            def batch_norm(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
                return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias

            @staticmethod
            def linear(x: Any, w: Any, b: Any) -> Any:
                return x @ w + b

        def stored(name: str, x: Any) -> Any:
            axes = (2, 3, 1, 0) if x.ndim == 4 else (1, 0) if x.ndim == 2 else (0,)
            return jnp.asarray(np.asarray(x).transpose(axes).copy())

        return LastOnJax, lambda x: jnp.asarray(np.asarray(x).transpose(0, 2, 3, 1).copy()), stored, jax.jit
    import hand_mlx
    from hand_mlx import mx, nn

    pool = nn.MaxPool2d(3, 2, 1)

    class LastOnMlx(hand_mlx.Hand):
        image_axes = (1, 2)
        conv, max_pool = staticmethod(mx.conv2d), staticmethod(pool)

        @staticmethod
        def batch_norm(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
            return (x - mean) * mx.rsqrt(var + 1e-5) * scale + bias

    def last(x: Any) -> Any:
        return mx.array(np.asarray(x).transpose(0, 2, 3, 1).copy())

    return LastOnMlx, last, lambda _, x: last(x) if x.ndim == 4 else x, lambda function: function


def images_ways(name: str, batch: int, size: int) -> dict[str, Callable[[], Any]]:

    case = models.resnet(batch, size)
    functions, converted, stored, wrapped = images_by_hand(name)
    options = {"shapes": {"input": list(case.shape)}}
    plain = ml.compile(case.model, name, inference=True, **options)
    backend = plain.backend
    params = plain.randomize_params(0)
    x = backend.array(RNG.normal(size=case.shape).astype(np.float32))
    bound = ml.compile(case.model, name, inference=True, **options).bind(params)
    static = ml.compile(case.model, name, static_inference=True, **options).bind(params)
    by_hand = wrapped(lambda p, image: case.by_hand(functions, p, image))
    image = converted(x)
    values = {n: stored(n, p) for n, p in {**params, **plain.initial_state()}.items()}
    calls = {
        "by hand": lambda: by_hand(values, image),
        "arguments": lambda: next(iter(plain.evaluate(params, {"input": x}).values())),
        "bound": lambda: next(iter(bound({"input": x}).values())),
        "embedded": lambda: next(iter(static({"input": x}).values())),
    }
    results = {n: backend.to_numpy(call()) for n, call in calls.items()}
    for way, y in results.items():
        np.testing.assert_allclose(y, results["by hand"], rtol=1e-2, atol=1e-3, err_msg=way)
    if name == "mlx":
        from mithril_mlx.mlx_loader import mx

        return {n: lambda call=call: mx.eval(call()) for n, call in calls.items()}
    return {n: lambda call=call: backend.synchronize(call()) for n, call in calls.items()}


def images() -> None:
    print("ResNet-18 over code by hand with channels last")
    for name in ("jax", "mlx", "torch"):
        for batch, size in ((1, 64), (8, 64), (1, 224)):
            times = harness.interleaved(images_ways(name, batch, size), 4)
            ratios = harness.ratios(times, "by hand")
            print(f"  {name:5} batch {batch}, {size}x{size}: {ratios} ({times['by hand'] * 1e3:.1f} ms)", flush=True)


def channels() -> None:
    print(f"{DEPTH} convolutions of 3x3 and relu, channels first / last")
    for name, ways in (("jax", jax_ways), ("torch", torch_ways)):
        for batch, channels, size in SIZES:
            times = harness.interleaved(ways(*arrays(batch, channels, size)))
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

    x = RNG.normal(size=(1, 3, 224, 224)).astype(np.float32)
    for name, backend in (("jax", ml.JaxBackend()), ("mlx", ml.MlxBackend())):
        ways = {}
        for way, operations in (("without", frozenset()), ("with", frozenset({ops.conv}))):
            claiming = with_claim(backend, operations)
            compiled = ml.compile(resnet18(), claiming, shapes={"input": [1, 3, 224, 224]}, static_inference=True)
            compiled.bind(compiled.randomize_params(0))
            image = {"input": claiming.array(x)}
            ways[way] = lambda c=compiled, b=claiming, i=image: b.synchronize(c(i)["output"])
        times = harness.interleaved(ways, 20)
        print(
            f"resnet18 at 224 on {name}: {times['with'] / times['without']:.3f} ({times['with'] * 1e3:.1f} ms)",
            flush=True,
        )


def formats() -> None:
    """ResNet-18 and four convolutions with each ``memory_format``, over the program without the option."""
    from mithril.models import Conv2d, MaxPool2d, Relu

    chain = ml.Model()
    for k, size in enumerate((3, 64, 64, 64)):
        chain += Conv2d(size, 64, kernel_size=3, padding=1, name=f"conv{k}")
        chain += Relu()
    chain += MaxPool2d(2)
    for title, model, shape in (("chain", chain, (8, 3, 56, 56)), ("resnet18", resnet18(), (1, 3, 224, 224))):
        x = models.random(*shape)
        for name in ("torch", "mlx"):
            for is_static in (False, True):
                ways = {}
                for wish in (None, "channels_first", "channels_last", "auto"):
                    options = {"shapes": {"input": list(shape)}, "inference": True, "static_inference": is_static}
                    compiled = ml.compile(model, name, memory_format=wish, **options)
                    compiled.bind(compiled.randomize_params(0))
                    image, backend = {"input": compiled.backend.array(x)}, compiled.backend
                    ways[str(wish)] = lambda c=compiled, i=image, b=backend: b.synchronize(c(i))
                times = harness.interleaved(ways, 3, 5)
                ratios = harness.ratios(times, "None")
                print(f"  {title} on {name}, {'embedded' if is_static else 'bound'}: {ratios}", flush=True)


def networks() -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return a perceptron, a network of batch norms with residuals and an encoder, with the shapes of their inputs."""
    import mithril.models as m

    blocks = []
    for _ in range(4):
        convolutions = [m.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(2)]
        inner = m.Model(convolutions[0], m.BatchNorm2d(32), m.Relu(), convolutions[1], m.BatchNorm2d(32))
        blocks += [m.Residual(inner), m.Relu()]
    first = (m.Conv2d(3, 32, 3, padding=1), m.BatchNorm2d(32), m.Relu())
    linears = [layer for _ in range(4) for layer in (m.Linear(512), m.Gelu())]
    return {
        "perceptron": (m.Model(*linears, m.Linear(10)), (16, 512)),
        "images": (m.Model(*first, *blocks, m.GlobalAvgPool2d(), m.Flatten(), m.Linear(10)), (1, 3, 32, 32)),
        "encoder": (m.Model(*[m.TransformerEncoderLayer(128, 4, 512) for _ in range(4)]), (1, 64, 128)),
    }


def inference() -> None:
    """Times with bound weights over those with embedded ones."""

    for title, (model, shape) in networks().items():
        x = models.random(*shape)
        for name in ("numpy", "torch", "jax", "mlx", "c", "ggml"):
            ways = {}
            for way in ("plain", "inference", "static_inference"):
                compiled = ml.compile(
                    model, name, shapes={"input": list(shape)}, **({} if way == "plain" else {way: True})
                )
                compiled.bind(compiled.randomize_params(0))
                image, backend = {"input": compiled.backend.array(x)}, compiled.backend
                ways[way] = lambda c=compiled, i=image, b=backend: b.synchronize(c(i))
            times = harness.interleaved(ways, 4)
            ratios = harness.ratios(times, "static_inference")
            print(f"  {title} on {name}: {ratios} ({times['static_inference'] * 1e3:.2f} ms)", flush=True)


PARTS = {
    "channels": channels, "weights": weights, "images": images, "mlx": mlx, "resnet": resnet, "formats": formats,
    "inference": inference,
}  # fmt: skip

if __name__ == "__main__":
    harness.run_parts(__doc__, PARTS)
