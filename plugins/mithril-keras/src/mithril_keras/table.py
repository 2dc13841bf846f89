"""The table of Keras layers and operations: one function each, with the configuration as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# What happens to the mask of the first input: as in Keras, layers pass it on, or end it; ``own`` rows return tensors
# with their masks.
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Masks = Literal["pass", "end", "own"]


@dataclass(frozen=True)
class Row:
    """A function ``f(weights, x, *, ...)``; its keywords are those of the layer's configuration and of its call."""

    name: str
    function: Callable[..., Any]
    masks: Masks
    keywords: Mapping[str, Any]  # names and defaults
    takes_all: bool = False  # whether it takes every setting


LAYERS: dict[str, Row] = {}
OPERATIONS: dict[str, Row] = {}


def layer(*names: str, masks: Masks = "end") -> Decorator:
    """Register the function of layers of these classes."""
    return _register(LAYERS, names, masks)


def operation(*names: str) -> Decorator:
    """Register the function of operations of ``keras.ops``."""
    return _register(OPERATIONS, names, "end")


def _register(table: dict[str, Row], names: tuple[str, ...], masks: Masks) -> Decorator:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(function).parameters.values())
        keywords = {p.name: p.default for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
        for name in names:
            table[name] = Row(name, function, masks, keywords, takes_all)
        return function

    return register
