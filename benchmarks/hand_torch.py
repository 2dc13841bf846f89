"""Functions of PyTorch for the models of ``models.py``, typed by hand: eager with autograd, and ``torch.compile``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from harness import THREADS

torch.set_num_threads(THREADS)


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


def finish(outputs: Any) -> Any:
    return outputs


FORWARD = {"by hand": eager}
GRADIENTS = {"by hand": autograd}
COMPILED = {
    "torch.compile": (
        lambda function: eager(torch.compile(function)),
        lambda function: autograd(torch.compile(function)),
    )
}
