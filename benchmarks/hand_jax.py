"""Functions of JAX for the models of ``models.py``, typed by hand with ``jax.jit`` and ``jax.vjp``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

finish = jax.block_until_ready


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
    def conv(x: Any, w: Any, stride: int, padding: int) -> Any:
        around = ((padding, padding),) * 2
        return jax.lax.conv_general_dilated(x, w, (stride, stride), around, dimension_numbers=("NCHW", "OIHW", "NCHW"))

    @staticmethod
    def max_pool(x: Any) -> Any:
        around = ((0, 0), (0, 0), (1, 1), (1, 1))
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), around)

    @staticmethod
    def batch_norm(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
        mean, var, scale, bias = (v[:, None, None] for v in (mean, var, scale, bias))
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


def gradients_of(function: Any) -> Any:
    def gradients(p: Any, arguments: Any) -> Any:
        x, g = arguments
        y, pull = jax.vjp(lambda p: function(p, x), p)
        return {**pull(g)[0], "": y}

    return jax.jit(gradients)


FORWARD = {"by hand": jax.jit}
GRADIENTS = {"by hand": gradients_of}
