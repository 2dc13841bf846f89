"""Epilogue fusion: fuse bias and activation into the product, which saves a pass over the result."""

from __future__ import annotations

from typing import Any

from mithril.ops import ACTIVATIONS, linear
from mithril.rewrite import RuleSet, rule

# Activations that kernels of products apply before they store the result.
EPILOGUES = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")


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


RULES = RuleSet("linear-activation", [r for name in EPILOGUES for r in _merged(name, ACTIVATIONS[name])])
