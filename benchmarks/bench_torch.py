"""Generated PyTorch against the same models typed by hand: eager with autograd, and ``torch.compile``.

``python benchmarks/bench_torch.py [words of the rows]``: microseconds of processor time on one thread, the best of many
interleaved rounds. ``--compile`` adds torch.compile around both, which takes minutes to start;
``--cold`` shows what ``cache=True`` saves a second process instead.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from frameworks import cold, run


class Hand:
    linear, relu = F.linear, torch.relu

    @staticmethod
    def gelu(x: Any) -> Any:
        return F.gelu(x)

    @staticmethod
    def transpose(x: Any, axes: Any) -> Any:
        return x.permute(axes)

    @staticmethod
    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    @staticmethod
    def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
        return F.layer_norm(x, scale.shape, scale, bias)

    @staticmethod
    def conv(x: Any, w: Any, stride: int, padding: int) -> Any:
        return F.conv2d(x, w, None, stride, padding)

    @staticmethod
    def max_pool(x: Any) -> Any:
        return F.max_pool2d(x, 3, 2, 1)

    @staticmethod
    def batch_norm(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
        return F.batch_norm(x, mean, var, scale, bias)


def eager(function: Any) -> Any:
    def call(p: Any, x: Any) -> Any:
        with torch.no_grad():
            return function(p, x)

    return call


def autograd(function: Any) -> Any:
    leaves: dict[str, Any] = {}

    def call(p: Any, arguments: Any) -> Any:
        if not leaves:
            leaves.update({n: x.detach().clone().requires_grad_() for n, x in p.items()})
        y = function(leaves, arguments[0])
        gradients = torch.autograd.grad(y, list(leaves.values()), arguments[1])
        return {**dict(zip(leaves, gradients, strict=True)), "": y.detach()}

    return call


def main() -> None:
    if "--cold" in sys.argv:
        cold("torch", {})
        cold("torch", {"jit": True}, case="MLP, batch 32", processes=2)
        return
    words = [w for w in sys.argv[1:] if not w.startswith("-")]
    torch.set_num_threads(1)
    forward: dict[str, Any] = {"by hand": eager}
    gradients: dict[str, Any] = {"by hand": autograd}
    options: dict[str, Any] = {"mithril": {}}
    if "--compile" in sys.argv:
        forward["torch.compile"] = lambda function: eager(torch.compile(function))
        gradients["torch.compile"] = lambda function: autograd(torch.compile(function))
        options["mithril, jit"] = {"jit": True}
    run("torch", Hand, forward, gradients, lambda made: made, words, options)


if __name__ == "__main__":
    main()
