"""Channels first or last: chains of convolutions on JAX and PyTorch, in both orders, interleaved.

``OMP_NUM_THREADS=1 NPROC=1 python benchmarks/bench_layout.py``: ratios are the time of channels first over the time of
channels last, which includes the transposes at both ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from interleaved import interleaved

SIZES = ((1, 64, 56), (8, 64, 28), (8, 32, 28), (1, 256, 14))
DEPTH = 4
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


def main() -> None:
    print(f"{DEPTH} convolutions of 3x3 and relu, channels first / last")
    for name, ways in (("jax", jax_ways), ("torch", torch_ways)):
        for batch, channels, size in SIZES:
            times = interleaved(ways(*arrays(batch, channels, size)))
            ratio = times["first"] / times["last"]
            print(f"  {name:5} batch {batch}, {channels} channels, {size}x{size}: {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
