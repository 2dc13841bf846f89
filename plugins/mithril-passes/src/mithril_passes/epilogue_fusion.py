"""What follows a product, merged into it: backends with such kernels save a pass over the result."""

from __future__ import annotations

from typing import Any

from mithril.ops import gelu, linear, relu, sigmoid, silu, tanh
from mithril.rewrite import RuleSet, rule

ACTIVATIONS: dict[str, Any] = {
    "relu": lambda y: relu(y),
    "gelu": lambda y: gelu(y),
    "gelu_tanh": lambda y: gelu(y, approximate="tanh"),
    "silu": lambda y: silu(y),
    "sigmoid": lambda y: sigmoid(y),
    "tanh": lambda y: tanh(y),
}


def _merged(name: str, activation: Any) -> list[Any]:
    return [
        rule(
            lambda x, w, b: activation(linear(x, w, b)),
            lambda x, w, b: linear(x, w, b, activation=name),
            exact=False,
            name=f"linear and {name}",
        ),
        rule(
            lambda x, w: activation(linear(x, w, None)),
            lambda x, w: linear(x, w, activation=name),
            exact=False,
            name=f"linear without bias and {name}",
        ),
    ]


RULES = RuleSet("linear-activation", [r for name, f in ACTIVATIONS.items() for r in _merged(name, f)])
