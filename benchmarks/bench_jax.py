"""Generated JAX against the same models typed by hand with ``jax.jit`` and ``jax.vjp``.

``python benchmarks/bench_jax.py [words of the rows]``: microseconds, the best of many rounds in turns.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("NPROC", "1")

import jax
import jax.numpy as jnp
from frameworks import run


class Hand:
    relu, transpose = jax.nn.relu, jnp.transpose

    @staticmethod
    def gelu(x: Any) -> Any:
        return jax.nn.gelu(x, approximate=False)

    @staticmethod
    def linear(x: Any, w: Any, b: Any) -> Any:
        return x @ w.T + b

    @staticmethod
    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        s = (q @ jnp.swapaxes(k, -1, -2)) * q.shape[-1] ** -0.5
        if causal:
            n = q.shape[2]
            s = jnp.where(jnp.tril(jnp.ones((n, n), bool)), s, -jnp.inf)
        return jax.nn.softmax(s, axis=-1) @ v

    @staticmethod
    def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
        return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * scale + bias

    @staticmethod
    def conv(x: Any, w: Any, b: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, w, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NCHW", "OIHW", "NCHW"))
        return y if b is None else y + b[:, None, None]

    @staticmethod
    def batch_norm(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
        mean, var, scale, bias = (v[:, None, None] for v in (mean, var, scale, bias))
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


def vjp(function: Any) -> Any:
    def gradients(p: Any, given: Any) -> Any:
        x, g = given
        y, pull = jax.vjp(lambda p: function(p, x), p)
        return {**pull(g)[0], "": y}

    return jax.jit(gradients)


def main() -> None:
    ways = {"by hand": jax.jit}
    run("jax", Hand, ways, {"by hand": vjp}, jax.block_until_ready, sys.argv[1:], {"mithril": {}})


if __name__ == "__main__":
    main()
