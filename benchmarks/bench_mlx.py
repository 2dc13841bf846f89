"""Generated MLX against the same models typed by hand, evaluated lazily or through ``mx.compile``.

``OPENBLAS_NUM_THREADS=1 python benchmarks/bench_mlx.py [words of the rows]``: microseconds of processor time, the best
of many interleaved rounds. ``--compile`` adds mx.compile. On Linux this measures mithril's overhead, not Apple's
hardware. Hand-written code profits from the BLAS that mithril provides, too; ``MITHRIL_MLX_BLAS=off`` leaves it out.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from frameworks import run

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


def vjp(function: Any) -> Any:
    def gradients(p: Any, arguments: Any) -> Any:
        x, g = arguments
        names = list(p)
        y, gradients = mx.vjp(lambda *w: [function(dict(zip(names, w, strict=True)), x)], list(p.values()), [g])
        return {**dict(zip(names, gradients, strict=True)), "": y[0]}

    return gradients


def finish(outputs: Any) -> Any:
    mx.eval(outputs)
    return outputs


def main() -> None:
    words = [w for w in sys.argv[1:] if not w.startswith("-")]
    forward: dict[str, Any] = {"by hand": lambda function: function}
    gradients: dict[str, Any] = {"by hand": vjp}
    options: dict[str, Any] = {"mithril": {}}
    if "--compile" in sys.argv:
        forward["mx.compile"] = mx.compile
        gradients["mx.compile"] = lambda function: mx.compile(vjp(function))
        options["mithril, jit"] = {"jit": True}
    run("mlx", Hand, forward, gradients, finish, words, options)


if __name__ == "__main__":
    main()
