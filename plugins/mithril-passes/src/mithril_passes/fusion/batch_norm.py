"""Inference: fold a batch norm into the weights and bias of the preceding product.

Weights of bound parameters are scaled once. Otherwise each call scales them, which must cost less than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mithril.graph import Graph, Size, Value, substitute, symbols
from mithril.ops import add, batch_norm, conv, linear, reshape, rsqrt
from mithril.passes import PassContext, Rule, RuleSet, rewrite, rule

NO_CONTEXT = PassContext()


def _is_profitable(weights: Value, data: Value) -> bool | str:
    """Whether folding is profitable: scaling costs one pass over the weights, and saves two over the result.

    A symbolic size counts as its least: one program runs all sizes, and few images save little.
    """
    # Per channel, roughly as many as in the result.
    saved = 2 * _least(data.shape[:1]) * _least(data.shape[2:])
    return saved > _least(weights.shape[1:]) or "its weights are larger than what would be saved"


def _least(sizes: Sequence[Size]) -> int:
    """Return the number of elements of a shape of the least sizes."""
    return math.prod(int(substitute(n, {s.name: max(s.low, 1) for s in symbols(n)})) for n in sizes)


def _reshape_for_outputs(factor: Value, weights: Value) -> Any:
    return reshape(factor, shape=(weights.shape[0], *[1] * (weights.ndim - 1)))


def _per_channel(value: Any, weights: Value) -> Any:
    return reshape(value, shape=(1, weights.shape[0], *[1] * (weights.ndim - 2)))


def _conv(
    x: Any,
    w: Any,
    s: Any,
    b: Any,
    m: Any,
    v: Any,
    *,
    eps: Any = 1e-5,
    stride: Any = (1, 1),
    padding: Any = ((0, 0), (0, 0)),
    dilation: Any = (1, 1),
    groups: Any = 1,
) -> Any:
    y = conv(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return batch_norm(y, s, b, m, v, eps=eps)


def _conv_bias(
    x: Any,
    w: Any,
    c: Any,
    s: Any,
    b: Any,
    m: Any,
    v: Any,
    *,
    shape: Any = (1, 4, 1, 1),
    eps: Any = 1e-5,
    stride: Any = (1, 1),
    padding: Any = ((0, 0), (0, 0)),
    dilation: Any = (1, 1),
    groups: Any = 1,
) -> Any:
    y = conv(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return batch_norm(add(y, reshape(c, shape=shape)), s, b, m, v, eps=eps)


def _conv_added(
    x: Any,
    w: Any,
    c: Any,
    s: Any,
    b: Any,
    m: Any,
    v: Any,
    *,
    eps: Any = 1e-5,
    stride: Any = (1, 1),
    padding: Any = ((0, 0), (0, 0)),
    dilation: Any = (1, 1),
    groups: Any = 1,
) -> Any:
    y = conv(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return batch_norm(add(y, c), s, b, m, v, eps=eps)


def _is_per_channel(added: Value, weights: Value) -> bool:
    """Whether a value has the shape of a convolution's bias, as a constant bias does."""
    return added.shape == (1, weights.shape[0], *[1] * (weights.ndim - 2))


def _rules(pays: Callable[[Value, Value], bool | str]) -> list[Rule]:
    """Return the rules for weights and data where ``pays`` is true."""
    return [
        rule(
            _conv,
            lambda x, w, s, b, m, v, *, eps, **windows: add(
                conv(x, w * _reshape_for_outputs(s * rsqrt(v + eps), w), **windows),
                _per_channel(b - m * (s * rsqrt(v + eps)), w),
            ),
            when=lambda x, w, s, b, m, v: pays(w, x),
            exact=False,
            name="batch norm of a convolution",
        ),
        rule(
            _conv_bias,
            lambda x, w, c, s, b, m, v, *, eps, shape, **windows: add(
                conv(x, w * _reshape_for_outputs(s * rsqrt(v + eps), w), **windows),
                _per_channel((c - m) * (s * rsqrt(v + eps)) + b, w),
            ),
            when=lambda x, w, c, s, b, m, v, *, shape: c.ndim == 1 and tuple(shape[1:2]) == c.shape and pays(w, x),
            exact=False,
            name="batch norm of a convolution with bias",
        ),
        rule(
            _conv_added,
            lambda x, w, c, s, b, m, v, *, eps, **windows: add(
                conv(x, w * _reshape_for_outputs(s * rsqrt(v + eps), w), **windows),
                _per_channel((reshape(c, shape=(w.shape[0],)) - m) * (s * rsqrt(v + eps)) + b, w),
            ),
            when=lambda x, w, c, s, b, m, v: _is_per_channel(c, w) and pays(w, x),
            exact=False,
            name="batch norm of a convolution with a bias of its shape",
        ),
        rule(
            lambda x, w, c, s, b, m, v, *, eps=1e-5: batch_norm(linear(x, w, c), s, b, m, v, eps=eps),
            lambda x, w, c, s, b, m, v, *, eps: linear(
                x, w * _reshape_for_outputs(s * rsqrt(v + eps), w), (c - m) * (s * rsqrt(v + eps)) + b
            ),
            when=lambda x, w, c, s, b, m, v: x.ndim == 2 and pays(w, x),
            exact=False,
            name="batch norm of a linear",
        ),
        rule(
            lambda x, w, s, b, m, v, *, eps=1e-5: batch_norm(linear(x, w, None), s, b, m, v, eps=eps),
            lambda x, w, s, b, m, v, *, eps: linear(
                x, w * _reshape_for_outputs(s * rsqrt(v + eps), w), b - m * (s * rsqrt(v + eps))
            ),
            when=lambda x, w, s, b, m, v: x.ndim == 2 and pays(w, x),
            exact=False,
            name="batch norm of a linear without bias",
        ),
    ]


class BatchNormFolding(RuleSet):
    """The rules, which also apply where only the weights of one binding are scaled."""

    def __init__(self) -> None:
        super().__init__("batch-norm-folding", _rules(_is_profitable))
        self.bound = _rules(lambda weights, data: True)

    def __call__(self, graph: Graph, context: PassContext = NO_CONTEXT) -> Graph:
        return rewrite(graph, self.bound if context.parameters_bound else self.rules)


RULES = BatchNormFolding()
