"""Functions of MLX for the models of ``models.py``, typed by hand: evaluated lazily, and through ``mx.compile``.

They profit from the BLAS that mithril provides, too; ``MITHRIL_MLX_BLAS=off`` leaves it out.
"""

from __future__ import annotations

import importlib
from typing import Any

from mithril_mlx.mlx_loader import mx

nn = importlib.import_module("mlx.nn")  # once mithril has chosen the BLAS of MLX
pool = nn.MaxPool2d(3, 2, 1)


class Hand:
    transpose = mx.transpose

    @staticmethod
    def relu(x: Any) -> Any:
        return mx.maximum(x, 0)

    @staticmethod
    def gelu(x: Any) -> Any:
        return x * (1 + mx.erf(x / 2**0.5)) / 2

    @staticmethod
    def linear(x: Any, w: Any, b: Any) -> Any:
        return mx.addmm(b, x, w.T)

    @staticmethod
    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        mask = "causal" if causal else None
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)

    @staticmethod
    def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
        return mx.fast.layer_norm(x, scale, bias, 1e-5)

    @staticmethod
    def conv(x: Any, w: Any, stride: int, padding: int) -> Any:
        y = mx.conv2d(mx.moveaxis(x, 1, -1), mx.moveaxis(w, 1, -1), stride, padding)
        return mx.moveaxis(y, -1, 1)

    @staticmethod
    def max_pool(x: Any) -> Any:
        return mx.moveaxis(pool(mx.moveaxis(x, 1, -1)), -1, 1)

    @staticmethod
    def batch_norm(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
        mean, var, scale, bias = (v[:, None, None] for v in (mean, var, scale, bias))
        return (x - mean) * mx.rsqrt(var + 1e-5) * scale + bias


def gradients_of(function: Any) -> Any:
    def gradients(p: Any, arguments: Any) -> Any:
        x, g = arguments
        names = list(p)
        y, gradients = mx.vjp(lambda *w: [function(dict(zip(names, w, strict=True)), x)], list(p.values()), [g])
        return {**dict(zip(names, gradients, strict=True)), "": y[0]}

    return gradients


def finish(outputs: Any) -> Any:
    mx.eval(outputs)
    return outputs


FORWARD = {"by hand": lambda function: function}
GRADIENTS = {"by hand": gradients_of}
COMPILED = {"mx.compile": (mx.compile, lambda function: mx.compile(gradients_of(function)))}
